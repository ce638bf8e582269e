"""Regions made from the image itself."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import Spacing
from monai_saliency.utils.arguments import number, positive_numbers, require, whole_number, written
from monai_saliency.utils.tensors import checked_label

logger = logging.getLogger(__name__)


class Supervoxels:
    """Regions of similar brightness, made from the image itself (SLIC: Achanta et al., TPAMI 2012), in 2D and 3D.

    Give it as ``regions`` to ``RegionMasks``. Each voxel lies in exactly one region, and equal
    images get equal regions. Distances are in mm if voxel sizes are known, otherwise in voxels. Each channel is first
    scaled to [0, 1]. The log warns when one region holds more than half of the voxels.

    Args:
        num_regions: approximate number of regions, at least 1. SLIC may return fewer or more.
        compactness: weight of distance against brightness. With higher values the regions become more alike in shape.

    Raises:
        ValueError: for settings out of range.
        OptionalImportError: when scikit-image is not installed.

    Example::

        >>> import torch
        >>> from monai_saliency import Supervoxels
        >>> labels = Supervoxels(num_regions=8)(torch.full((1, 12, 12, 12), 4.0))
        >>> labels.shape, labels.unique().tolist()
        (torch.Size([1, 12, 12, 12]), [1, 2, 3, 4, 5, 6, 7, 8])
    """

    __repr__ = written

    def __init__(self, num_regions: int = 100, compactness: float = 0.1) -> None:
        self.num_regions = whole_number("num_regions", num_regions, 1)
        positive_numbers("compactness", compactness)
        self.compactness = number("compactness", compactness)

    def __call__(self, image: Tensor, spacing: Spacing = None) -> Tensor:
        """Make the regions of one image."""
        labels = self._slic(self._scaled(image), self.num_regions, spacing)
        self._warn_if_one_holds_most(labels)
        return torch.from_numpy(labels.astype(np.int64))[None].to(image.device)

    def _scaled(self, image: Tensor) -> np.ndarray:
        """Each channel in [0, 1], channels last, float64."""
        channels = image.flatten(1).cpu().double()
        low, high = channels.amin(dim=1, keepdim=True), channels.amax(dim=1, keepdim=True)
        scaled = ((channels - low) / (high - low).clamp_min(torch.finfo(torch.float64).tiny)).reshape(image.shape)
        return np.asarray(scaled.movedim(0, -1).numpy())

    def _slic(self, scaled: np.ndarray, count: int, spacing: Spacing, mask: np.ndarray | None = None) -> np.ndarray:
        """About ``count`` regions, counted from 1; 0 outside of a mask."""
        slic = require("skimage.segmentation", extra="regions").slic
        labels = slic(
            scaled,
            n_segments=count,
            compactness=self.compactness,
            spacing=spacing,
            convert2lab=False,
            start_label=1,
            channel_axis=-1,
            mask=mask,
        )
        return np.asarray(labels)

    def _warn_if_one_holds_most(self, labels: np.ndarray) -> None:
        """Warn of a partition that can hardly tell places apart. Of two regions one may well be the larger one."""
        share = np.bincount(labels.ravel()).max() / labels.size
        if self.num_regions > 2 and share > 0.5:
            logger.warning(
                "one of %d supervoxels holds %.0f %% of the voxels, so the map cannot show where the evidence is: "
                "raise `compactness` (%g) for regions of more equal size, or clip the brightest voxels",
                self.num_regions,
                100 * share,
                self.compactness,
            )


class OrganSupervoxels(Supervoxels):
    """Supervoxels that each lie in one region of the case's label map: large organs are divided, small ones stay whole
    (the hybrid of organs and supervoxels of Brioso et al., arXiv 2604.11775).

    Each region of the label map, the voxels of label 0 among them, has a share of the supervoxels as large as its share
    of the voxels, and at least one.

    Args:
        num_regions: approximate number of regions, at least 1; more where the label map has many small ones.
        compactness: as for :class:`Supervoxels`.

    Raises:
        ValueError: for settings out of range, and (when called) without a label map.
        OptionalImportError: when scikit-image is not installed.

    Example::

        >>> import torch
        >>> labels = torch.zeros(1, 12, 12)
        >>> labels[:, :, 9:] = 3  # a quarter of the voxels
        >>> found = OrganSupervoxels(num_regions=4)(torch.full((1, 12, 12), 2.0), labels=labels)
        >>> found[labels == 0].unique().tolist(), found[labels == 3].unique().tolist()
        ([1, 2, 3], [4])
    """

    needs_labels = True

    def __call__(self, image: Tensor, spacing: Spacing = None, labels: Tensor | None = None) -> Tensor:
        """Make the regions of one image, as :class:`Supervoxels` does, starting with the lowest label."""
        if labels is None:
            raise ValueError("OrganSupervoxels need the case's label map: give `labels`, or take Supervoxels")
        scaled, parts = self._scaled(image), checked_label(labels, image.shape[1:])[0].cpu().numpy()
        found = np.zeros(parts.shape, dtype=np.int64)
        for value in np.unique(parts):
            inside = parts == value
            count = round(self.num_regions * float(inside.mean()))
            box = tuple(slice(int(at.min()), int(at.max()) + 1) for at in inside.nonzero())
            divided = self._slic(scaled[box], count, spacing, inside[box]) if count > 1 else inside[box]
            _, numbers = np.unique(divided[inside[box]], return_inverse=True)
            found[inside] = found.max() + 1 + numbers.ravel()
        self._warn_if_one_holds_most(found)
        return torch.from_numpy(found)[None].to(image.device)


def whole_image(image: Tensor, spacing: Spacing = None) -> Tensor:
    """A label map ``(1, *spatial)`` with one region, the whole image, for an image ``(C, *spatial)``.

    Give it as ``regions`` to :class:`~monai_saliency.masks.RegionMasks`, to hide whole channels.

    Example::

        >>> import torch
        >>> whole_image(torch.zeros(3, 1, 4)).tolist()
        [[[1, 1, 1, 1]]]
    """
    return torch.ones_like(image[:1], dtype=torch.int64)
