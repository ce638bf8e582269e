"""Several devices in one process: the GPUs of a workstation share the masks of each case, a thread for each.

Without processes to start, and with one loader, one cache and one progress bar. The network's Python code runs in one
process all the same: where a forward takes milliseconds, one process for each GPU (``torchrun``) keeps them busier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any
from weakref import ref

import torch
from monai.inferers import Inferer

from monai_saliency.cases import Case
from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.distributed.sharing import SharingInferer
from monai_saliency.inferers.case_state import CaseRun
from monai_saliency.inferers.inferer import PerturbationInferer, evaluating
from monai_saliency.networks.identity import module_settings
from monai_saliency.sharding import Part, units
from monai_saliency.storage.score_store import CaseScores
from monai_saliency.targets import BoundTarget, Target
from monai_saliency.utils.monai_private import tree_map
from monai_saliency.utils.precision import network_arithmetic
from monai_saliency.utils.timing import BusyMeter

__all__ = ["DevicesEngine", "OverDevices"]


class DevicesEngine(Engine):
    """Shares the masks of each case between devices of this process.

    Args:
        devices: all CUDA devices that this process sees by default.

    Raises:
        ValueError: when there are none, or not those that are named; or, run, when the network lies elsewhere.
    """

    def __init__(self, devices: Sequence[str | torch.device] | None = None) -> None:
        if devices is None:
            devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
            if not devices:
                raise ValueError(
                    "there is no CUDA device to share the work of: run without the overlay `devices`, or name devices "
                    "(--saliency_devices \"['cpu', 'cpu']\")"
                )
        self.devices = _known(devices)

    def run(self, cohort: Cohort) -> None:
        handler = cohort.handler
        (home,) = _known([cohort.evaluator.state.device])
        if home not in self.devices:
            raise ValueError(
                f"the network is on {home}, which is none of `saliency_devices` ({', '.join(map(str, self.devices))}): "
                f"add it, or give --device \"$torch.device('{self.devices[0]}')\""
            )
        plain = handler.inferer
        handler.inferer = OverDevices(plain, self.devices)
        try:
            cohort.explain(units(len(cohort)))
        finally:
            handler.inferer = plain


class OverDevices(SharingInferer):
    """Explains as another inferer does, with the masks shared between devices.

    Device k of n scores part k of n of the masks (:class:`~monai_saliency.sharding.Part`), in a thread of its own, and
    the scores are merged in the devices' order. Batches are those of the plain inferer, so that on equal devices the
    maps are equal to the bit, and stored scores are found by either. What comes more than once is the first batch of a
    case: each device runs it, and :attr:`Explanation.num_forwards` counts it each time.

    The network itself serves the first device in the list that it lies on. Every other one has a copy, which takes over
    parameters and buffers in each call. What else a module holds is copied once: it is copied anew when another one is
    given, when its parts or their printed settings change, or a number, truth value or text that they hold.

    The inputs lie on one of the devices, and the maps come there. The progress bar and the meter are those of that
    device's share.

    Args:
        inferer: explains on one device.
        devices: a device that is named several times has as many threads, and copies of the network.

    Raises:
        ValueError: when there is no such device.
    """

    def __init__(self, inferer: PerturbationInferer, devices: Sequence[str | torch.device]) -> None:
        # Of one that shares already, the one inside: threads of threads bring nothing.
        super().__init__(inferer.whole if isinstance(inferer, OverDevices) else inferer)
        self.devices = _known(devices)
        self._replicas: dict[int, _Replica] = {}

    def score(
        self,
        inputs: Any,
        network: Callable[..., Any],
        *args: Any,
        stored: Sequence[CaseScores] | None = None,
        part: Part | None = None,
        **kwargs: Any,
    ) -> list[CaseRun]:
        """Score a batch of images; see :meth:`~monai_saliency.inferers.inferer.PerturbationInferer.score`.

        Args:
            inputs: on one of the devices.
            network: a module, which other devices have copies of.
            args: as there.
            stored: as there.
            part: what all devices run together; all by default.
            kwargs: as there.

        Raises:
            ValueError: when the inputs lie elsewhere or the network cannot be copied.
        """
        part = part or Part()
        count = len(self.devices)
        here = self.inputs.split(inputs).images.device
        if here not in self.devices:
            raise ValueError(
                f"the inputs lie on {here}, which is none of `devices` ({', '.join(map(str, self.devices))}): add it, "
                "or move them to one"
            )
        first = self.devices.index(here)
        stop, lock = Event(), Lock()
        with evaluating(network), ThreadPoolExecutor(count, "monai_saliency-device") as threads:
            networks = self._networks(network)
            futures = []
            try:
                for number, device in enumerate(self.devices):
                    # Copied here, in the streams in which the caller works: threads have streams of their own.
                    own, more, named = (_moved(each, device) for each in (inputs, args, kwargs))
                    named["stored"] = None if stored is None else [_SharedScores(each.folder, lock) for each in stored]
                    named["part"] = Part(part.index * count + number, part.count * count)
                    worker = self._worker(device, number == first, stop, lock)
                    job = partial(worker.score, own, networks[number], *more, **named)
                    futures.append(threads.submit(_inside, _surroundings(device), job))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # After an error, or Ctrl-C, the rest of the others' shares is of no use.
                stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _Stopped)):
            raise error
        return _merged([future.result() for future in futures], first, stored)

    def _worker(self, device: torch.device, first: bool, stop: Event, lock: Lock) -> PerturbationInferer:
        """The plain inferer, for one device's share."""
        worker = copy.copy(self.whole)
        worker.target = _LockedTarget(self.target, lock)
        worker.inferer = _on_device(self.inferer, device)
        worker.progress = self.progress and first
        worker.meter = _StoppingMeter(self.meter if first else None, stop)
        return worker

    def _networks(self, network: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The network for each device."""
        if not isinstance(network, torch.nn.Module):
            if len(self.devices) == 1:
                return [network]
            kind = getattr(network, "__name__", type(network).__name__)
            raise ValueError(
                f"the network ({kind}) is no torch module, so {len(self.devices)} devices cannot have copies of it: "
                "give a module, or let processes share the cohort, each of which makes its own (the overlay `torchrun`)"
            )
        homes = {tensor.device for tensor in _tensors(network).values()}
        if len(homes) > 1:
            raise ValueError(
                f"the network lies on several devices ({', '.join(sorted(map(str, homes)))}), so it cannot be copied "
                "to one: move it to one, or run without sharing its masks between devices"
            )
        home = next(iter(homes), self.devices[0])
        networks: list[Callable[..., Any]] = []
        for number, device in enumerate(self.devices):
            if device == home and number == self.devices.index(home):
                networks.append(network)
                continue
            if number not in self._replicas or not self._replicas[number].follows(network):
                self._replicas[number] = _Replica(network, device)
            networks.append(self._replicas[number].module)
        return networks


class _Replica:
    """A copy of a network on a device.

    Args:
        network: in evaluation mode.
        device: the device.

    Raises:
        ValueError: when it cannot be copied.
    """

    def __init__(self, network: torch.nn.Module, device: torch.device) -> None:
        self._network = ref(network)
        self._signs = _signs(network)
        try:
            self.module = copy.deepcopy(network).to(device)
        except Exception as error:
            raise ValueError(
                f"the network ({type(network).__name__}) cannot be copied to {device} ({error}): let processes share "
                "the cohort, each of which makes its own (the overlay `torchrun`)"
            ) from error

    def follows(self, network: torch.nn.Module) -> bool:
        """Take over the network's parameters and buffers; False where another copy has to be made."""
        if self._network() is not network or self._signs != _signs(network):
            return False
        with torch.no_grad():
            for own, given in zip(_tensors(self.module).values(), _tensors(network).values(), strict=True):
                own.copy_(given)
        return True


def _tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }


