"""A call of a network whose derivative is asked for, of a whole image or of a batch of patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.gradients.base import GradientMethod, NoGradient
from monai_saliency.utils.monai_private import tree_leaves, tree_map

__all__ = ["NetworkCalls"]


class NetworkCalls:
    """Calls a network such that a derivative of its outputs becomes what a method reads of it."""

    def __init__(self, method: GradientMethod, network: Any, again: bool) -> None:
        self.method = method
        self.network = network
        self.again = again
        self.broken = ""

    def __call__(self, call: Callable[..., Any], images: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of a call."""
        if not isinstance(images, torch.Tensor):  # a list of images: kept as it is
            return call(images, *args, **kwargs)
        made = _Call(self, lambda leaf: call(leaf, *args, **kwargs), images)
        output = made.take_output()
        tracked = iter(_Function.apply(images, made) if made.floats else ())
        made.floats = ()
        return tree_map(lambda value: next(tracked) if _is_float(value) else value, output)


class _Call:
    """One call."""

    def __init__(self, calls: NetworkCalls, call: Callable[[torch.Tensor], Any], images: torch.Tensor) -> None:
        self.calls = calls
        self.call = call
        kind = images.device.type
        self._cast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._kept: tuple[torch.Tensor, Any, Sequence[torch.Tensor]] | None = None
        if calls.again:
            with torch.no_grad():
                self._output = call(images.detach())
        else:
            self._output = self._run(images)
        # Copies, since the inferer may write there.
        self.floats: Sequence[torch.Tensor] = [
            each.detach().clone() for each in tree_leaves(self._output) if _is_float(each)
        ]

    def take_output(self) -> Any:
        """The output, which is not held here from then on."""
        output, self._output = self._output, None
        return output

    def pulled(self, images: torch.Tensor, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the method reads, of the shape of the images."""
        asked = [each is not None and bool(each.any()) for each in grads]
        if not any(asked):
            return torch.zeros_like(images)
        if self._kept is None and not self.calls.broken:
            kind, enabled, dtype = self._cast
            with torch.autocast(kind, dtype, enabled):
                self._run(images)
        found = None if self.calls.broken else self._read(grads, asked)
        if self.calls.again:
            self._kept = None
        if found is None:
            self.calls.broken = self.calls.broken or "its outputs do not depend on its images, as far as autograd sees"
            return torch.zeros_like(images)
        return found

    def _read(self, grads: Sequence[torch.Tensor], asked: Sequence[bool]) -> torch.Tensor | None:
        assert self._kept is not None
        leaf, watched, outputs = self._kept
        places = [i for i, output in enumerate(outputs) if asked[i] and output.requires_grad]
        if not places:
            return None
        of_each = [outputs[i] for i in places], [grads[i] for i in places]
        try:
            return self.calls.method.pull(leaf, watched, *of_each, not self.calls.again)
        except NoGradient as error:
            self.calls.broken = str(error)
            return None

    def _run(self, images: torch.Tensor) -> Any:
        method = self.calls.method
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            try:
                with method.watching(self.calls.network) as watched:
                    output = self.call(leaf)
            except NoGradient as error:
                self.calls.broken = str(error)
                watched, output = None, self.call(images.detach())
        self._kept = leaf, watched, [each for each in tree_leaves(output) if _is_float(each)]
        return output


class _Function(torch.autograd.Function):
    """A call of a network, for autograd."""

    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, made: _Call) -> tuple[torch.Tensor, ...]:
        ctx.made = made
        ctx.save_for_backward(images)
        return tuple(made.floats)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.made.pulled(*ctx.saved_tensors, grads), None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
