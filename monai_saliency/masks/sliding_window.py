"""Windows that slide over the image, of one size or several, and windows on the grid of a model's patches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, Masks, Spacing
from monai_saliency.masks.sizes import check_sizes, check_unit, in_voxels
from monai_saliency.masks.smooth import averaged, grown, widths_of
from monai_saliency.utils.arguments import finite_numbers, instance, whole_number
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.utils.tensors import Box, to_device

#: by default a map costs at most as much as this number of predictions of the image
_AFFORDABLE = 50


class BoundBoxMasks(BoundMasks):
    """Masks that each hide one box and keep the rest. A subclass implements :meth:`codes`.

    Attributes:
        smooth: the width in voxels over which an edge rises, one per spatial axis; empty where all edges are crisp.
    """

    smooth: tuple[float, ...] = ()

    @abstractmethod
    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``first`` and ``stop``, int ``(n, spatial_dims)``: each box's first voxel, and the voxel behind its last."""

    def changed_boxes(self, ids: Ids) -> list[Box] | None:
        first, stop = self._inside(ids, self._whole)
        return [self._around(tuple(map(slice, *ends))) for ends in zip(first.tolist(), stop.tolist(), strict=True)]

    @property
    def hides_boxes(self) -> bool:
        return not self.smooth

    def _around(self, box: Box) -> Box:
        """A box, and the voxels around it that change a mask with smooth edges inside it."""
        return grown(box, self.smooth, self.spatial_shape) if self.smooth else box

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        first, stop = self._inside(ids, self._around(box))
        return np.asarray((first < stop).all(axis=1)), np.concatenate([first, stop], axis=1)

    def _inside(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """The first voxels of boxes, and those behind their last, inside a box."""
        codes = self.codes(ids)
        first, stop = [side.start for side in box], [side.stop for side in box]
        return np.maximum(codes["first"], first), np.minimum(codes["stop"], stop)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        # Which voxels of a line along an axis lie outside the box: small, so made here and copied once.
        voxels = [np.arange(side.start, side.stop) for side in box]
        ends = zip(codes["first"].T[:, :, None], codes["stop"].T[:, :, None], strict=True)
        lines = [(voxel < first) | (voxel >= stop) for voxel, (first, stop) in zip(voxels, ends, strict=True)]
        sizes = [len(voxel) for voxel in voxels]
        outside = to_device(np.concatenate(lines, axis=1), device, self.dtype).split(sizes, dim=1)
        # A voxel outside the box along any axis is kept. Only the last axis makes full-size masks, in one pass.
        masks = outside[0].view(len(outside[0]), 1, -1, *[1] * (len(box) - 1))
        for axis, line in enumerate(outside[1:], 1):
            masks = torch.maximum(masks, line.view(len(line), 1, *(-1 if a == axis else 1 for a in range(len(box)))))
        return masks


class SlidingWindowMasks(Masks):
    """Windows that slide over the image, in 2D and 3D. Each mask hides one box (Zeiler and Fergus, ECCV 2014, section
    4.2).

    Along each axis a window starts every ``stride`` voxels. All windows are then shifted by half of the last window's
    overhang and cut at the border. The last axis changes fastest. In 2D these are the masks of xaitk-saliency's
    ``SlidingWindow``, in the same order. Sizes in mm are rounded to whole voxels (a half rounds up), at least one.

    Args:
        window_size: edge of the hidden box in ``unit``, one number or one per axis; an eighth of each axis by default.
        stride: distance between the starts of two windows in ``unit``, one or one per axis; by default half the window.
        unit: unit of ``window_size`` and ``stride``, ``"voxel"`` or ``"mm"``.
        smooth: width in voxels over which an edge rises in a straight line, one number or one per axis; 0: crisp.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when a window is larger than the image, or when sizes
            are in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import SlidingWindowMasks
        >>> bound = SlidingWindowMasks(window_size=(1, 2), stride=(1, 2)).bind(torch.zeros(1, 1, 6))
        >>> bound.render(range(3))[:, 0, 0].tolist()
        [[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        window_size: float | Sequence[float] | None = None,
        stride: float | Sequence[float] | None = None,
        unit: str = "voxel",
        smooth: float | Sequence[float] = 0,
    ) -> None:
        self.unit = check_unit(unit, "window_size", window_size)
        check_sizes(unit, window_size=window_size, stride=stride)
        self.window_size = window_size
        self.stride = stride
        finite_numbers("smooth", smooth, 0)
        self.smooth = smooth

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return BoundSlidingWindowMasks(self, image, spacing)


class BoundSlidingWindowMasks(BoundBoxMasks):
    """The windows of one image."""

    def __init__(self, masks: SlidingWindowMasks, image: Tensor, spacing: Spacing) -> None:
        super().__init__(image)
        shape = self.spatial_shape
        size: Any = [-(-n // 8) for n in shape] if masks.window_size is None else masks.window_size
        self.window_shape = in_voxels("window_size", size, masks.unit, shape, spacing)
        step: Any = masks.stride
        if step is None:
            step = np.asarray(size) / 2 if masks.unit == "mm" else np.maximum(1, np.asarray(size) // 2)
        strides = in_voxels("stride", step, masks.unit, shape, spacing)
        if any(w > n for w, n in zip(self.window_shape, shape, strict=True)):
            raise ValueError(
                f"`window_size` {self.window_shape} is larger than the image's spatial shape {shape}, in voxels: a "
                "window that covers the whole image cannot show where the evidence lies; use a smaller one"
            )
        self.smooth = widths_of(masks.smooth, shape)
        self.key = ("SlidingWindowMasks", self.window_shape, strides, shape, *self.smooth)
        self.starts = []
        for n, window, stride in zip(shape, self.window_shape, strides, strict=True):
            starts = np.arange(0, n, stride)
            overhang = window - (n - starts[-1])
            self.starts.append(starts - overhang // 2)

    def __len__(self) -> int:
        return math.prod(map(len, self.starts))

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        along = np.unravel_index(np.asarray(ids, dtype=int), [len(starts) for starts in self.starts])
        first = np.stack([starts[i] for starts, i in zip(self.starts, along, strict=True)], axis=-1)
        return {"first": first, "stop": first + self.window_shape}

    def places(self, ids: Ids) -> list[int]:
        return list(range(len(ids)))

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        masks = super()._render_box(codes, self._around(box), device)
        return 1 - averaged(1 - masks, box, self.smooth, self.spatial_shape) if self.smooth else masks

    def hidden_sum(self, ids: Ids, weights: Tensor) -> Tensor | None:
        """Windows lie on a grid, so that a sum over them is a product along each axis: not one step a window, which
        took longer on a GPU than a small network's forwards.
        """
        if self.smooth:
            return None
        sums = self.zero_sums(weights).new_zeros(weights.shape[1], len(self))
        sums[:, torch.as_tensor(ids, device=self.device)] = weights.T.to(sums)
        sums = sums.view(-1, *map(len, self.starts))
        with exact_arithmetic(self.device):
            for starts, window, size in zip(self.starts, self.window_shape, self.spatial_shape, strict=True):
                offset = np.arange(size) - starts[:, None]
                inside = to_device((offset >= 0) & (offset < window), self.device, sums.dtype)
                sums = torch.tensordot(sums, inside, dims=([1], [0]))  # the first axis becomes the last
        return sums[:, None]


class MultiScaleWindowMasks(SlidingWindowMasks):
    """Windows of several sizes that slide over the image, in 2D and 3D, all hidden in turn.

    Level l has the windows of ``SlidingWindowMasks`` of edge ``window_size / 2^l`` and stride
    ``stride / 2^l``; the largest windows come first. Each level hides a voxel about as often, so that levels weigh
    alike in :class:`~monai_saliency.estimators.OcclusionScoring`.

    Args:
        window_size: edge of a window of the first level in ``unit``, one number or one per axis; by default a quarter
            of each axis of the image, in whole voxels, rounded up.
        levels: how many sizes, at least 1, each half as long as the one before, rounded down, at least one voxel. A
            level with the same windows as the level before is left out.
        stride: of the first level in ``unit``; by default half of each level's window.
        unit: as for :class:`~monai_saliency.masks.SlidingWindowMasks`.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for ``SlidingWindowMasks``.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import MultiScaleWindowMasks
        >>> bound = MultiScaleWindowMasks(window_size=(1, 4), levels=2, stride=(1, 4)).bind(torch.zeros(1, 1, 8))
        >>> len(bound), bound.window_shapes  # two windows of 4 voxels, then four of 2
        (6, [(1, 4), (1, 2)])
        >>> bound.render([1, 2])[:, 0, 0].tolist()
        [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        window_size: float | Sequence[float] | None = None,
        levels: int = 3,
        stride: float | Sequence[float] | None = None,
        unit: str = "voxel",
    ) -> None:
        super().__init__(window_size, stride, unit)
        self.levels = whole_number("levels", levels, 1)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        window = [-(-n // 4) for n in image.shape[1:]] if self.window_size is None else self.window_size
        levels: list[BoundSlidingWindowMasks] = []
        for number in range(self.levels):
            stride = None if self.stride is None else self._divided(self.stride, 2**number)
            masks = SlidingWindowMasks(self._divided(window, 2**number), stride, self.unit)
            level = BoundSlidingWindowMasks(masks, image, spacing)
            if not levels or level.key != levels[-1].key:
                levels.append(level)
        return _BoundMultiScaleWindowMasks(levels, image)

    def _divided(self, size: float | Sequence[float], by: int) -> list[float]:
        sizes = np.atleast_1d(np.asarray(size))
        return (sizes / by if self.unit == "mm" else np.maximum(1, sizes // by)).tolist()


class _BoundMultiScaleWindowMasks(BoundBoxMasks):
    """The windows of one image."""

    def __init__(self, levels: list[BoundSlidingWindowMasks], image: Tensor) -> None:
        super().__init__(image)
        self.window_shapes = [level.window_shape for level in levels]
        self.key = ("MultiScaleWindowMasks", *(level.key for level in levels))
        each = [level.codes(range(len(level))) for level in levels]
        self._codes = {name: np.concatenate([codes[name] for codes in each]) for name in ("first", "stop")}

    def __len__(self) -> int:
        return len(self._codes["first"])

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        return {name: code[np.asarray(ids, dtype=int)] for name, code in self._codes.items()}


class PatchWindowMasks(Masks):
    """Windows side by side on the grid of an inferer's patches, so that each window touches as few patches as possible.

    A window's edge is the step between two patches, or a part of it, and the first window starts at the first patch's
    corner.

    Args:
        inferer: the sliding-window inferer. Its ``roi_size`` and ``overlap`` place the windows.
        divide: number of windows per step along each axis, at least 1. By default as many as cost at most 50
            predictions of the image; where even one window per step costs more, a window is several steps long.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when the inferer does not fit the image.

    Example::

        >>> import torch
        >>> from monai.inferers import SlidingWindowInferer
        >>> masks = PatchWindowMasks(SlidingWindowInferer(roi_size=(4, 4), overlap=0.5), divide=1)
        >>> len(masks.bind(torch.zeros(1, 8, 8)))  # windows of 2 x 2 voxels
        16
    """

    def __init__(self, inferer: SlidingWindowInferer, divide: int | None = None) -> None:
        self.divide = None if divide is None else whole_number("divide", divide, 1)
        words = "a SlidingWindowInferer, whose patches make the grid"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundSlidingWindowMasks:
        grid = PatchGrid(self.inferer, image.shape[1:])
        window = affordable(grid, _AFFORDABLE) if self.divide is None else grid.window(self.divide)
        bound = BoundSlidingWindowMasks(SlidingWindowMasks(window, window), image, spacing)
        bound.starts = [np.arange(0, n, w) for n, w in zip(bound.spatial_shape, bound.window_shape, strict=True)]
        bound.key = ("PatchWindowMasks", bound.window_shape, bound.spatial_shape)
        return bound


def affordable(grid: PatchGrid, most: int, finer: bool = True) -> list[int]:
    """The edges of windows side by side that cost at most ``most`` predictions of the image: a step from patch to
    patch, longer if it must be; with ``finer``, the smallest windows.
    """
    divide, times = 1, 1
    while grid.predictions(grid.window(1, times)) > most:
        times += 1
    while finer and divide < max(grid.step) and grid.predictions(grid.window(divide + 1)) <= most:
        divide += 1
    return grid.window(divide, times)
