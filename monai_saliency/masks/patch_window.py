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


#: predictions of the image that a map costs at most, where nobody says how fine it shall be
_AFFORDABLE = 50


class PatchWindowMasks(Masks):
    """Windows side by side on the grid of an inferer's patches, so that each window touches as few patches as possible.

    A window's edge is the step between two patches, or a part of it, and the first window starts at the first patch's
    corner. With half overlap a window of one step touches two patches along each axis; a window of this size elsewhere
    touches up to three.

    Args:
        inferer: the sliding-window inferer. Its ``roi_size`` and ``overlap`` place the windows.
        divide: number of windows per step along each axis, at least 1. More give a finer map. By default as many as
            cost at most 50 predictions of the image, its own prediction included; where patches overlap so much that
            even one window per step costs more, a window is as many steps long as it takes.

    Raises:
        ValueError: when ``divide`` is less than 1, the inferer is not a ``SlidingWindowInferer``, or
            (from ``bind``) when the inferer does not fit the image.

    Example::

        >>> import torch
        >>> from monai.inferers import SlidingWindowInferer
        >>> masks = PatchWindowMasks(SlidingWindowInferer(roi_size=(4, 4), overlap=0.5), divide=1)
        >>> len(masks.bind(torch.zeros(1, 8, 8)))  # windows of 2 x 2 voxels
        16
    """

    shorter = "a smaller divide, for a coarser map"

    def __init__(self, inferer: SlidingWindowInferer, divide: int | None = None) -> None:
        self.divide = None if divide is None else whole_number("divide", divide, 1)
        words = "a SlidingWindowInferer, whose patches make the grid"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        grid = PatchGrid(self.inferer, image.shape[1:])
        window = _affordable(grid) if self.divide is None else grid.window(self.divide)
        return _BoundPatchWindowMasks(SlidingWindowMasks(window, window), image, spacing)


def _affordable(grid: PatchGrid) -> list[int]:
    """The edges of the smallest windows that are affordable."""
    divide, times = 1, 1
    while grid.predictions(grid.window(divide + 1)) <= _AFFORDABLE and divide < max(grid.step):
        divide += 1
    while divide == 1 and grid.predictions(grid.window(1, times)) > _AFFORDABLE:
        times += 1
    return grid.window(divide, times)


class _BoundPatchWindowMasks(BoundSlidingWindowMasks):
    def __init__(self, masks: SlidingWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(masks, image, spacing)
        self.starts = [np.arange(0, n, w) for n, w in zip(self.spatial_shape, self.window_shape, strict=True)]
        self.key = ("PatchWindowMasks", self.window_shape, self.spatial_shape)
