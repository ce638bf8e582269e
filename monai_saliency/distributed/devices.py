"""Several devices in one process: the GPUs of a workstation share the masks of each case, a thread for each.

There are no processes to start, and there is one loader, one cache and one progress bar. The network's Python code runs
in one process: where a forward takes milliseconds, one process for each GPU (``torchrun``) keeps them busier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event, Lock
from typing import Any

import torch
from monai.inferers import Inferer

from monai_saliency.cases import Case
from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.distributed.replicas import Replicas, network_tensors
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, evaluating
from monai_saliency.inferers.inferer import Meet, PerturbationInferer, Sharing
from monai_saliency.inferers.sharing import WorkerScores, take_scores
from monai_saliency.sharding import Part, units
from monai_saliency.storage.score_store import CaseScores
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.monai_private import tree_map
from monai_saliency.utils.precision import network_arithmetic

__all__ = ["DevicesEngine", "MasksOverDevices"]


class DevicesEngine(Engine):
    """Shares the masks of each case between devices of this process.

    Args:
        devices: the devices; all CUDA devices that this process sees by default.

    Raises:
        ValueError: when there are none, or not those that are named; or, run, when the network lies elsewhere.

    Example::

        >>> DevicesEngine(["cpu", "cpu"]).devices
        [device(type='cpu'), device(type='cpu')]
    """

    def __init__(self, devices: Sequence[str | torch.device] | None = None) -> None:
        if devices is None:
            devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
            if not devices:
                raise ValueError(
                    "there is no CUDA device to share the work of: run without the overlay `devices`, or name devices "
                    "(--saliency_devices \"['cpu', 'cpu']\")"
                )
        self.devices = _existing(devices)

    def run(self, cohort: Cohort) -> None:
        (home,) = _existing([cohort.evaluator.state.device])
        if home not in self.devices:
            raise ValueError(
                f"the network is on {home}, which is none of `saliency_devices` ({', '.join(map(str, self.devices))}): "
                f"add it, or give --device \"$torch.device('{self.devices[0]}')\""
            )
        cohort.explain(units(len(cohort)), sharing=MasksOverDevices(self.devices))


class MasksOverDevices(Sharing):
    """Devices of this process share the masks of each batch of images.

    Device k of n scores part k of n of the masks (:class:`~monai_saliency.sharding.Part`) in its own thread. Batches
    are the same as on one device, so that on equal devices the maps are equal to the bit, and stored scores are found
    by either. The first batch of a case comes more than once: each device runs it, and
    :attr:`Explanation.num_forwards <monai_saliency.Explanation.num_forwards>` counts it each time.

    The network itself serves the first device in the list that it lies on. Every other device has a copy, see
    :class:`~monai_saliency.distributed.replicas.Replicas`.

    The inputs lie on one of the devices, and the maps come there. The progress bar and the meter show that device's
    share.

    Args:
        devices: a device that is named several times has as many threads, and copies of the network.

    Raises:
        ValueError: when there is no such device.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.sliding_window(2, target=ms.ClassScore([0], "none"), sharing=MasksOverDevices(["cpu", "cpu"]))
        >>> explain(torch.ones(1, 1, 4, 4), torch.nn.Flatten()).shape
        torch.Size([1, 1, 4, 4])
    """

    def __init__(self, devices: Sequence[str | torch.device]) -> None:
        self.devices = _existing(devices)
        self._replicas = Replicas()

    def score(
        self,
        inferer: PerturbationInferer,
        inputs: Any,
        network: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        cases: Sequence[Case] | None,
        stored: Sequence[CaseScores] | None,
        part: Part | None,
    ) -> list[CaseState]:
        """Score a batch of images; see :meth:`Sharing.score <monai_saliency.inferers.inferer.Sharing.score>`.

        Args:
            inferer: explains on one device.
            inputs: on one of the devices.
            network: a module, which other devices have copies of.
            args: passed on to the inner inferer.
            kwargs: passed on to the inner inferer.
            cases: each image's name, label map, voxel sizes and file.
            stored: each image's scores on disk.
            part: what all devices run together; all by default.

        Raises:
            ValueError: when the inputs lie elsewhere or the network cannot be copied.
        """
        part = part or Part()
        count = len(self.devices)
        here = inferer.inputs.split(inputs).images.device
        if here not in self.devices:
            raise ValueError(
                f"the inputs lie on {here}, which is none of `devices` ({', '.join(map(str, self.devices))}): add it, "
                "or move them to one"
            )
        first = self.devices.index(here)
        threads = _Threads(count)
        with evaluating(network), ThreadPoolExecutor(count, "monai_saliency-device") as pool:
            networks = self._replicas.networks(network, self.devices)
            futures: list[Future[list[CaseState]]] = []
            try:
                for number, device in enumerate(self.devices):
                    # Copied here, in the streams in which the caller works: threads have their own streams.
                    own, more, named = (_moved(each, device) for each in (inputs, args, kwargs))
                    job = partial(
                        self._worker(inferer, device, number == first, threads).score_here,
                        own,
                        networks[number],
                        more,
                        named,
                        cases=cases and [_with_labels_on(case, device) for case in cases],
                        stored=stored and [_SharedScores(each.folder, threads.lock) for each in stored],
                        part=Part(part.index * count + number, part.count * count),
                        meet=threads.meeting(number),
                        guard=threads.guard,
                    )
                    futures.append(pool.submit(_inside, _surroundings(device), job))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # After an error, or Ctrl-C, the rest of the others' shares is of no use.
                threads.stop()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, (_Stopped, BrokenBarrierError))):
            raise error
        return futures[first].result()

    def _worker(
        self, inferer: PerturbationInferer, device: torch.device, first: bool, threads: _Threads
    ) -> PerturbationInferer:
        """The inferer for one device's share."""
        return inferer.replace(
            target=_LockedTarget(inferer.target, threads.lock),
            inferer=_on_device(inferer.inferer, device),
            progress=inferer.progress and first,
            meter=inferer.meter if first else None,
        )


