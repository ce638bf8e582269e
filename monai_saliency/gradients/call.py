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
        floats = [each for each in tree_leaves(made.output) if _is_float(each)]
        # Copies, since the inferer may write there.
        tracked = iter(_Function.apply(images, made, [each.detach().clone() for each in floats]) if floats else ())
        output, made.output = made.output, None
        return tree_map(lambda value: next(tracked) if _is_float(value) else value, output)


class _Call:
    """One call. With ``calls.again`` it runs once more for its derivative, so that nothing is kept between."""

    def __init__(self, calls: NetworkCalls, call: Callable[[torch.Tensor], Any], images: torch.Tensor) -> None:
        self.calls = calls
        self.call = call
        kind = images.device.type
        self._cast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._kept: tuple[torch.Tensor, Any, Sequence[torch.Tensor]] | None = None
        if calls.again:
            with torch.no_grad():
                self.output = call(images.detach())
        else:
            self.output = self._run(images)

    def _run(self, images: torch.Tensor) -> Any:
        with torch.enable_grad(), torch.autocast(*self._cast):
            leaf = images.detach().requires_grad_()
            try:
                with self.calls.method.watching(self.calls.network) as watched:
                    output = self.call(leaf)
            except NoGradient as error:
                self.calls.broken, watched, output = str(error), None, self.call(leaf)
        self._kept = leaf, watched, [each for each in tree_leaves(output) if _is_float(each)]
        return output

    def pulled(self, images: torch.Tensor, grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """What the method reads, of the shape of the images."""
        asked = [each is not None and bool(each.any()) for each in grads]
        if not any(asked):
            return torch.zeros_like(images)
        if self.calls.broken:
            return None
        if self._kept is None:
            self._run(images)
        leaf, watched, outputs = self._kept  # type: ignore[misc]
        if self.calls.again:
            self._kept = None
        places = [i for i, output in enumerate(outputs) if asked[i] and output.requires_grad]
        if not places:
            return None
        return self.calls.method.pull(
            leaf, watched, [outputs[i] for i in places], [grads[i] for i in places], not self.calls.again
        )


class _Function(torch.autograd.Function):
    """A call of a network, for autograd."""

    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, made: _Call, floats: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        ctx.made = made
        ctx.save_for_backward(images)
        return tuple(floats)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (images,), calls = ctx.saved_tensors, ctx.made.calls
        try:
            found = ctx.made.pulled(images, grads)
        except NoGradient as error:
            calls.broken, found = str(error), None
        if found is None:
            calls.broken = calls.broken or "its outputs do not depend on its images, as far as autograd sees"
        return torch.zeros_like(images) if found is None else found, None, None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
