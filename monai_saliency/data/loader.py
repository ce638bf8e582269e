"""A loader that loses no case: an error in a worker reaches the consumer, or the list of failures."""

from __future__ import annotations

import copy
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from monai.data import ThreadBuffer, list_data_collate
from monai.data.utils import no_collation
from monai.utils import CommonKeys
from torch.utils.data import DataLoader, Dataset, Subset

from monai_saliency.errors import AdviceError, CaseError, as_case_error
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.arguments import flag, instance, torch_device, whole_number


@dataclass
class _Failed:
    """The message of a worker for an item that failed. The traceback is text, since tracebacks cannot be pickled."""

    error: CaseError
    trace: str

    @classmethod
    def of(cls, error: BaseException, name: str, before: str = "") -> _Failed:
        return cls(as_case_error(error, name, before=before), "".join(traceback.format_exception(error)))


class _Guarded(Dataset):
    """Items of a dataset, pickled where they are ``packed``. An item that fails is returned as its error."""

    def __init__(self, dataset: Dataset, names: Sequence[str], packed: bool = False) -> None:
        self.dataset = dataset
        self.names = names
        self.packed = packed

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        try:
            item = self.dataset[index]
            if not isinstance(item, Mapping):
                raise AdviceError(
                    f"the transforms gave a {type(item).__name__}; they must give one dictionary for each case, so "
                    "leave out those that cut a case into several"
                )
            # A worker process would never tell that an item cannot be pickled, and its consumer would wait for ever.
            return pickle.dumps(item) if self.packed else item
        except Exception as error:
            failed = _Failed.of(error, self.names[index])
            return pickle.dumps(failed) if self.packed else failed


def _use_gpu(number: int | None) -> None:
    """Make a GPU the current one of this thread: each new thread starts with the first one."""
    if number is not None:
        torch.cuda.set_device(number)


