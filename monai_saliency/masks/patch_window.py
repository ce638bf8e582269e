"""Windows on the grid of a sliding-window inferer's patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.sliding_window import BoundSlidingWindowMasks, SlidingWindowMasks
from monai_saliency.utils.arguments import instance, whole_number
from monai_saliency.utils.patch_grid import PatchGrid

__all__ = ["PatchWindowMasks"]


class PatchWindowMasks(Masks):
    """Windows side by side on the grid of an inferer's patches, so that each window touches as few patches as possible.

    A window's edge is the step between two patches, and the first window starts at the first patch's corner. With half
    overlap a window touches two patches along each axis; a window of this size elsewhere touches up to three.

    Args:
        inferer: the sliding-window inferer. Its ``roi_size`` and ``overlap`` place the windows.
        divide: number of windows per step along each axis, at least 1. More give a finer map.

    Raises:
        ValueError: when ``divide`` is less than 1, the inferer is not a ``SlidingWindowInferer``, or
            (from ``bind``) when the inferer does not fit the image.

    Example::

        >>> import torch
        >>> from monai.inferers import SlidingWindowInferer
        >>> masks = PatchWindowMasks(SlidingWindowInferer(roi_size=(4, 4), overlap=0.5))
        >>> len(masks.bind(torch.zeros(1, 8, 8)))  # windows of 2 x 2 voxels
        16
    """

    def __init__(self, inferer: SlidingWindowInferer, divide: int = 1) -> None:
        self.divide = whole_number("divide", divide, 1)
        words = "a SlidingWindowInferer, whose patches make the grid"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        step = PatchGrid(self.inferer, image.shape[1:]).step
        # The step of a patch that is larger than the image is larger than the image too.
        window = [min(-(-s // self.divide), n) for s, n in zip(step, image.shape[1:], strict=True)]
        return _BoundPatchWindowMasks(SlidingWindowMasks(window, window), image, spacing)


class _BoundPatchWindowMasks(BoundSlidingWindowMasks):
    def __init__(self, masks: SlidingWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(masks, image, spacing)
        self.starts = [np.arange(0, n, w) for n, w in zip(self.spatial_shape, self.window_shape, strict=True)]
        self.key = ("PatchWindowMasks", self.window_shape, self.spatial_shape)
