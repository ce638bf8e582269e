"""Networks of other libraries with the interface of MONAI's networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.networks.outputs import read
from monai_saliency.utils.tensors import shape_in_words

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}  # by the number of axes


class OnImageGrid(torch.nn.Module):
    """A segmentation network of another library with MONAI's interface: images in, logits on the images' grid out.

    SegFormer and most other segmentation networks of ``transformers`` return an object with ``logits`` of a quarter of
    the image's resolution. Here these are resampled linearly, as ``transformers`` does in its postprocessing.

    Args:
        network: the network, such as ``SegformerForSemanticSegmentation.from_pretrained(folder)``.
        output: the part of the network's output that holds the logits: a key, an index, or several from the outside in;
            None for all of it.

    Example::

        >>> import torch
        >>> class Coarse(torch.nn.Module):
        ...     def forward(self, images):
        ...         return {"logits": images[:, :2, ::4, ::4]}
        >>> OnImageGrid(Coarse(), output="logits")(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 2, 64, 64])
    """

    def __init__(self, network: torch.nn.Module, output: str | int | Sequence[str | int] | None = None) -> None:
        super().__init__()
        self.network = network
        self.output = output

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute logits ``(B, classes, *spatial)`` of images ``(B, C, *spatial)``, on the images' grid."""
        logits = read(self.network(images), self.output)
        if not isinstance(logits, torch.Tensor) or logits.ndim != images.ndim:
            words = f"`output` must read logits (B, classes, *spatial) of images of {shape_in_words(images)}"
            raise ValueError(f"{words}, got {shape_in_words(logits)}")
        if logits.shape[2:] == images.shape[2:]:
            return logits
        mode = _LINEAR[images.ndim]
        return torch.nn.functional.interpolate(logits, images.shape[2:], mode=mode, align_corners=False)
