"""A loader that cannot lose a case: what a worker raises reaches the consumer, or the list of failures."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import torch
from monai.data import list_data_collate
from monai.utils import CommonKeys
from torch.utils.data import DataLoader, Dataset

from monai_saliency.errors import CaseError, as_case_error
from monai_saliency.failures import Failures

__all__ = ["CohortLoader"]


@dataclass
class _Failed:
    """What a worker sends instead of an item. The traceback travels as text: tracebacks cannot be pickled."""

    error: CaseError
    trace: str


class _Guarded(Dataset):
    """Items of a dataset, or what went wrong with them: exceptions never leave ``__getitem__``."""

    def __init__(self, dataset: Dataset, names: Sequence[str]) -> None:
        self.dataset = dataset
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return _Failed(as_case_error(error, self.names[index]), "".join(traceback.format_exception(error)))


class CohortLoader:
    """Loads a cohort ahead of its consumer, in order, batch by batch.

    Transforms run in threads or processes, then a thread collates neighbouring cases of one shape and copies the
    batch to the device, so that the next one is there when the network asks for it. All queues are bounded. A case
    that cannot be loaded goes to ``failures`` and the cohort goes on. The loader has no length, since it does not know
    how many cases load; MONAI's ``ThreadDataLoader`` has one, and ends early without a word where a case fails.

    Args:
        dataset: the cases, item by item; ``dataset.data`` holds their dictionaries with the key ``case``.
        failures: where failed cases go; they are raised when None.
        batch_size: cases in a batch, at the most: a case of another shape starts a new one.
        num_workers: how many threads or processes run transforms; 0 runs them in the collating thread.
        processes: processes instead of threads, for transforms that hold Python's global lock.
        prefetch: batches that are ready ahead of the consumer.
        device: where to copy the images to; nowhere by default.
        image_key: the image whose shape decides what shares a batch.
    """

    def __init__(
        self,
        dataset: Any,
        failures: Failures | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        processes: bool = False,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        image_key: str = CommonKeys.IMAGE,
    ) -> None:
        self.dataset = dataset
        self.failures = failures
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.processes = processes
        self.prefetch = prefetch
        self.device = torch.device(device) if device is not None else None
        self.image_key = image_key
        self.names = [str(case["case"]) for case in dataset.data]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        ready: Queue = Queue(maxsize=max(1, self.prefetch))
        stop = Event()
        producer = Thread(target=self._produce, args=(ready, stop), name="CohortLoader", daemon=True)
        producer.start()
        try:
            while True:
                try:
                    batch = ready.get(timeout=1)
                except Empty:
                    if not producer.is_alive():
                        raise RuntimeError("the loading thread ended without a word") from None
                    continue
                if batch is None:
                    return
                if isinstance(batch, BaseException):
                    raise batch
                if isinstance(batch, _Failed):
                    self._fail(batch)
                    continue
                yield batch
        finally:
            # Reached at the end, on an error, and when the consumer stops early or is interrupted.
            stop.set()
            producer.join()

    def _fail(self, failed: _Failed) -> None:
        if self.failures is None:
            raise failed.error
        self.failures.add(failed.error.case, "load", failed.error, failed.trace)

    def _produce(self, ready: Queue, stop: Event) -> None:
        def put(thing: Any) -> None:
            while not stop.is_set():
                try:
                    ready.put(thing, timeout=0.2)
                    return
                except Full:
                    continue

        try:
            waiting: list[dict[str, Any]] = []
            for item in self._items(stop):
                if stop.is_set():
                    return
                if isinstance(item, _Failed):
                    put(item)
                    continue
                if waiting and item[self.image_key].shape != waiting[0][self.image_key].shape:
                    put(self._collate(waiting))
                    waiting = []
                waiting.append(item)
                if len(waiting) == self.batch_size:
                    put(self._collate(waiting))
                    waiting = []
            if waiting:
                put(self._collate(waiting))
            put(None)
        except BaseException as error:  # the consumer raises it: an exception that dies with its thread is a lost case
            put(error)

    def _items(self, stop: Event) -> Iterator[Any]:
        """Items in order, or what went wrong with them."""
        guarded = _Guarded(self.dataset, self.names)
        if self.num_workers == 0:
            yield from (guarded[index] for index in range(len(guarded)))
        elif self.processes:
            yield from DataLoader(guarded, batch_size=None, num_workers=self.num_workers, prefetch_factor=1)
        else:
            with ThreadPoolExecutor(self.num_workers, thread_name_prefix="CohortLoader") as pool:
                futures: deque[Future] = deque()
                try:
                    for index in range(len(guarded)):
                        futures.append(pool.submit(guarded.__getitem__, index))
                        if len(futures) > self.num_workers:
                            yield futures.popleft().result()
                    while futures and not stop.is_set():
                        yield futures.popleft().result()
                finally:
                    for future in futures:
                        future.cancel()

    def _collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = list_data_collate(items)
        if self.device is not None and self.device.type != "cpu":
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    pinned = value.pin_memory() if self.device.type == "cuda" else value
                    batch[key] = pinned.to(self.device, non_blocking=True)
        return batch
