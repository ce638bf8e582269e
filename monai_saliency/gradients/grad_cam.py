"""Grad-CAM (Selvaraju et al., ICCV 2017)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from monai_saliency.estimators.base import Meaning
from monai_saliency.gradients.base import GradientMethod, NoGradient
from monai_saliency.utils.arguments import instance

__all__ = ["GradCAM"]

logger = logging.getLogger(__name__)

#: by network: the layer that the log has named
_named: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


class GradCAM(GradientMethod):
    """The activations of a layer, weighted by the mean derivative of the score of each, where their sum is above 0
    (Section 3, equations 1 and 2), brought to the image's grid linearly. It is not normalised.

    For a segmentation the score is that of the target's region (Vinogradova, Dibrov and Myers, AAAI 2020). Under a
    sliding window each patch has its own map, and these are added up, as their shares of the score are.

    Args:
        target_layer: a layer by its name in ``network.named_modules()``, such as ``"class_layers.relu"``. None: the
            last one of those whose output is coarsest, but has more than one voxel. That is the layer before the
            pooling of a classifier, and the bottom of a U-Net. It is named in the log.

    Example::

        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.ReLU(), torch.nn.Flatten())
        >>> images = torch.ones(1, 1, 4, 4, requires_grad=True)
        >>> with GradCAM().watching(network) as layers:
        ...     output = network(images)
        >>> layers.name
        '1'
    """

    meaning = Meaning("Grad-CAM, without sign", 0.0, in_score_unit=False, signed=False)

    def __init__(self, target_layer: str | None = None) -> None:
        self.target_layer = instance("target_layer", target_layer, str, "the name of a layer", none=True)

    def __len__(self) -> int:
        return 1

    def images(self, image: torch.Tensor, fill: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        return image[None].expand(len(indices), *image.shape).clone()

    @contextmanager
    def watching(self, network: Any) -> Iterator[_Layer]:
        if not isinstance(network, torch.nn.Module) or isinstance(network, torch.jit.ScriptModule):
            raise NoGradient(f"it is a {type(network).__name__}, which has no layers that could be watched")
        modules = dict(network.named_modules())
        if self.target_layer is None:
            modules = {name: each for name, each in modules.items() if name} or modules
        elif self.target_layer in modules:
            modules = {self.target_layer: modules[self.target_layer]}
        else:
            words = f"is not a layer of {type(network).__name__}, such as {', '.join(list(modules)[-3:])}"
            raise ValueError(f"`target_layer` {self.target_layer!r} {words}: see network.named_modules()")
        layer = _Layer()
        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_hook(partial(layer.note, name)).remove)
            yield layer
        if layer.name is not None and _named.get(network) != layer.name:
            _named[network] = layer.name
            logger.info("Grad-CAM of %s reads the layer %r", type(network).__name__, layer.name)

    def pull(
        self, images: torch.Tensor, watched: Any, outputs: Sequence[torch.Tensor], grads: Sequence[Any], keep: bool
    ) -> torch.Tensor | None:
        if watched.activation is None:
            words = "gives a tensor (n, channels, *spatial) of two voxels or more with a derivative"
            raise NoGradient(f"no layer of those that are watched ({self.target_layer or 'all'}) {words}")
        activation = watched.activation
        (found,) = torch.autograd.grad(outputs, activation, grads, retain_graph=keep, allow_unused=True)
        if found is None:
            return None
        weights = found.mean(dim=tuple(range(2, found.ndim)), keepdim=True)
        cam = (weights * activation.detach()).sum(dim=1, keepdim=True).relu().to(images.dtype)
        cam = F.interpolate(cam, images.shape[2:], mode=_LINEAR[images.ndim - 2], align_corners=False)
        # One map for all channels: it stands in the first of them.
        return torch.cat([cam, cam.new_zeros(len(cam), images.shape[1] - 1, *images.shape[2:])], dim=1)

    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return mean[0]


class _Layer:
    """The layer that is read, of the last call of the network."""

    name: str | None = None
    activation: torch.Tensor | None = None

    def note(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        """Take the output of a layer that is as coarse, or coarser."""
        if not isinstance(output, torch.Tensor) or not output.requires_grad or output.ndim not in (3, 4, 5):
            return
        size = math.prod(output.shape[2:])
        if size > 1 and (self.activation is None or size <= math.prod(self.activation.shape[2:])):
            self.name, self.activation = name, output
