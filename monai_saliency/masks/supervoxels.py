"""Regions that are made of the image itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.utils.arguments import whole_numbers
from monai_saliency.utils.optional_imports import require

__all__ = ["Supervoxels", "whole_image"]


class Supervoxels:
    """Regions of similar brightness, made of the image itself (SLIC: Achanta et al., TPAMI 2012), in 2D and 3D.

    For :class:`~monai_saliency.RegionMasks`'s ``regions``. Every voxel is in one region, and equal images have equal
    regions. They begin at seeds laid evenly over the voxels, and grow by distances in mm where voxel sizes are known.
    Channels count alike, each scaled to [0, 1].

    Args:
        num_regions: about how many; SLIC itself settles on the number.
        compactness: what distance counts against brightness: higher, and regions are more alike in shape.
        sigma: standard deviation in voxels (of a voxel of 1 mm where sizes are known) of the blur before.

    Raises:
        OptionalImportError: when scikit-image is not installed.
    """

    def __init__(self, num_regions: int = 100, compactness: float = 0.1, sigma: float = 0.0) -> None:
        whole_numbers("num_regions", num_regions, 1)
        self.num_regions = int(num_regions)
        self.compactness = float(compactness)
        self.sigma = float(sigma)

    def __call__(self, image: torch.Tensor, spacing: Sequence[float] | None = None) -> torch.Tensor:
        """The label map int64 ``(1, *spatial)``, regions counted from 1, of an image ``(C, *spatial)``."""
        slic = require("skimage.segmentation", extra="regions").slic
        channels = image.flatten(1).cpu().double()
        low, high = channels.amin(dim=1, keepdim=True), channels.amax(dim=1, keepdim=True)
        scaled = ((channels - low) / (high - low).clamp_min(torch.finfo(torch.float64).tiny)).reshape(image.shape)
        labels = slic(
            scaled.movedim(0, -1).numpy(),
            n_segments=self.num_regions,
            compactness=self.compactness,
            sigma=self.sigma,
            spacing=spacing,
            convert2lab=False,
            start_label=1,
            channel_axis=-1,
        )
        return torch.from_numpy(labels.astype(np.int64))[None].to(image.device)


def whole_image(image: torch.Tensor, spacing: Sequence[float] | None = None) -> torch.Tensor:
    """One region that is the whole image: the label map ``(1, *spatial)`` of an image ``(C, *spatial)``."""
    return torch.ones_like(image[:1], dtype=torch.int64)
