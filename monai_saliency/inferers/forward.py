"""The one seam around every call of the network, for whole images and for patches alike.

Autocast, cancellation, halving a batch for which the memory is too small, and the busy meter belong here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
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
    """Calls the network, on whole images by the inner inferer, or on patches."""

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
        """The network's output of whole images, as the inner inferer gives it."""

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

    def autocast_dtype(self, image: torch.Tensor) -> torch.dtype | None:
        """The type of ``torch.autocast`` around the network for images like this one; None where nothing is cast."""
        if self.autocast is None or not image.is_cuda:
            return None
        return self.autocast.get("dtype") or torch.float16

    @contextmanager
    def _around(self, batch: torch.Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            if self.guard is not None:
                stack.enter_context(self.guard(batch.device))
            if self.autocast is not None and batch.is_cuda:
                stack.enter_context(torch.autocast("cuda", **self.autocast))
            if self.meter is not None:
                stack.enter_context(self.meter.call(batch))
            yield


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Put a module into evaluation mode; afterwards each of its parts has the mode it had before."""
    parts = list(network.modules()) if isinstance(network, torch.nn.Module) else []
    # A frozen TorchScript module has no mode, and an exported program's is fixed: it refuses to change it.
    trained = [part for part in parts if getattr(part, "training", False)]
    if trained:
        with suppress(NotImplementedError):
            network.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


def has_no_mode(network: Any) -> bool:
    """Whether a network is a program of ``torch.export``, whose mode was fixed when it was made."""
    try:
        if isinstance(network, torch.nn.Module):
            network.train(network.training)
    except NotImplementedError:
        return True
    return False
