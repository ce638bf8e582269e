"""The one seam around every call of the network, for whole images and for patches alike.

What has to happen around a forward belongs here and nowhere else: autocast, cancellation, halving a batch for which the
memory is too small, counting the time in which the network is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
from monai.inferers import Inferer, SliceInferer

from monai_saliency.inferers.fitting import Fitting
from monai_saliency.networks.inputs import InputAdapter, SplitInputs
from monai_saliency.utils.timing import BusyMeter

__all__ = ["Cancelled", "Forward", "Guard", "evaluating"]

#: entered around each call of the network, given the device of the batch; raises to cancel the run
Guard = Callable[[torch.device], AbstractContextManager[Any]]


class Cancelled(Exception):
    """Raised by a guard to cancel the run: no fault of the network, so nothing else is tried."""


class Forward:
    """Calls the network, on whole images by the inner inferer, or on patches.

    Args:
        inferer: the inner inferer.
        inputs: how the network takes its inputs.
        network: any callable on such inputs.
        args: passed on to the inner inferer.
        kwargs: passed on to the inner inferer.
        meter: counts the time in which the network runs.
        autocast: arguments of ``torch.autocast`` for batches on a GPU, None for none. On the CPU nothing is autocast,
            as in MONAI's evaluators.
        guard: entered around each call.
    """

    def __init__(
        self,
        inferer: Inferer,
        inputs: InputAdapter,
        network: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        meter: BusyMeter | None = None,
        autocast: Mapping[str, Any] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.inferer = inferer
        self.inputs = inputs
        self.network = network
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.meter = meter
        self.autocast = autocast
        self.guard = guard
        self._fitting = Fitting(network)

    def of(self, inferer: Inferer, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Forward:
        """The same seam around another inner inferer, with other further arguments."""
        own = self.meter, self.autocast, self.guard
        return Forward(inferer, self.inputs, self.network, args, kwargs, *own)

    def images(self, batch: torch.Tensor, split: SplitInputs, values: Mapping[Any, torch.Tensor]) -> Any:
        """The network's output of whole images, as the inner inferer gives it.

        Args:
            batch: ``(n, C + H, *spatial)``, perturbed images and held ones.
            split: takes a batch apart into the network's inputs.
            values: held values ``(n, ...)`` by name.
        """

        def infer(batch: Any, network: Callable[..., Any]) -> Any:
            return self.inferer(batch, network, *self.args, **self.kwargs)

        def call(part: torch.Tensor, values: Mapping[Any, torch.Tensor]) -> Any:
            with self._around(part):
                return self.inputs.run(infer, self.network, part, partial(split.take_apart, values=values))

        return self._fitting.run(batch, call, values)

    def patches(self, batch: torch.Tensor) -> Any:
        """The network's output of patches ``(n, C, *roi_size)``, as a ``SlidingWindowInferer`` runs them."""

        def call(part: torch.Tensor, values: Mapping[Any, torch.Tensor]) -> Any:
            with self._around(part):
                if isinstance(self.inferer, SliceInferer):  # its network takes no further arguments
                    return self.inferer.network_wrapper(self.network, part)
                return self.network(part, *self.args, **self.kwargs)

        return self._fitting.run(batch, call)

    def was_halved(self, batch: torch.Tensor) -> bool:
        """Whether a batch of this shape went through the network in parts, since the memory was too small for it."""
        return self._fitting.fits(batch) < len(batch)

    def autocast_dtype(self, image: torch.Tensor) -> torch.dtype | None:
        """The type of ``torch.autocast`` around the network for images like this one; None where nothing is cast."""
        if self.autocast is None or not image.is_cuda:
            return None
        return self.autocast.get("dtype") or torch.float16

    def _around(self, batch: torch.Tensor) -> AbstractContextManager[None]:
        around: list[AbstractContextManager[Any]] = []
        if self.guard is not None:
            around.append(self.guard(batch.device))
        if self.autocast is not None and batch.is_cuda:
            around.append(torch.autocast("cuda", **self.autocast))
        if self.meter is not None:
            around.append(self.meter.call(batch))
        return _inside(around) if around else nullcontext()  # made for each batch


@contextmanager
def _inside(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter contexts in order; each is left again where a later one, or the block, raises."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Put a module into evaluation mode; afterwards each of its parts has the mode it had before.

    Where several threads use a module, or modules that share parts, these get their mode back when the last is done.
    """
    parts = list(network.modules()) if isinstance(network, torch.nn.Module) else []
    _modes.enter(network, parts)
    try:
        yield
    finally:
        _modes.leave(parts)


def has_no_mode(network: Any) -> bool:
    """Whether a network is a program of ``torch.export``, whose mode was fixed when it was made."""
    try:
        if isinstance(network, torch.nn.Module):
            network.train(network.training)
    except NotImplementedError:
        return True
    return False


class _Modes:
    """The parts of modules that are in evaluation mode for somebody here, in any thread.

    A part gets its own mode back when the last of its users is done: before, it would train under the others.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # By id: the part, which lives as long as this entry, its users, and whether it was in training mode.
        self._used: dict[int, tuple[torch.nn.Module, int, bool]] = {}

    def enter(self, network: Any, parts: Sequence[torch.nn.Module]) -> None:
        with self._lock:
            # A frozen TorchScript module has no mode, and an exported program's is fixed: it refuses to change it.
            training = [bool(getattr(part, "training", False)) for part in parts]
            if any(training):
                with suppress(NotImplementedError):
                    network.eval()
            for part, was_training in zip(parts, training, strict=True):
                _, users, before = self._used.get(id(part), (part, 0, was_training))
                self._used[id(part)] = part, users + 1, before or was_training

    def leave(self, parts: Sequence[torch.nn.Module]) -> None:
        with self._lock:
            for part in parts:
                _, users, before = self._used.pop(id(part))
                if users > 1:
                    self._used[id(part)] = part, users - 1, before
                elif before:
                    part.training = True


_modes = _Modes()
