"""The contract of white-box methods, and calls of a network that need a derivative."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from monai_saliency.estimators.base import Meaning
from monai_saliency.utils.monai_private import tree_leaves, tree_map


class NoGradient(Exception):
    """Raised if a network gives no derivative, with the reason."""


class GradientMethod(ABC):
    """The settings of a white-box method.

    The score is differentiated at N images that the method makes of the one that is explained, and of the mean of the
    derivatives the method makes the map. Image ``i`` depends only on the settings, ``i`` and the image itself.

    Attributes:
        meaning: what the values of the map are.
    """

    meaning: Meaning

    @abstractmethod
    def __len__(self) -> int:
        """N, the number of images at which the score is differentiated."""

    @abstractmethod
    def at(self, number: int, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        """The image ``(C, *spatial)`` at which the score is differentiated, of a number in [0, N). Image and fill (the
        baseline) are ``(C, *spatial)``.
        """

    def weights(self) -> torch.Tensor:
        """The weight of each image's derivative in the mean: float64 ``(N,)``, of sum 1."""
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)

    @abstractmethod
    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        """Make the map ``(*spatial)`` of the weighted mean ``(C, *spatial)`` of what :meth:`pull` gives."""

    @contextmanager
    def watching(self, network: Any, images: torch.Tensor) -> Iterator[Any]:
        """Watch a call of the network with images or patches ``(n, C, *size)``, for :meth:`pull`; a NoGradient when it
        cannot be watched.
        """
        yield None

    def pull(
        self, images: torch.Tensor, watched: Any, outputs: Sequence[torch.Tensor], grads: Sequence[Any], keep: bool
    ) -> torch.Tensor | None:
        """The derivative of the score with respect to the images or patches ``(n, C, *size)`` of a call of the network.

        ``grads`` is the derivative of the score with respect to each output, ``watched`` what :meth:`watching` gave.
        None where the outputs do not depend on the images. With ``keep`` this is called again for the same call.
        """
        return torch.autograd.grad(outputs, images, grads, retain_graph=keep, allow_unused=True)[0]

    def read(self, derivative: torch.Tensor, watched: Any, images: torch.Tensor) -> torch.Tensor:
        """Read the map's share ``(n, C, *size)`` of a call of the network from what :meth:`pull` gave for it."""
        return derivative


class NetworkCalls:
    """Calls a network such that a derivative of its outputs becomes what a method reads of it."""

    def __init__(self, method: GradientMethod, network: Any, again: bool) -> None:
        self.method = method
        self.network = network
        self.again = again
        self.broken = ""
        #: which score is differentiated, and those that had a derivative other than zero
        self.score = 0
        self.moved: set[int] = set()

    def __call__(self, call: Callable[..., Any], images: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of a call."""
        if not isinstance(images, torch.Tensor):  # a list of images: kept as it is
            return call(images, *args, **kwargs)
        made = _Call(self, lambda leaf: call(leaf, *args, **kwargs), images)
        output, made.output = made.output, None
        # Copies, since the inferer may write there.
        copies = [value.detach().clone() for value in _floats(output)]
        if not copies:
            return output
        tracked = iter(_Function.apply(images, made, copies))
        return tree_map(lambda value: next(tracked) if _is_float(value) else value, output)


class _Graph(NamedTuple):
    """What autograd needs of a call: the images, what the method watched, and the outputs of floats."""

    images: torch.Tensor
    watched: Any
    outputs: Sequence[torch.Tensor]


class _Call:
    """One call. With ``calls.again`` it runs once more for its derivative, so that nothing is kept between."""

    def __init__(self, calls: NetworkCalls, call: Callable[[torch.Tensor], Any], images: torch.Tensor) -> None:
        self.calls = calls
        self.call = call
        kind = images.device.type
        self._cast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._graph: _Graph | None = None  # kept, unless the call runs again
        if calls.again:
            with torch.no_grad():
                self.output = call(images.detach().clone())
        else:
            self.output, self._graph = self._run(images)

    def _run(self, images: torch.Tensor) -> tuple[Any, _Graph]:
        """The output of the call, recorded by autograd."""
        watched = None
        with torch.enable_grad(), torch.autocast(*self._cast):
            leaf = images.detach().requires_grad_()
            try:
                with self.calls.method.watching(self.calls.network, leaf) as watched:
                    output = self.call(leaf.clone())  # which the network may change in place
            except NoGradient as error:
                self.calls.broken = str(error)
                output = self.call(leaf.clone())
        return output, _Graph(leaf, watched, _floats(output))

    def pulled(self, images: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The map's share of this call, in the shape of the images, for the derivative of each output; None where the
        outputs do not depend on the images.
        """
        method, again = self.calls.method, self.calls.again
        moving = [grad is not None and bool(grad.any()) for grad in grads]
        if not any(moving):
            return torch.zeros_like(images)
        if self.calls.broken:
            return None
        graph = self._graph or self._run(images)[1]
        outputs, grads_of_outputs = [], []
        for output, grad, moves in zip(graph.outputs, grads, moving, strict=True):
            if moves and output.requires_grad:
                outputs.append(output)
                grads_of_outputs.append(grad)
        if not outputs:
            return None
        derivative = method.pull(graph.images, graph.watched, outputs, grads_of_outputs, keep=not again)
        if derivative is None:
            return None
        if bool(derivative.any()):
            self.calls.moved.add(self.calls.score)
        return method.read(derivative, graph.watched, graph.images)


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
            share = ctx.made.pulled(images, grads)
        except NoGradient as error:
            calls.broken, share = str(error), None
        if share is None:
            calls.broken = calls.broken or "its outputs do not depend on its images, as far as autograd sees"
            share = torch.zeros_like(images)
        return share, None, None


def _floats(output: Any) -> list[torch.Tensor]:
    """The tensors of floats in an output."""
    return [value for value in tree_leaves(output) if _is_float(value)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
