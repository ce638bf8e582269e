"""Several devices in one process: the GPUs of a workstation share the masks of each case, a thread and a replica of the
network for each. If a forward takes milliseconds, one process for each GPU (``torchrun``) keeps them busier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event, Lock
from typing import Any

import torch
from monai.inferers import Inferer

from monai_saliency.cases import Case
from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.errors import AdviceError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, evaluating
from monai_saliency.inferers.inferer import Meet, PerturbationInferer, Sharing
from monai_saliency.inferers.sharing import WorkerScores, take_scores
from monai_saliency.sharding import Part, units
from monai_saliency.storage.score_store import CaseScores
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

    The network itself serves the first device in the list that it lies on. Every other device has a copy, made anew
    for each batch of images. The inputs lie on one of the devices, and the maps come there.

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

        Raises:
            ValueError: when the inputs lie elsewhere or the network cannot be copied.
        """
        part, count = part or Part(), len(self.devices)
        here = inferer.inputs.split(inputs).images.device
        if here not in self.devices:
            raise ValueError(
                f"the inputs lie on {here}, which is none of `devices` ({', '.join(map(str, self.devices))}): add it, "
                "or move them to one"
            )
        first, threads = self.devices.index(here), _Threads(count)
        with evaluating(network), ThreadPoolExecutor(count, "monai_saliency-device") as pool:
            networks = _copies(network, self.devices)
            futures: list[Future[list[CaseState]]] = []
            try:
                for number, device in enumerate(self.devices):
                    own, more, named = (_moved(each, device) for each in (inputs, args, kwargs))
                    job = partial(
                        inferer.replace(
                            inferer=_on_device(inferer.inferer, device),
                            progress=inferer.progress and number == first,
                            meter=inferer.meter if number == first else None,
                        ).score_here,
                        own,
                        networks[number],
                        more,
                        named,
                        cases=cases and [replace(case, labels=_moved(case.labels, device)) for case in cases],
                        stored=stored and [_SharedScores(each.folder, threads.lock) for each in stored],
                        part=Part(part.index * count + number, part.count * count),
                        meet=threads.meeting(number),
                        guard=threads.guard,
                    )
                    futures.append(pool.submit(_as_here(device, job)))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # After an error, or Ctrl-C, the rest of the others' shares is of no use.
                threads.stop()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, (_Stopped, BrokenBarrierError))):
            raise error
        return futures[first].result()


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


class _SharedScores(CaseScores):
    """A case's scores on disk. One thread at a time finds out whether they belong to this network, so that none removes
    what another one has just begun.
    """

    def __init__(self, folder: Path, lock: Lock) -> None:
        super().__init__(folder)
        self._lock = lock

    def resume(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            super().resume(*args, **kwargs)


def _existing(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Devices with their numbers."""
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


def _copies(network: Callable[..., Any], devices: Sequence[torch.device]) -> list[Callable[..., Any]]:
    """The network for each device: itself for the first one that it lies on, else a copy."""
    if len(devices) == 1:
        return [network]
    if not isinstance(network, torch.nn.Module):
        kind = getattr(network, "__name__", type(network).__name__)
        raise AdviceError(
            f"the network ({kind}) is no torch module, so {len(devices)} devices cannot have copies of it: "
            "give a module, or let processes share the cohort, each of which makes its own (the overlay `torchrun`)"
        )
    homes = _homes(network)
    if len(homes) > 1:
        raise ValueError(
            f"the network lies on several devices ({', '.join(sorted(map(str, homes)))}), so it cannot be copied "
            "to one: move it to one, or run without sharing its masks between devices"
        )
    home = next(iter(homes), devices[0])
    own = devices.index(home) if home in devices else None
    try:
        return [network if i == own else copy.deepcopy(network).to(device) for i, device in enumerate(devices)]
    except Exception as error:
        raise ValueError(
            f"the network ({type(network).__name__}) cannot be copied to {devices[-1]} ({error}): let processes share "
            "the cohort, each of which makes its own (the overlay `torchrun`)"
        ) from error


def _homes(network: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*network.parameters(), *network.buffers())}


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors, alone or in containers, on a device; all else as it is."""
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def _on_device(inferer: Inferer, device: torch.device) -> Inferer:
    """A copy of an inner inferer that runs patches on a device, with the tensors that it holds."""
    taken = copy.copy(inferer)
    for name, value in vars(inferer).items():
        if isinstance(value, torch.nn.Module):
            if _homes(value) - {device}:
                raise ValueError(
                    f"{type(inferer).__name__} holds a network of its own ({name}), which {device} does not have: let "
                    "processes share the cohort, each of which makes its own (the overlay `torchrun`)"
                )
        elif isinstance(value, Inferer):
            setattr(taken, name, _on_device(value, device))
        else:
            setattr(taken, name, value and device if name == "sw_device" else _moved(value, device))
    return taken


def _as_here(device: torch.device, job: Callable[[], list[CaseState]]) -> Callable[[], list[CaseState]]:
    """A job for a thread, which works on a device as the thread that calls this one does."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def run() -> list[CaseState]:
        with torch.cuda.stream(stream), torch.autocast(device.type, dtype, enabled=enabled):
            return job()

    return run
