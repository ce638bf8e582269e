"""Grad-CAM (Selvaraju et al., ICCV 2017)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from monai_saliency.estimators.base import Meaning
from monai_saliency.gradients.base import GradientMethod, NoGradient
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.monai_private import is_view

__all__ = ["GradCAM"]

logger = logging.getLogger(__name__)

#: by network: the layer that the log has named
_named: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_KINDS = "Conv ConvTranspose BatchNorm InstanceNorm MaxPool AvgPool AdaptiveMaxPool AdaptiveAvgPool"
_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)


class GradCAM(GradientMethod):
    """The activations of a layer, weighted by the mean derivative of the score of each, where their sum is above 0
    (Section 3, equations 1 and 2), brought to the image's grid linearly. It is not normalised.

    For a segmentation the score is the target's region score (Vinogradova, Dibrov and Myers, AAAI 2020). Under a
    sliding window each patch has its own map, and these are added up, as their shares of the score are.

    The layer's output is read as the layer gave it, even if the network changes it in place afterwards. It is
    ``(n, channels, *spatial)``, ``(n, *spatial, channels)`` as in Swin transformers, or tokens
    ``(n, tokens, channels)`` as in a ViT, in the order of the voxels, with or without a class token as the first. Which
    of these it is follows from the convolutions, normalisations and linear layers that ran before, and a case whose
    layer stays unclear fails. A class token that comes last would shift the map by one token: name a layer that runs
    before it is added. The layer's grid is taken to cover the image as it lies, so the map is wrong for a network that
    first crops, flips or transposes the image, or averages over mirrored copies of it.

    Args:
        target_layer: a layer by its name in ``network.named_modules()``, such as ``"class_layers.relu"``. None: the
            last one of those whose output is coarsest, but has more than one voxel. That is the layer before the
            pooling of a classifier, and the bottom of a U-Net. With a class token it is the last one whose other tokens
            have a part in the score. It is named in the log. Of a layer that runs several times in a call, such as a
            ReLU that blocks share, the coarsest output is read, and of equally coarse ones the last.
    """

    meaning = Meaning("Grad-CAM, without sign", 0.0, in_score_unit=False, signed=False)

    def __init__(self, target_layer: str | None = None) -> None:
        self.target_layer = instance("target_layer", target_layer, str, "the name of a layer", none=True)

    def __len__(self) -> int:
        return 1

    def images(self, image: torch.Tensor, fill: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        return image[None].expand(len(indices), *image.shape).clone()

    @contextmanager
    def watching(self, network: Any, images: torch.Tensor) -> Iterator[_Watched]:
        if not isinstance(network, nn.Module) or isinstance(network, torch.jit.ScriptModule):
            raise NoGradient(f"it is a {type(network).__name__}, which has no layers that could be watched")
        modules = dict(network.named_modules())
        names = set(modules) - {""} or {""} if self.target_layer is None else {self.target_layer}
        if not names <= set(modules):
            words = f"is not a layer of {type(network).__name__}, such as {', '.join(list(modules)[-3:])}"
            raise ValueError(f"`target_layer` {self.target_layer!r} {words}: see network.named_modules()")
        watched = _Watched(network, names, _Layouts(tuple(images.shape)))
        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_hook(partial(watched.note, name)).remove)
            yield watched

    def pull(
        self, images: torch.Tensor, watched: Any, outputs: Sequence[torch.Tensor], grads: Sequence[Any], keep: bool
    ) -> torch.Tensor | None:
        if not watched.layers:
            words = (
                "gives a tensor (n, channels, *spatial), (n, *spatial, channels) or (n, tokens, channels) of two voxels"
            )
            words += f" or more with a derivative, for images {tuple(images.shape)}{watched.unclear}"
            raise NoGradient(f"no layer of those that are watched ({self.target_layer or 'all'}) {words}")
        for layer in reversed(watched.layers):
            (found,) = torch.autograd.grad(outputs, layer.edge, grads, retain_graph=True, allow_unused=True)
            if found is None:
                raise NoGradient(f"the score does not depend on the layer {layer.name!r}, as far as autograd sees")
            if bool(layer.on_grid(found).any()):
                break
        else:
            if bool(found.any()):
                words = "name one before an attention as `target_layer`, such as the norm1 of a block"
                raise NoGradient(f"of the layer {layer.name!r} the score reads the class token only: {words}")
        watched.read = layer
        if _named.get(watched.network) != layer.name:
            _named[watched.network] = layer.name
            logger.info("Grad-CAM of %s reads the layer %r", type(watched.network).__name__, layer.name)
        return layer.on_grid(found)

    def read(self, derivative: torch.Tensor, watched: Any, images: torch.Tensor) -> torch.Tensor:
        activation = watched.read.on_grid(watched.read.value).to(images.dtype)
        weights = derivative.to(images.dtype).mean(dim=tuple(range(2, derivative.ndim)), keepdim=True)
        cam = (weights * activation).sum(dim=1, keepdim=True).relu()
        cam = F.interpolate(cam, images.shape[2:], mode=_LINEAR[images.ndim - 2], align_corners=False)
        # One map for all channels: the first channel holds it.
        return torch.cat([cam, cam.new_zeros(len(cam), images.shape[1] - 1, *images.shape[2:])], dim=1)

    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return mean[0]


class _Layer(NamedTuple):
    """The output of a layer as the layer gave it: its place in the graph, a copy, and how its voxels lie."""

    name: str
    edge: GradientEdge
    value: torch.Tensor
    grid: tuple[int, ...]
    channels_last: bool

    def on_grid(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the output's shape as ``(n, channels, *grid)``, without a class token."""
        if not self.channels_last:
            return tensor
        return tensor.flatten(1, -2)[:, -math.prod(self.grid) :].unflatten(1, self.grid).movedim(-1, 1)


