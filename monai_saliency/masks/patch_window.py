"""Windows on the grid of a sliding-window inferer's patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.sliding_window import BoundSlidingWindowMasks, SlidingWindowMasks
from monai_saliency.utils.arguments import whole_numbers
from monai_saliency.utils.patch_grid import PatchGrid

__all__ = ["PatchWindowMasks"]


class PatchWindowMasks(Masks):
    """Windows beside each other on the grid of an inferer's patches, each of which therefore touches the fewest.

    A window is as large as the step from patch to patch, and the first lies in the first patch's corner: with half
    overlap each touches two patches along an axis, where windows of that size elsewhere touch up to three.

    Args:
        inferer: its patch size and overlap make the grid.
        divide: windows for each step along each axis, for finer maps.

    Raises:
        ValueError: when the inferer is not a ``SlidingWindowInferer``.
    """

    def __init__(self, inferer: SlidingWindowInferer, divide: int = 1) -> None:
        whole_numbers("divide", divide, 1)
        if not isinstance(inferer, SlidingWindowInferer):
            raise ValueError(
                f"`inferer` must be a SlidingWindowInferer, whose patches make the grid, got {type(inferer).__name__}"
            )
        self.inferer = inferer
        self.divide = int(divide)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        step = PatchGrid(self.inferer, image.shape[1:]).step
        # A patch that is larger than the image has a step that is too.
        window = [min(-(-s // self.divide), n) for s, n in zip(step, image.shape[1:], strict=True)]
        return _BoundPatchWindowMasks(SlidingWindowMasks(window, window), image, spacing)


class _BoundPatchWindowMasks(BoundSlidingWindowMasks):
    def __init__(self, masks: SlidingWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(masks, image, spacing)
        self.starts = [np.arange(0, n, w) for n, w in zip(self.spatial_shape, self.window_shape, strict=True)]
        self.key = ("PatchWindowMasks", self.window_shape, self.spatial_shape)
