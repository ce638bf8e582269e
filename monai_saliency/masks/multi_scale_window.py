"""Windows of several sizes that slide over the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.masks.box import BoundBoxMasks
from monai_saliency.masks.sliding_window import BoundSlidingWindowMasks, SlidingWindowMasks
from monai_saliency.utils.arguments import whole_number

__all__ = ["MultiScaleWindowMasks"]


class MultiScaleWindowMasks(Masks):
    """Windows of several sizes that slide over the image, in 2D and 3D, all hidden in turn.

    Level l has the windows of :class:`~monai_saliency.SlidingWindowMasks` of edge ``window_size / 2^l`` and stride
    ``stride / 2^l``; the largest windows come first. Each level hides a voxel about as often, so that levels weigh
    alike in :class:`~monai_saliency.OcclusionScoring`.

    Args:
        window_size: edge of a window of the first level in ``unit``, one number or one per axis; by default a quarter
            of each axis of the image, in whole voxels, rounded up.
        levels: how many sizes, at least 1, each half as long as the one before, rounded down, at least one voxel. A
            level whose windows are those of the level before is left out.
        stride: distance between the starts of two windows of the first level in ``unit``, one number or one per axis;
            by default half of each level's window.
        unit: unit of ``window_size`` and ``stride``, ``"voxel"`` or ``"mm"``.
        smooth: width in voxels over which the edge of a window rises, as for
            :class:`~monai_saliency.SlidingWindowMasks`.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for :class:`~monai_saliency.SlidingWindowMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency import MultiScaleWindowMasks
        >>> bound = MultiScaleWindowMasks(window_size=(1, 4), levels=2, stride=(1, 4)).bind(torch.zeros(1, 1, 8))
        >>> len(bound), bound.window_shapes  # two windows of 4 voxels, then four of 2
        (6, [(1, 4), (1, 2)])
        >>> bound.render([1, 2])[:, 0, 0].tolist()
        [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """

    shorter = "fewer levels or a larger window_size, for a coarser map"

    def __init__(
        self,
        window_size: float | Sequence[float] | None = None,
        levels: int = 3,
        stride: float | Sequence[float] | None = None,
        unit: str = "voxel",
        smooth: float | Sequence[float] = 0,
    ) -> None:
        checked = SlidingWindowMasks(window_size, stride, unit, smooth)
        self.window_size = window_size
        self.levels = whole_number("levels", levels, 1)
        self.stride = stride
        self.unit = checked.unit
        self.smooth = checked.smooth

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundMultiScaleWindowMasks(self, image, spacing)

    def level(self, number: int, spatial_shape: Sequence[int]) -> SlidingWindowMasks:
        """The windows of one level, from 0, for an image of a shape."""
        window = [-(-n // 4) for n in spatial_shape] if self.window_size is None else self.window_size
        stride = None if self.stride is None else self._divided(self.stride, 2**number)
        return SlidingWindowMasks(self._divided(window, 2**number), stride, self.unit, self.smooth)

    def _divided(self, size: float | Sequence[float], by: int) -> list[float]:
        sizes = np.atleast_1d(np.asarray(size))
        return (sizes / by if self.unit == "mm" else np.maximum(1, sizes // by)).tolist()


class _BoundMultiScaleWindowMasks(BoundBoxMasks):
    """The windows of one image.

    Attributes:
        levels: the windows of each level.
        window_shapes: the edges of each level's windows, in voxels.
    """

    def __init__(self, masks: MultiScaleWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(image)
        self.levels: list[BoundSlidingWindowMasks] = []
        for number in range(masks.levels):
            level = BoundSlidingWindowMasks(masks.level(number, self.spatial_shape), image, spacing)
            if not self.levels or level.key != self.levels[-1].key:
                self.levels.append(level)
        self.window_shapes = [level.window_shape for level in self.levels]
        self.smooth = self.levels[0].smooth
        self.key = ("MultiScaleWindowMasks", *(level.key for level in self.levels))

    def __len__(self) -> int:
        return sum(map(len, self.levels))

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        each = [level.codes(range(len(level))) for level in self.levels]
        chosen = np.asarray(ids, dtype=int)
        return {name: np.concatenate([codes[name] for codes in each])[chosen] for name in ("first", "stop")}
