"""Grad-CAM (Selvaraju et al., ICCV 2017)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from threading import Lock, get_ident
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

logger = logging.getLogger(__name__)

#: by network: the layer that the log has named
_named: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_registering = Lock()  # torch counts the ids of hooks without one: two threads would get the same id
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
            pooling of a classifier, and the bottom of a U-Net. It is named in the log. If the score reads a class token
            only, name a layer before the last attention. Of a layer that runs several times in a call, such as a ReLU
            that blocks share, the coarsest output is read, and of equally coarse ones the last.
    """

    meaning = Meaning("Grad-CAM, without sign", 0.0, in_score_unit=False, signed=False)

    def __init__(self, target_layer: str | None = None) -> None:
        self.target_layer = instance("target_layer", target_layer, str, "the name of a layer", none=True)

    def __len__(self) -> int:
        return 1

    def at(self, number: int, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return image

    @contextmanager
    def watching(self, network: Any, images: torch.Tensor) -> Iterator[_Watched]:
        if not isinstance(network, nn.Module) or isinstance(network, torch.jit.ScriptModule):
            raise NoGradient(f"it is a {type(network).__name__}, which has no layers that could be watched")
        modules = dict(network.named_modules())
        if self.target_layer is None:
            names = set(modules) - {""} or {""}
        elif self.target_layer in modules:
            names = {self.target_layer}
        else:
            words = f"is not a layer of {type(network).__name__}, such as {', '.join(list(modules)[-3:])}"
            raise ValueError(f"`target_layer` {self.target_layer!r} {words}: see network.named_modules()")
        watched = _Watched(network, names, _Layouts(tuple(images.shape)))
        with ExitStack() as stack:
            with _registering:
                for name, module in modules.items():
                    stack.callback(module.register_forward_hook(partial(watched.note, name)).remove)
            yield watched

    def pull(
        self, images: torch.Tensor, watched: Any, outputs: Sequence[torch.Tensor], grads: Sequence[Any], keep: bool
    ) -> torch.Tensor | None:
        layer = watched.layer
        if layer is None:
            raise NoGradient(
                f"no layer of those that are watched ({self.target_layer or 'all'}) gives a tensor (n, channels, "
                "*spatial), (n, *spatial, channels) or (n, tokens, channels) of two voxels or more with a derivative, "
                f"for images {tuple(images.shape)}{watched.unclear}"
            )
        (derivative,) = torch.autograd.grad(outputs, layer.edge, grads, retain_graph=True, allow_unused=True)
        if derivative is None:
            raise NoGradient(f"the score does not depend on the layer {layer.name!r}, as far as autograd sees")
        if bool(derivative.any()) and not bool(layer.on_grid(derivative).any()):
            raise NoGradient(
                f"of the layer {layer.name!r} the score reads the class token only: name one before an attention as "
                "`target_layer`, such as the norm1 of a block"
            )
        if _named.get(watched.network) != layer.name:
            _named[watched.network] = layer.name
            logger.info("Grad-CAM of %s reads the layer %r", type(watched.network).__name__, layer.name)
        return layer.on_grid(derivative)

    def read(self, derivative: torch.Tensor, watched: Any, images: torch.Tensor) -> torch.Tensor:
        layer, spatial = watched.layer, tuple(range(2, derivative.ndim))
        activation = layer.on_grid(layer.value).to(images.dtype)
        weights = derivative.to(images.dtype).mean(dim=spatial, keepdim=True)
        cam = (weights * activation).sum(dim=1, keepdim=True).relu()
        cam = F.interpolate(cam, images.shape[2:], mode=_LINEAR[len(spatial)], align_corners=False)
        # One map for all channels: the first channel holds it.
        others = torch.zeros_like(images[:, 1:])
        return torch.cat([cam, others], dim=1)

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
    """One call of a network in this thread, and the layer of it that is read: the last one of the coarsest that may be
    read. Other threads may call the network meanwhile.
    """

    def __init__(self, network: nn.Module, names: set[str], layouts: _Layouts) -> None:
        self.network, self.names, self.layouts = network, names, layouts
        self.thread = get_ident()
        self.layer: _Layer | None = None
        self.unclear = ""

    def note(self, name: str, module: nn.Module, inputs: Any, output: Any) -> torch.Tensor | None:
        """Take the output of a layer that is as coarse, or coarser. A tensor that is returned replaces the output."""
        if not isinstance(output, torch.Tensor) or get_ident() != self.thread:
            return None
        layout = self.layouts.of(module, output.shape)
        if name not in self.names or not output.requires_grad:
            return None
        if layout is None:
            self.unclear = f"; {name!r} gives {tuple(output.shape)}"
            return None
        grid, channels_last = layout
        coarsest = self.layer.grid if self.layer else grid
        if not 1 < math.prod(grid) <= math.prod(coarsest):
            return None
        # A change in place gives the tensor another place in the graph, and this one stays. A view's would not.
        self.layer = _Layer(name, get_gradient_edge(output), output.detach().clone(), grid, channels_last)
        return output.clone() if is_view(output) else None


class _Layouts:
    """Where the channels and voxels of layers' outputs are, by the layers that ran before in a call of a network."""

    def __init__(self, images: tuple[int, ...]) -> None:
        self.images = images  # the shape (n, C, *spatial)
        self.grids = {images[2:]}  # those of layers whose kind tells where their channels are
        self.any_last = False  # whether a layer had its channels last
        self.axes: dict[tuple[int, ...], set[int]] = {}  # by an output's shape: where its channels were, 1 or -1

    def of(self, module: nn.Module, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool] | None:
        """The grid of an output, and whether its channels are last; None where that is unclear."""
        own = _channel_axis(module)
        if own == -1 and len(shape) > 2:
            self.any_last = True
        are_tokens = len(shape) == 3 < len(self.images)
        if shape[:1] != self.images[:1] or not (are_tokens or len(shape) == len(self.images)):
            return None
        if_first: Any = self._of_tokens(shape[2]) if are_tokens else shape[2:]
        if_last: Any = self._of_tokens(shape[1]) if are_tokens else shape[1:-1]
        axis = own or self._inferred(shape, if_first, if_last)
        grid = if_first if axis == 1 else if_last
        if axis is None or grid is None or (are_tokens and axis == 1):
            return None
        if axis == -1 and grid not in self.grids | self._halves():  # as of windows, or heads
            return None
        if own:
            self.grids.add(grid)
            self.axes.setdefault(shape, set()).add(own)
        return grid, axis == -1

    def _inferred(self, shape: tuple[int, ...], if_first: Any, if_last: Any) -> int | None:
        """The axis of the channels, by a layer that gave this shape or by known grids; None where it is unclear.

        ``if_first`` and ``if_last`` are the grids that the output has if its channels are first or last.
        """
        axes = self.axes.get(shape, set())
        if len(axes) != 1:
            axes = {axis for axis, grid in ((1, if_first), (-1, if_last)) if grid in self.grids}
        if len(axes) == 1:
            return next(iter(axes))
        return None if self.any_last else 1

    def _of_tokens(self, count: int) -> tuple[int, ...] | None:
        """The only known grid with this number of voxels, or one less: the class token."""
        for voxels in (count, count - 1):
            fitting = [grid for grid in self.grids if math.prod(grid) == voxels]
            if fitting:
                return fitting[0] if len(fitting) == 1 else None
        return None

    def _halves(self) -> set[tuple[int, ...]]:
        """The grids that a linear layer may merge patches to."""
        return {tuple(math.ceil(size / 2) for size in grid) for grid in self.grids}


def _channel_axis(module: nn.Module) -> int | None:
    """The axis of the channels in a layer's output, where the layer's kind tells it."""
    if isinstance(module, _channels_first()):
        return 1
    over_one_axis = len(getattr(module, "normalized_shape", (0,))) == 1
    return -1 if type(module) in _LAST and over_one_axis else None


@lru_cache
def _channels_first() -> tuple[type, ...]:
    """Layers that give (n, channels, *spatial)."""
    kinds = [getattr(nn, f"{kind}{dims}d") for kind in _KINDS.split() for dims in (1, 2, 3)]
    return (nn.GroupNorm, nn.Upsample, *kinds)
