"""Several devices in one process: the GPUs of a workstation share the masks of each case, a thread and a replica of the
network for each. If a forward takes milliseconds, one process for each GPU (``torchrun``) keeps them busier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from monai.inferers import Inferer

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.errors import AdviceError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, evaluating
from monai_saliency.inferers.inferer import Job, PerturbationInferer, Sharing
from monai_saliency.inferers.sharing import WorkerScores, take_scores
from monai_saliency.sharding import WHOLE, Part, units
from monai_saliency.storage.score_store import StoredScores
from monai_saliency.utils.monai_private import tree_map
from monai_saliency.utils.precision import network_arithmetic

__all__ = ["DevicesEngine", "MasksOverDevices"]


class DevicesEngine(Engine):
    """Shares the masks of each case between devices of this process.

    Args:
        devices: the devices; all CUDA devices that this process sees by default.

    Raises:
        ValueError: when there are none, or not those that are named.
    """

    def __init__(self, devices: Sequence[str | torch.device] | None = None) -> None:
        if devices is None:
            devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
            if not devices:
                raise ValueError(
                    "this machine has no CUDA device: run without the overlay `devices`, or name devices "
                    "(--saliency_devices \"['cpu', 'cpu']\")"
                )
        self.devices = _existing(devices)

    def run(self, cohort: Cohort) -> None:
        cohort.explain(units(len(cohort)), sharing=MasksOverDevices(self.devices))


class MasksOverDevices(Sharing):
    """Devices of this process share the masks of each batch of images.

    Device k of n scores part k of n of the masks (:class:`~monai_saliency.sharding.Part`) in its own thread. Batches
    are the same as on one device, so that on equal devices the maps are equal to the bit, and stored scores are found
    by either. The first batch of a case comes more than once: each device runs it, and
    :attr:`Explanation.num_forwards <monai_saliency.Explanation.num_forwards>` counts it each time.

    Every device but the network's own has a copy, made anew for each batch of images. The inputs lie on one of the
    devices, and the maps come there.

    Args:
        devices: a device that is named several times has as many threads, and copies of the network.

    Raises:
        ValueError: when a device does not exist.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.sliding_window(2, target=ms.ClassScore([0], "none"), sharing=MasksOverDevices(["cpu", "cpu"]))
        >>> explain(torch.ones(1, 1, 4, 4), torch.nn.Flatten()).shape
        torch.Size([1, 1, 4, 4])
    """

    def __init__(self, devices: Sequence[str | torch.device]) -> None:
        self.devices = _existing(devices)

    def score(self, inferer: PerturbationInferer, job: Job) -> list[CaseState]:
        """Score a batch of images; see :meth:`Sharing.score <monai_saliency.inferers.inferer.Sharing.score>`.

        Raises:
            ValueError: when the inputs lie elsewhere or the network cannot be copied.
        """
        part, count = job.part or WHOLE, len(self.devices)
        here = inferer.inputs.split(job.inputs).images.device
        if here not in self.devices:
            raise ValueError(
                f"the inputs lie on {here}, which is not in `devices` ({', '.join(map(str, self.devices))}): add it, "
                f"or move them to one (--device \"$torch.device('{self.devices[0]}')\")"
            )
        first, threads = self.devices.index(here), _Threads(count)
        with evaluating(job.network), ThreadPoolExecutor(count, "monai_saliency-device") as pool:
            networks = _copies(job.network, self.devices)
            futures: list[Future[list[CaseState]]] = []
            try:
                for number, device in enumerate(self.devices):
                    own = inferer.replace(
                        inferer=_on_device(inferer.inferer, device),
                        progress=inferer.progress if number == first else False,
                    )
                    share = replace(
                        job,
                        inputs=_moved(job.inputs, device),
                        network=networks[number],
                        args=_moved(job.args, device),
                        kwargs=_moved(job.kwargs, device),
                        cases=job.cases and [replace(each, labels=_moved(each.labels, device)) for each in job.cases],
                        stored=job.stored and [StoredScores(each.folder) for each in job.stored],
                        part=Part(part.index * count + number, part.count * count),
                    )
                    futures.append(pool.submit(own.score_here, share, threads.meeting(number), threads.guard))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # After an error, or Ctrl-C, the rest of the others' shares is of no use.
                threads.barrier.abort()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, (Cancelled, BrokenBarrierError))):
            raise error
        return futures[first].result()


class _Threads:
    """The place where the threads of one call meet. Once it is broken, they stop."""

    def __init__(self, count: int) -> None:
        self.barrier = Barrier(count)
        self._scores: list[list[WorkerScores]] = [[] for _ in range(count)]

    def meeting(self, number: int) -> Callable[[Sequence[CaseState]], None]:
        """The meeting at the end of each round, for thread ``number``."""

        def meet(states: Sequence[CaseState]) -> None:
            self._scores[number] = [WorkerScores.of(state) for state in states]
            self.barrier.wait()
            everyones = list(self._scores)
            self.barrier.wait()  # none may replace its scores before all have read them
            take_scores(states, everyones, number)

        return meet

    @contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """Around each call of the network: no call begins once its result is of no use."""
        if self.barrier.broken:
            raise Cancelled
        with network_arithmetic(device), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield


def _existing(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Devices with the numbers that tensors on them have."""
    if isinstance(devices, str) or not devices:
        raise ValueError(
            f"`devices` must be a list of at least one device, such as ['cuda:0', 'cuda:1'], got {devices!r}"
        )
    return [torch.empty(0, device=device).device for device in devices]


def _copies(network: Callable[..., Any], devices: Sequence[torch.device]) -> list[Callable[..., Any]]:
    """The network for each device: itself for the first one that it lies on, else a copy."""
    if len(devices) == 1:
        return [network]
    try:
        if not isinstance(network, torch.nn.Module):
            raise TypeError("it is not a torch module")
        homes = [tensor.device for tensor in (*network.parameters(), *network.buffers())]
        own = devices.index(homes[0]) if homes and homes[0] in devices else None
        return [network if i == own else copy.deepcopy(network).to(device) for i, device in enumerate(devices)]
    except Exception as error:
        kind = getattr(network, "__name__", type(network).__name__)
        raise AdviceError(
            f"the network ({kind}) cannot be copied to {len(devices)} devices ({error}): let processes share the "
            "cohort, each with its own network (the overlay `torchrun`)"
        ) from error


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors, alone or in containers, on a device; all else as it is."""
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def _on_device(inferer: Inferer, device: torch.device) -> Inferer:
    """A copy of an inner inferer that runs patches on a device, with the tensors that it holds."""
    taken = copy.copy(inferer)
    for name, value in vars(inferer).items():
        if isinstance(value, Inferer):
            setattr(taken, name, _on_device(value, device))
        elif not isinstance(value, torch.nn.Module):
            setattr(taken, name, value and device if name == "sw_device" else _moved(value, device))
    return taken
