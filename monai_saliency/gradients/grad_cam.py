"""Grad-CAM (Selvaraju et al., ICCV 2017)."""

from __future__ import annotations

import logging
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
    ``(n, channels, *spatial)``. In a network with layers whose channels come last, as in Swin transformers and a ViT,
    only outputs are read that have the shape of a convolution's, of its normalisation's or of its pooling's. The
    layer's grid is taken to cover the image as it lies, so the map is wrong for a network that first crops, flips or
    transposes the image, or averages over mirrored copies of it.

    Args:
        target_layer: a layer by its name in ``network.named_modules()``, such as ``"class_layers.relu"``. None: the
            last one of those whose output is coarsest, but has more than one voxel. That is the layer before the
            pooling of a classifier, and the bottom of a U-Net. It is named in the log. Of a layer that runs several
            times in a call, such as a ReLU that blocks share, the coarsest output is read, and of equally coarse ones
            the last.
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
        if self.target_layer is None:
            names = set(modules) - {""} or {""}
        elif self.target_layer in modules:
            names = {self.target_layer}
        else:
            words = f"is not a layer of {type(network).__name__}, such as {', '.join(list(modules)[-3:])}"
            raise ValueError(f"`target_layer` {self.target_layer!r} {words}: see network.named_modules()")
        watched = _Watched(network, names, images)
        with ExitStack() as stack:
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
                f"*spatial) of two voxels or more with a derivative, for images {tuple(images.shape)}{watched.unclear}"
            )
        (derivative,) = torch.autograd.grad(outputs, layer.edge, grads, retain_graph=True, allow_unused=True)
        if derivative is None:
            raise NoGradient(f"the score does not depend on the layer {layer.name!r}, as far as autograd sees")
        if _named.get(watched.network) != layer.name:
            _named[watched.network] = layer.name
            logger.info("Grad-CAM of %s reads the layer %r", type(watched.network).__name__, layer.name)
        return derivative

    def read(self, derivative: torch.Tensor, watched: Any, images: torch.Tensor) -> torch.Tensor:
        activation = watched.layer.value.to(images.dtype)
        weights = derivative.to(images.dtype).mean(dim=tuple(range(2, derivative.ndim)), keepdim=True)
        cam = (weights * activation).sum(dim=1, keepdim=True).relu()
        cam = F.interpolate(cam, images.shape[2:], mode=_LINEAR[images.ndim - 2], align_corners=False)
        # One map for all channels: the first channel holds it.
        return torch.cat([cam, cam.new_zeros(len(cam), images.shape[1] - 1, *images.shape[2:])], dim=1)

    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return mean[0]


class _Layer(NamedTuple):
    """The output of a layer as the layer gave it: its place in the graph, and a copy ``(n, channels, *grid)``."""

    name: str
    edge: GradientEdge
    value: torch.Tensor


class _Watched:
    """One call of a network, and the layer of it that is read: the last one of the coarsest that may be read."""

    def __init__(self, network: nn.Module, names: set[str], images: torch.Tensor) -> None:
        self.network, self.names, self.images = network, names, images
        self.layer: _Layer | None = None
        self.unclear = ""
        #: the shapes of outputs whose channels are first or last, as the layer's kind tells
        self.first: set[torch.Size] = set()
        self.last: set[torch.Size] = set()

    def note(self, name: str, module: nn.Module, inputs: Any, output: Any) -> torch.Tensor | None:
        """Take the output of a layer that is as coarse, or coarser. A tensor that is returned replaces the output."""
        if not isinstance(output, torch.Tensor):
            return None
        shape, is_first = output.shape, isinstance(module, _channels_first())
        if is_first:
            self.first.add(shape)
        elif type(module) in _LAST and output.ndim > 2:
            self.last.add(shape)
        if name not in self.names or not output.requires_grad:
            return None
        # Of another layer's output the shape must tell, where some layers have their channels last.
        is_first = is_first or not self.last or (shape in self.first and shape not in self.last)
        if output.ndim != self.images.ndim or len(output) != len(self.images) or not is_first:
            self.unclear = f"; {name!r} gives {tuple(shape)}"
            return None
        voxels = output[0, 0].numel()
        if voxels < 2 or (self.layer is not None and voxels > self.layer.value[0, 0].numel()):
            return None
        # A change in place gives the tensor another place in the graph, and this one stays. A view's would not.
        self.layer = _Layer(name, get_gradient_edge(output), output.detach().clone())
        return output.clone() if is_view(output) else None


@lru_cache
def _channels_first() -> tuple[type, ...]:
    """Layers that give (n, channels, *spatial)."""
    kinds = [getattr(nn, f"{kind}{dims}d") for kind in _KINDS.split() for dims in (1, 2, 3)]
    return (nn.GroupNorm, nn.Upsample, *kinds)