def _own_signals(worker: int) -> None:
    """Prepare a worker process: its parent handles Ctrl-C, and SIGTERM ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class CohortLoader:
    """Loads a cohort ahead of its consumer, batch by batch.

    Threads or processes run the transforms. Another thread collates cases of one shape and copies the batch to the
    device, so that a batch is ready when the network needs it. A case waits until there are enough cases of its shape
    for a batch. When more than four batches of cases wait, the oldest case and the others of its shape become a smaller
    batch. So the batches depend only on the order, the shapes and the devices of the cases.

    A case that cannot be loaded is added to ``failures``, and loading continues. The loader has no length, since it is
    not known how many cases will load. (MONAI's ``ThreadDataLoader`` ends early without an error when a case fails.)

    Args:
        dataset: the dataset of the cases. ``dataset.data`` holds their dictionaries with the key ``case``.
        failures: the list of failed cases. None raises the first failure.
        batch_size: the largest number of cases in a batch.
        num_workers: the number of threads or processes that run transforms. 0 loads one case at a time, in a thread.
        processes: use processes instead of threads, for transforms that hold Python's global lock. They cannot
            use a GPU.
        device: the device to copy the images to. Default: the images stay where they are.
        image_key: the key of the image whose shape decides which cases share a batch.

    Example::

        >>> import torch
        >>> from monai_saliency.data import CachedDataset
        >>> cases = [{"case": name, "image": torch.zeros(1, 4, 4)} for name in "abc"]
        >>> for batch in CohortLoader(CachedDataset(cases), batch_size=2):
        ...     print(batch["case"], tuple(batch["image"].shape))
        ['a', 'b'] (2, 1, 4, 4)
        ['c'] (1, 1, 4, 4)
    """

    def __init__(
        self,
        dataset: Any,
        failures: Failures | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        processes: bool = False,
        device: torch.device | str | None = None,
        image_key: str = CommonKeys.IMAGE,
    ) -> None:
        batch_size = whole_number("batch_size", batch_size, 1)
        if not isinstance(getattr(dataset, "data", None), Sequence):
            instance("dataset", dataset, (), "a dataset of cases such as CachedDataset(find_cases(folder), transform)")
        #: the dataset of the whole cohort, also where this loader takes some of its cases
        self.cohort = self.dataset = dataset
        self.failures = instance("failures", failures, Failures, "Failures(path)", none=True)
        self.batch_size = batch_size
        self.num_workers = whole_number("num_workers", num_workers, 0)
        self.processes = flag("processes", processes)
        self.device = torch_device("device", device)
        self.image_key = image_key
        self.names = [str(case["case"]) for case in dataset.data]

    def take(self, indices: Sequence[int]) -> CohortLoader:
        """A loader of some of the cases.

        Args:
            indices: the indices of the cases in the cohort.
        """
        taken = copy.copy(self)
        taken.dataset = Subset(self.dataset, indices)
        taken.names = [self.names[index] for index in indices]
        return taken

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = self._batches_or_error(torch.cuda.current_device() if torch.cuda.is_initialized() else None)
        buffer = ThreadBuffer(batches, 2)
        try:
            for batch in buffer:
                if isinstance(batch, Exception):
                    raise batch
                if not isinstance(batch, _Failed):
                    yield batch
                elif self.failures is None:
                    raise batch.error
                else:
                    self.failures.add(batch.error.case, "load", batch.error, batch.trace)
        finally:
            # Also when the consumer stops early or is interrupted.
            buffer.stop()
            batches.close()

    def _batches_or_error(self, gpu: int | None) -> Generator[Any, None, None]:
        """The work of the buffer's thread. Errors go to the consumer, which raises them."""
        try:
            _use_gpu(gpu)
            yield from self._batches(gpu)
        except Exception as error:
            yield error

    def _batches(self, gpu: int | None) -> Iterator[dict[str, Any] | _Failed]:
        """Batches of cases of one shape on one device, and failed cases."""
        waiting: dict[Any, list[dict[str, Any]]] = {}  # by shape, the shape of the oldest case first
        for item in self._items(gpu):
            if isinstance(item, _Failed):
                yield item
                continue
            image = item.get(self.image_key)
            kind = tuple(getattr(image, name, None) for name in ("shape", "dtype", "device"))
            waiting.setdefault(kind, []).append(item)
            if len(waiting[kind]) == self.batch_size:
                yield from self._collated(waiting.pop(kind))
            elif sum(map(len, waiting.values())) > 4 * self.batch_size:
                yield from self._collated(waiting.pop(next(iter(waiting))))
        for items in waiting.values():
            yield from self._collated(items)

    def _collated(self, items: list[dict[str, Any]]) -> Iterator[dict[str, Any] | _Failed]:
        """A batch of the items. If they do not fit together: each item as a batch, or as a failed case."""
        try:
            if self.image_key not in items[0]:
                raise KeyError(f"the item has no {self.image_key!r}, but {sorted(map(str, items[0]))}")
            batch = self._on_device(list_data_collate(items))
        except Exception as error:
            if len(items) == 1:
                yield _Failed.of(error, str(items[0].get("case")), "no batch can be made of it: ")
            else:
                yield from chain.from_iterable(self._collated([item]) for item in items)
        else:
            yield batch

    def _items(self, gpu: int | None) -> Iterator[Any]:
        """The items and failed cases, in the order of the cohort."""
        guarded = _Guarded(self.dataset, self.names)
        if self.processes and self.num_workers:
            settings: dict[str, Any] = {"collate_fn": no_collation, "worker_init_fn": _own_signals}
            packed = _Guarded(self.dataset, self.names, packed=True)
            loaded = DataLoader(packed, None, num_workers=self.num_workers, prefetch_factor=1, **settings)
            yield from map(pickle.loads, loaded)
        else:
            with ThreadPoolExecutor(max(self.num_workers, 1), "CohortLoader", _use_gpu, (gpu,)) as pool:
                futures: deque[Future] = deque()
                try:
                    for index in range(len(guarded)):
                        futures.append(pool.submit(guarded.__getitem__, index))
                        if len(futures) > self.num_workers:
                            yield futures.popleft().result()
                    while futures:
                        yield futures.popleft().result()
                finally:
                    for future in futures:
                        future.cancel()

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.device is None or self.device.type == "cpu":
            return batch
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                # Only memory of the host can be pinned, and the preprocessing may have moved the tensor already.
                pinned = value.pin_memory() if self.device.type == "cuda" and value.is_cpu else value
                batch[key] = pinned.to(self.device, non_blocking=True)
        return batch
