"""Networks around networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.networks.outputs import read

__all__ = ["OnImageGrid"]

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}  # by the number of axes


class OnImageGrid(torch.nn.Module):
    """A segmentation network of another library as MONAI's are: images in, logits on the images' grid out.

    SegFormer, and most others of ``transformers``, give an object whose ``logits`` have a quarter of the image's
    resolution. They are brought to the image's grid linearly, between voxel centres, as that library's own
    postprocessing does. So the network predicts in a bundle, patch by patch too, and its regions are the image's.

    Args:
        network: it, such as ``SegformerForSemanticSegmentation.from_pretrained(folder)``.
        output: which part of its output the logits are: a key, an index, or several from the outside in; all of it
            where None.

    Example::

        OnImageGrid(SegformerForSemanticSegmentation(SegformerConfig(num_labels=3)), output="logits")
    """

    def __init__(self, network: torch.nn.Module, output: str | int | Sequence[str | int] | None = None) -> None:
        super().__init__()
        self.network = network
        self.output = output

    def extra_repr(self) -> str:
        """For printing, and for :func:`network_fingerprint`."""
        return f"output={self.output!r}"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, classes, *spatial)`` of images ``(B, C, *spatial)``.

        Raises:
            ValueError: when the network gives no logits of as many axes as the images.
        """
        logits = read(self.network(images), self.output)
        if not isinstance(logits, torch.Tensor) or logits.ndim != images.ndim:
            found = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ValueError(
                f"`output` must read logits (B, classes, *spatial) of images of shape {tuple(images.shape)}, got "
                f"{found}"
            )
        if logits.shape[2:] == images.shape[2:]:
            return logits
        return torch.nn.functional.interpolate(logits, images.shape[2:], mode=_LINEAR[images.ndim], align_corners=False)