class _Watched:
    """The layers of one call of a network that may be read: one, or several with a class token."""

    def __init__(self, network: nn.Module, names: set[str], layouts: _Layouts) -> None:
        self.network, self.names, self.layouts = network, names, layouts
        self.layers: list[_Layer] = []
        self.unclear = ""

    def note(self, name: str, module: nn.Module, inputs: Any, output: Any) -> torch.Tensor | None:
        """Take the output of a layer that is as coarse, or coarser. A tensor that is given takes its place."""
        found = self.layouts.of(module, output.shape) if isinstance(output, torch.Tensor) else None
        if name not in self.names or not getattr(output, "requires_grad", False):
            return None
        if found is None:
            self.unclear = f"; {name!r} gives {tuple(output.shape)}"
            return None
        (grid, last), coarsest = found, self.layers[-1].grid if self.layers else found[0]
        if not 1 < math.prod(grid) <= math.prod(coarsest):
            return None
        if grid != coarsest or not last or output.shape[1:-1].numel() == math.prod(grid):  # no class token
            self.layers.clear()
        # A change in place gives the tensor another place in the graph, and this one stays. A view's would not.
        self.layers.append(_Layer(name, get_gradient_edge(output), output.detach().clone(), grid, last))
        return output.clone() if is_view(output) else None


class _Layouts:
    """Where the channels and voxels of layers' outputs are, by the layers that ran before in a call of a network."""

    def __init__(self, images: tuple[int, ...]) -> None:
        self.images, self.grids, self.any_last = images, {images[2:]}, False
        self.axes: dict[tuple[int, ...], set[int]] = {}

    def of(self, module: nn.Module, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool] | None:
        """The grid of an output, and whether its channels are last; None where that is unclear."""
        own = _channel_axis(module)
        self.any_last = self.any_last or (own == -1 and len(shape) > 2)
        tokens = len(shape) == 3 < len(self.images)
        if shape[:1] != self.images[:1] or not (tokens or len(shape) == len(self.images)):
            return None
        first, last = map(self._of_tokens, (shape[2], shape[1])) if tokens else (shape[2:], shape[1:-1])
        axis = own or self._inferred(shape, first, last)
        grid = {1: first, -1: last}.get(axis)
        if grid is None or (axis == -1 and grid not in self.grids | self._coarser()):  # as of windows, or heads
            return None
        if own:
            self.grids.add(grid)
            self.axes.setdefault(shape, set()).add(own)
        return None if tokens and axis == 1 else (grid, axis == -1)

    def _inferred(self, shape: tuple[int, ...], first: Any, last: Any) -> int:
        """The axis of the channels, by a layer that gave this shape or by known grids; 0 where it is unclear."""
        axes = self.axes.get(shape, set())
        if len(axes) != 1:
            known = self.grids if self.any_last else self.grids | _divided(self.images[2:])
            axes = {axis for axis, grid in ((1, first), (-1, last)) if grid in known}
        return next(iter(axes)) if len(axes) == 1 else 0 if self.any_last else 1

    def _of_tokens(self, count: int) -> tuple[int, ...] | None:
        """The only grid with this number of voxels, or one less: the class token."""
        # An MLP-Mixer's linear layers take the channels for tokens and back.
        channels = {shape[-1] for shape in self.axes if len(shape) == 3}
        for grids in (self.grids, set() if count in channels else self._coarser()):
            for voxels in (count, count - 1):
                if found := {grid for grid in grids if math.prod(grid) == voxels}:
                    return found.pop() if len(found) == 1 else None
        return None

    def _coarser(self) -> set[tuple[int, ...]]:
        """The grids that a linear layer may merge patches to."""
        halves = {tuple(-(-each // 2) for each in grid) for grid in self.grids}
        return halves if len(self.grids) > 1 else set(_divided(self.images[2:]))


def _channel_axis(module: nn.Module) -> int | None:
    """The axis of the channels in a layer's output, where the layer's kind tells it."""
    if isinstance(module, _channels_first()):
        return 1
    return -1 if type(module) in _LAST and len(getattr(module, "normalized_shape", (0,))) == 1 else None


@lru_cache
def _channels_first() -> tuple[type, ...]:
    """Layers that give (n, channels, *spatial)."""
    kinds = [getattr(nn, f"{kind}{dims}d") for kind in _KINDS.split() for dims in (1, 2, 3)]
    return (nn.GroupNorm, nn.Upsample, *kinds)


@lru_cache
def _divided(sizes: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    """The sizes divided by each number that divides all of them."""
    factors = (each for each in range(1, min(sizes) + 1) if all(size % each == 0 for size in sizes))
    return frozenset(tuple(size // each for size in sizes) for each in factors)