class _Threads:
    """What the threads of one call share: where they meet, and whether they are to stop."""

    def __init__(self, count: int) -> None:
        self.lock = Lock()
        self._stopped = Event()
        self._barrier = Barrier(count)
        self._scores: list[list[WorkerScores]] = [[] for _ in range(count)]

    def meeting(self, number: int) -> Meet:
        """The meeting at the end of each round, for thread ``number``."""

        def meet(states: Sequence[CaseState]) -> None:
            self._scores[number] = [WorkerScores.of(state) for state in states]
            self._barrier.wait()
            everyones = list(self._scores)
            self._barrier.wait()  # none may replace its scores before all have read them
            take_scores(states, everyones, number)

        return meet

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """Around each call of the network: no call begins once its result is of no use."""
        if self._stopped.is_set():
            raise _Stopped
        with network_arithmetic(device):
            yield

    def stop(self) -> None:
        """Let no further call begin, and nobody wait for the others."""
        self._stopped.set()
        self._barrier.abort()


class _Stopped(Cancelled):
    """A share that was given up, since another failed."""


def _existing(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Devices with their numbers.

    Raises:
        ValueError: when the list is empty, or names a device that does not exist.
    """
    if isinstance(devices, str) or not devices:
        raise ValueError(
            f"`devices` must be a list of at least one device, such as ['cuda:0', 'cuda:1'], got {devices!r}"
        )
    found = []
    for device in map(torch.device, devices):
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {device}: this process sees {torch.cuda.device_count()} CUDA devices")
        # With the number that tensors on it have.
        found.append(torch.empty(0, device=device).device)
    return found


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors, alone or in containers, on a device; all else as it is."""
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def _with_labels_on(case: Case, device: torch.device) -> Case:
    return replace(case, labels=_moved(case.labels, device))


def _on_device(inferer: Inferer, device: torch.device) -> Inferer:
    """A copy of an inner inferer that runs patches on a device, with the tensors that it holds.

    Raises:
        ValueError: when it holds a network that lies elsewhere.
    """
    taken = copy.copy(inferer)
    for name, value in vars(inferer).items():
        if isinstance(value, torch.nn.Module):
            if any(tensor.device != device for tensor in network_tensors(value).values()):
                raise ValueError(
                    f"{type(inferer).__name__} holds a network of its own ({name}), which {device} does not have: let "
                    "processes share the cohort, each of which makes its own (the overlay `torchrun`)"
                )
        elif isinstance(value, Inferer):
            setattr(taken, name, _on_device(value, device))
        elif name == "sw_device":
            setattr(taken, name, value and device)
        else:
            setattr(taken, name, _moved(value, device))
    return taken


def _surroundings(device: torch.device) -> list[AbstractContextManager[Any]]:
    """What a thread must enter to work on a device as the thread that calls this one does."""
    entered: list[AbstractContextManager[Any]] = []
    if device.type == "cuda":
        entered.append(torch.cuda.stream(torch.cuda.current_stream(device)))
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        entered.append(torch.autocast(device.type, dtype, cache_enabled=torch.is_autocast_cache_enabled()))
    return entered


def _inside(surroundings: Sequence[AbstractContextManager[Any]], job: Callable[[], list[CaseState]]) -> list[CaseState]:
    with ExitStack() as stack:
        for each in surroundings:
            stack.enter_context(each)
        return job()


class _SharedScores(CaseScores):
    """A case's scores on disk as one of several threads sees them. Each thread has its own ranges that wait.

    One thread at a time finds out whether what is stored belongs to the same image and network, so that none removes
    what another one has just begun.
    """

    def __init__(self, folder: Path, lock: Lock) -> None:
        super().__init__(folder)
        self._lock = lock

    def resume(self, reference: torch.Tensor, masks: str | None = None, vouch: torch.Tensor | None = None) -> None:
        with self._lock:
            super().resume(reference, masks, vouch)


class _LockedTarget(Target):
    """A target that is bound in one thread at a time: some silence a warning meanwhile, which Python does for all."""

    def __init__(self, target: Target, lock: Lock) -> None:
        self.target = target
        self._lock = lock

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        with self._lock:
            return self.target.bind(reference_output, case)
