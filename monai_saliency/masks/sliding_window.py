"""Windows that slide over the image, of one size or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.masks.box import BoundBoxMasks
from monai_saliency.masks.smooth import check_smooth, widths_of
from monai_saliency.utils.arguments import (
    check_option,
    per_axis,
    positive_numbers,
    voxels_of_mm,
    whole_number,
    whole_numbers,
)

__all__ = [
    "MultiScaleWindowMasks",
    "SlidingWindowMasks",
]


class SlidingWindowMasks(Masks):
    """Windows that slide over the image, in 2D and 3D. Each mask hides one box (Zeiler and Fergus, ECCV 2014, section
    4.2).

    Along each axis a window starts every ``stride`` voxels. All windows are then shifted by half of the last window's
    overhang and cut at the border. The last axis changes fastest. In 2D these are the masks of xaitk-saliency's
    ``SlidingWindow``, in the same order. Sizes in mm are rounded to whole voxels (a half rounds up), at least one.

    Args:
        window_size: edge of the hidden box in ``unit``, one number or one per axis; an eighth of each axis by default.
        stride: distance between the starts of two windows in ``unit``, one number or one per axis; by default half of
            the window.
        unit: unit of ``window_size`` and ``stride``, ``"voxel"`` or ``"mm"``.
        smooth: width in voxels over which an edge rises in a straight line, one number or one per axis; crisp edges by
            default (:mod:`monai_saliency.masks.smooth`).

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when a window is larger than the image, when there is
            not one size per axis, or when sizes are in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> from monai_saliency import SlidingWindowMasks
        >>> bound = SlidingWindowMasks(window_size=(1, 2), stride=(1, 2)).bind(torch.zeros(1, 1, 6))
        >>> bound.render(range(3))[:, 0, 0].tolist()
        [[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    """

    shorter = "a larger window_size or stride, for a coarser map"

    def __init__(
        self,
        window_size: float | Sequence[float] | None = None,
        stride: float | Sequence[float] | None = None,
        unit: str = "voxel",
        smooth: float | Sequence[float] = 0,
    ) -> None:
        unit = check_option("unit", unit, ("voxel", "mm"))
        if unit == "mm" and window_size is None:
            raise ValueError("`unit` 'mm' needs a `window_size`: the default, an eighth of each axis, is in voxels")
        for name, value in {"window_size": window_size, "stride": stride}.items():
            if value is not None and unit == "mm":
                positive_numbers(name, value)
            elif value is not None:
                whole_numbers(name, value, 1)
        self.window_size = window_size
        self.stride = stride
        self.unit = unit
        self.smooth = check_smooth(smooth)

    def sizes(self, spatial_shape: Sequence[int]) -> tuple[Any, Any]:
        """The window and the stride for an image of a shape, in the unit: one number or one per axis."""
        window = [-(-n // 8) for n in spatial_shape] if self.window_size is None else self.window_size
        if self.stride is not None:
            return window, self.stride
        half = np.asarray(window) / 2 if self.unit == "mm" else np.maximum(1, np.asarray(window) // 2)
        return window, half.tolist()

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return BoundSlidingWindowMasks(self, image, spacing)


class BoundSlidingWindowMasks(BoundBoxMasks):
    """The windows of one image."""

    def __init__(self, masks: SlidingWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(image)
        size, step = masks.sizes(self.spatial_shape)
        window = per_axis("window_size", size, self.spatial_shape)
        strides = per_axis("stride", step, self.spatial_shape)
        if masks.unit == "mm":
            window, strides = voxels_of_mm(window, spacing), voxels_of_mm(strides, spacing)
        self.window_shape = window
        if any(w > n for w, n in zip(self.window_shape, self.spatial_shape, strict=True)):
            raise ValueError(
                f"`window_size` {self.window_shape} is larger than the image's spatial shape {self.spatial_shape}, in "
                "voxels: a window that covers the whole image cannot show where the evidence lies; use a smaller one"
            )
        self.smooth = widths_of(masks.smooth, self.spatial_shape)
        self.key = ("SlidingWindowMasks", self.window_shape, strides, self.spatial_shape)
        if self.smooth:
            self.key = (*self.key, "smooth", self.smooth)
        self.starts = []
        for size, window, stride in zip(self.spatial_shape, self.window_shape, strides, strict=True):
            starts = np.arange(0, size, stride)
            overhang = window - (size - starts[-1])
            self.starts.append(starts - overhang // 2)

    def __len__(self) -> int:
        return math.prod(map(len, self.starts))

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        along = np.unravel_index(np.asarray(ids, dtype=int), [len(starts) for starts in self.starts])
        first = np.stack([starts[i] for starts, i in zip(self.starts, along, strict=True)], axis=-1)
        return {"first": first, "stop": first + self.window_shape}


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
    """The windows of one image."""

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
