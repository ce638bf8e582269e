"""Windows that are refined where hiding them lets the score fall most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.base import Id, Masks
from monai_saliency.masks.box import BoundBoxMasks
from monai_saliency.masks.smooth import check_smooth, widths_of
from monai_saliency.utils.arguments import (
    check_option,
    instance,
    number,
    per_axis,
    positive_numbers,
    voxels_of_mm,
    whole_number,
    whole_numbers,
)
from monai_saliency.utils.patch_grid import PatchGrid

__all__ = ["BoundHierarchicalMasks", "HierarchicalMasks", "worth_refining"]

# Windows of the first level, about, where nobody says how large they are.
_FIRST_LEVEL = 64
# On a patch grid, predictions of the image that all levels cost at the most then, and those of the first one. What is
# left of four levels are 24: a window of each, in 8 parts that touch all patches.
_AFFORDABLE, _AFFORDABLE_FIRST = 40, 16


class HierarchicalMasks(Masks):
    """Windows side by side, halved in rounds where they matter (HiPe, Cooper et al., arXiv 2103.05108), in 2D and 3D.

    The first round hides every window of the first level. Each further round halves along every axis those windows of
    the round before that let the score fall most, and hides each part: 4 in 2D, 8 in 3D. HiPe refines all above the
    middle of a level's range; here it is a share of the windows, so that the number of forwards is known before. A
    window is not refined if hiding it does not let the score fall.

    Args:
        window_size: edge of a window of the first level in ``unit``, one number or one per axis. By default about an
            eighth of each axis in 2D and a quarter in 3D. With an ``inferer`` about the step from patch to patch, such
            that up to four levels cost at most 40 predictions of the image for each explained score.
        levels: how many sizes, at least 1, each half as long as the one before. Fewer once windows are one voxel.
        keep: share of a level's windows that is refined, in (0, 1], at least one window for each explained score.
        unit: unit of ``window_size``, ``"voxel"`` or ``"mm"``, rounded to whole voxels, at least one.
        inferer: a sliding-window inferer, on whose patch grid the windows lie: they touch as few patches as possible.
        smooth: width in voxels over which the edge of a window rises, as for
            :class:`~monai_saliency.SlidingWindowMasks`; the same at all levels.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when one window covers the whole image, when there is
            not one size per axis, or when sizes are in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> bound = HierarchicalMasks(window_size=4, levels=3).bind(torch.zeros(1, 8, 8))
        >>> bound.first_round()
        [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    """

    shorter = "a larger window_size, fewer levels or a smaller keep, for a coarser map"

    def __init__(
        self,
        window_size: float | Sequence[float] | None = None,
        levels: int = 4,
        keep: float = 0.08,
        unit: str = "voxel",
        inferer: SlidingWindowInferer | None = None,
        smooth: float | Sequence[float] = 0,
    ) -> None:
        self.unit = check_option("unit", unit, ("voxel", "mm"))
        if self.unit == "mm" and window_size is None:
            raise ValueError("`unit` 'mm' needs a `window_size`: the default is in voxels")
        if window_size is not None and self.unit == "mm":
            positive_numbers("window_size", window_size)
        elif window_size is not None:
            whole_numbers("window_size", window_size, 1)
        self.window_size = window_size
        self.levels = whole_number("levels", levels, 1)
        self.keep = number("keep", keep)
        if not 0 < self.keep <= 1:
            raise ValueError(f"`keep` must be in (0, 1], a share of the windows, got {keep}")
        words = "a SlidingWindowInferer, on whose patch grid windows lie"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words, none=True)
        self.smooth = check_smooth(smooth)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundHierarchicalMasks:
        return BoundHierarchicalMasks(self, image, spacing)

    def edges(self, spatial_shape: Sequence[int]) -> Any:
        """The window of the first level for an image of a shape, in the unit: one number or one per axis."""
        if self.window_size is not None:
            return self.window_size
        if self.inferer is not None:
            return _affordable(PatchGrid(self.inferer, spatial_shape))
        parts = round(_FIRST_LEVEL ** (1 / len(spatial_shape)))
        halves = 2 ** (self.levels - 1)
        return [round(n / parts / halves) * halves or -(-n // parts) for n in spatial_shape]


class BoundHierarchicalMasks(BoundBoxMasks):
    """The windows of one image. The id of a window is its level, from 0, and its place on the grid of that level."""

    def __init__(self, masks: HierarchicalMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(image)
        window = per_axis("window_size", masks.edges(self.spatial_shape), self.spatial_shape)
        window = voxels_of_mm(window, spacing) if masks.unit == "mm" else window
        window = tuple(min(w, n) for w, n in zip(window, self.spatial_shape, strict=True))
        if all(w == n for w, n in zip(window, self.spatial_shape, strict=True)):
            raise ValueError(
                f"one window of {window} voxels covers the whole image, whose spatial shape is "
                f"{self.spatial_shape}: it cannot show where the evidence lies; use a smaller `window_size`"
            )
        self.keep = masks.keep
        self.bounds = [[np.append(np.arange(0, n, w), n) for n, w in zip(self.spatial_shape, window, strict=True)]]
        while len(self.bounds) < masks.levels and any(edge > 1 for edge in window):
            window = tuple(-(-edge // 2) for edge in window)
            self.bounds.append([_halved(axis, edge) for axis, edge in zip(self.bounds[-1], window, strict=True)])
        self.num_levels = len(self.bounds)
        #: how many windows each level has along each axis
        self.grids = [[len(axis) - 1 for axis in level] for level in self.bounds]
        self._most = [math.prod(grid) for grid in self.grids]
        if masks.inferer is not None and masks.window_size is None:
            self._most = self._affordable(PatchGrid(masks.inferer, self.spatial_shape))
        edges = tuple(tuple(int(axis[1]) for axis in level) for level in self.bounds)
        self.key = ("HierarchicalMasks", edges, self.keep, tuple(self._most), self.spatial_shape)
        self.smooth = widths_of(masks.smooth, self.spatial_shape)
        if self.smooth:
            self.key = (*self.key, "smooth", self.smooth)

    @property
    def at_most(self) -> int:
        """The largest number of windows that are scored for one explained score."""
        found = last = math.prod(self.grids[0])
        for level, most in enumerate(self._most[:-1]):
            refined = min(max(1, round(self.keep * last)), most)
            last = min(refined * self._num_parts(level), math.prod(self.grids[level + 1]))
            found += last
        return found

    def _num_parts(self, level: int) -> int:
        """Into how many parts a window of a level is cut."""
        return math.prod(1 if a == b else 2 for a, b in zip(*self.grids[level : level + 2], strict=True))

    def _affordable(self, grid: PatchGrid) -> list[int]:
        """How many windows of each level are refined at the most, for all scores; the levels share what is left of the
        affordable predictions.
        """
        first = grid.predictions([int(axis[1]) for axis in self.bounds[0]])
        each = (_AFFORDABLE - first) / max(1, self.num_levels - 1)
        costs = [self._num_parts(at) * grid.share_touched(finer) for at, finer in enumerate(self.bounds[1:])]
        return [*(max(1, int(each / cost)) for cost in costs), 0]

    def first_round(self) -> Sequence[Id]:
        return [(0, *place) for place in np.ndindex(*self.grids[0])]

    def next_round(
        self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[Id] | None:
        level = ids[-1][0]
        if level + 1 == self.num_levels:
            return None
        rows = [row for row, each in enumerate(ids) if each[0] == level]
        drops = reference_scores.double() - scores[rows].double()
        chosen = worth_refining([ids[row] for row in rows], drops, self.keep)[: self._most[level]]
        return sorted(part for window in chosen for part in self._parts(window)) or None

    def stopped(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        level = ids[-1][0] + 1
        if level == self.num_levels:
            return f"level {level} was the last"
        return f"no window of level {level} was worth halving"

    def _parts(self, window: Id) -> list[Id]:
        """The windows of the next level that a window is halved into; none if it is one voxel."""
        level, *place = window
        sides = []
        for axis, finer, at in zip(self.bounds[level], self.bounds[level + 1], place, strict=True):
            sides.append(range(*np.searchsorted(finer, axis[[at, at + 1]])))
        parts = [(level + 1, *part) for part in itertools.product(*sides)]
        return parts if len(parts) > 1 else []

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        found = np.empty((2, len(ids), len(self.spatial_shape)), dtype=int)
        levels, *places = np.asarray(ids, dtype=int).reshape(len(ids), -1).T
        for level, bounds in enumerate(self.bounds):
            here = levels == level
            for axis, (ends, at) in enumerate(zip(bounds, places, strict=True)):
                found[0, here, axis], found[1, here, axis] = ends[at[here]], ends[at[here] + 1]
        return {"first": found[0], "stop": found[1]}


def worth_refining(ids: Sequence[Id], drops: torch.Tensor, keep: float) -> list[Id]:
    """The masks of a round that are worth refining: those that let a score fall most, for each score its own."""
    count = max(1, round(keep * len(ids)))
    best = [
        [ids[row] for row in each.argsort(descending=True, stable=True)[:count].tolist() if each[row] > 0]
        for each in drops.T
    ]
    turns = (each for turn in itertools.zip_longest(*best) for each in turn if each is not None)
    return list(dict.fromkeys(turns))


def _halved(ends: np.ndarray, edge: int) -> np.ndarray:
    """Where windows begin that are cut after ``edge`` voxels, and the axis' end."""
    middles = ends[:-1] + edge
    return np.union1d(ends, middles[middles < ends[1:]])


def _affordable(grid: PatchGrid) -> list[int]:
    """The edges of windows of the first level: a step from patch to patch, longer or shorter where it takes that."""
    divide, times = 1, 1
    while grid.predictions(grid.window(1, times)) > _AFFORDABLE_FIRST:
        times += 1
    while len(grid.boxes) == 1 and divide < max(grid.step):  # which a window of one step would cover
        if grid.predictions(grid.window(divide + 1)) > _AFFORDABLE_FIRST:
            break
        divide += 1
    return grid.window(divide, times)
