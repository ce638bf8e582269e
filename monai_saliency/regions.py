"""Regions of a scan that masks hide as a whole, and what a map says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.explanations import Explanation
from monai_saliency.utils import require, whole_numbers

__all__ = ["REGION_COLUMNS", "Supervoxels", "region_rows", "whole_image"]

REGION_COLUMNS = ("case", "class", "channel", "region", "name", "saliency", "volume_ml")


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


def region_rows(
    explanation: Explanation, spacing: Sequence[float] | None = None, names: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """What a map of regions says of each, as rows of a table.

    Args:
        explanation: of masks that are made of regions.
        spacing: the explained image's voxel sizes in mm, for volumes.
        names: of the regions, by label.

    Returns:
        one dictionary with the keys of :data:`REGION_COLUMNS` for each map and region: the class or channel explained;
        the image's channel where each has a map; the region's label and name; its value in the map, in the score's unit
        (where each region was hidden in turn, how far the score fell); and its volume in ml as the network saw it.

    Raises:
        ValueError: when the masks are not made of regions.
    """
    regions = explanation.masks.regions
    if regions is None:
        raise ValueError("the masks are not made of regions, so no region has a value: use RegionMasks")
    named = {int(label): name for label, name in (names or {}).items()}
    index = regions.index.flatten().cpu()
    counts = index.bincount(minlength=len(regions.values) + 1)
    # A plane has no volume.
    voxel = float(np.prod(spacing)) / 1000 if spacing is not None and len(spacing) == 3 else None
    rows = []
    for (label, channel, _), saliency in zip(explanation.explained, explanation.saliency, strict=True):
        # A map is flat inside a region; its mean there is its value.
        values = index.bincount(saliency.flatten().cpu().double(), minlength=len(counts)) / counts
        for place, region in enumerate(regions.values, start=1):
            rows.append(
                {
                    "case": explanation.name,
                    "class": label,
                    "channel": "" if channel is None else channel,
                    "region": region,
                    "name": named.get(int(region), ""),
                    "saliency": float(values[place]),
                    "volume_ml": "" if voxel is None else round(int(counts[place]) * voxel, 6),
                }
            )
    return rows