def _signs(network: torch.nn.Module) -> Any:
    """What tells that a copy of a network is another one now, beside the values of its parameters and buffers."""
    tensors = [(name, each.shape, each.dtype, each.layout) for name, each in _tensors(network).items()]
    kinds = (bool, int, float, str, type(None))
    parts = [
        (name, module_settings(part), {key: value for key, value in vars(part).items() if isinstance(value, kinds)})
        for name, part in network.named_modules()
    ]
    return tensors, parts


def _known(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Devices with their numbers.

    Raises:
        ValueError: when there are none, or not so many.
    """
    if isinstance(devices, str) or not devices:
        raise ValueError(
            f"`devices` must be a list of at least one device, such as ['cuda:0', 'cuda:1'], got {devices!r}"
        )
    known = []
    for device in map(torch.device, devices):
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {device}: this process sees {torch.cuda.device_count()} CUDA devices")
        # With the number that tensors on it have.
        known.append(torch.empty(0, device=device).device)
    return known


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors, alone or in containers, on a device; all else as it is."""
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def _on_device(inferer: Inferer, device: torch.device) -> Inferer:
    """A copy of an inner inferer that runs patches on a device, with the tensors that it holds.

    Raises:
        ValueError: when it holds a network of its own, which lies elsewhere.
    """
    taken = copy.copy(inferer)
    for name, value in vars(inferer).items():
        if isinstance(value, torch.nn.Module):
            if any(tensor.device != device for tensor in _tensors(value).values()):
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


def _inside(surroundings: Sequence[AbstractContextManager[Any]], job: Callable[[], list[CaseRun]]) -> list[CaseRun]:
    with ExitStack() as stack:
        for each in surroundings:
            stack.enter_context(each)
        return job()


def _merged(shares: Sequence[list[CaseRun]], first: int, stored: Sequence[CaseScores] | None) -> list[CaseRun]:
    """The cases of one device's share with the scores of all, in the devices' order."""
    runs = shares[first]
    for index, run in enumerate(runs):
        for number, share in enumerate(shares):
            if number != first:
                run.merge(share[index])
        run.stored = None if stored is None else stored[index]
    return runs


class _SharedScores(CaseScores):
    """A case's scores on disk as one of several threads sees them. Ranges that wait to be written are the thread's own.

    Whether what is stored is of the same thing is found out by one at a time, so that none removes what another one has
    just begun.
    """

    def __init__(self, folder: Path, lock: Lock) -> None:
        super().__init__(folder)
        self._lock = lock

    def resume(self, reference: torch.Tensor) -> None:
        with self._lock:
            super().resume(reference)


class _LockedTarget(Target):
    """A target that is bound in one thread at a time: some silence a warning meanwhile, which Python does for all."""

    def __init__(self, target: Target, lock: Lock) -> None:
        self.target = target
        self._lock = lock

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        with self._lock:
            return self.target.bind(reference_output, case)


class _Stopped(Exception):
    """A share that was given up, since another failed."""


class _StoppingMeter(BusyMeter):
    """Watches a share's batches, so that none begins once its result is of no use.

    Args:
        meter: counts the share's forwards, where they are to be counted.
        stop: set when all shares are to end.
    """

    def __init__(self, meter: BusyMeter | None, stop: Event) -> None:
        super().__init__()
        self._meter = meter
        self._stop = stop

    def watch(self, inferer: Inferer) -> Inferer:
        return _Stopping(inferer if self._meter is None else self._meter.watch(inferer), self._stop)


class _Stopping(Inferer):
    """Runs a batch of a share, as the user lets the network compute."""

    def __init__(self, inferer: Inferer, stop: Event) -> None:
        super().__init__()
        self.inferer = inferer
        self.stop = stop

    def __call__(self, inputs: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
        if self.stop.is_set():
            raise _Stopped
        batch = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        with network_arithmetic(batch[0].device):
            return self.inferer(inputs, network, *args, **kwargs)
