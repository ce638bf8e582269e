"""Windows that are refined where hiding them lets the score fall most."""

from __future__ import annotations

import itertools
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
    the round before that let the score fall most, and hides each part: 4 in 2D, 8 in 3D. HiPe refines what lies above
    the middle of a level's range; here it is a share of the windows, so that the number of forwards is known before.
    A window whose hiding does not let the score fall is not refined.

    Along an axis where a window is one voxel long it stays. The windows at the end of an axis may be shorter.

    Args:
        window_size: edge of a window of the first level in ``unit``, one number or one per axis. By default about an
            eighth of each axis in 2D and a quarter in 3D, so that there are about 64, and such that it can be halved
            to the last level without a rest. With an ``inferer`` it is the step from patch to patch, but longer or
            shorter where it takes that, and up to four levels cost at most 40 predictions of the image: what several
            explained scores want to refine beyond that is left out.
        levels: how many sizes, at least 1, each half as long as the one before. Fewer where windows are one voxel.
        keep: share of a level's windows that is refined, in (0, 1], rounded to whole windows and at least one; for each
            explained score its own.
        unit: unit of ``window_size``, ``"voxel"`` or ``"mm"``, rounded to whole voxels, at least one.
        inferer: a sliding-window inferer, on whose patch grid the windows lie: they touch as few patches as possible.
        smooth: width in voxels over which the edge of a window rises in a straight line, half of it on either side, one
            number or one per axis; crisp by default (:mod:`monai_saliency.masks.smooth`). It is the same at all levels:
            a window shorter than the width is hidden in part only. With an ``inferer``, edges reach into further
            patches, so that levels cost more than the predictions above.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when one window covers the whole image, when there is
            not one size per axis, or when sizes are in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> bound = HierarchicalMasks(window_size=4, levels=3).bind(torch.zeros(1, 8, 8))
        >>> [len(list(level)) for level in bound.levels]  # windows of 4, 2 and 1 voxels
        [4, 16, 64]
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
    """The windows of one image: those of the first level, then those of the second, and so on.

    Attributes:
        bounds: for each level and axis, where windows begin, and the axis' end.
        levels: the masks of each level.
        num_levels: how many levels there are.
    """

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
        grid = PatchGrid(masks.inferer, self.spatial_shape) if masks.inferer and masks.window_size is None else None
        self.bounds = [[np.append(np.arange(0, n, w), n) for n, w in zip(self.spatial_shape, window, strict=True)]]
        while len(self.bounds) < masks.levels and any(edge > 1 for edge in window):
            window = tuple(-(-edge // 2) for edge in window)
            self.bounds.append([_halved(axis, edge) for axis, edge in zip(self.bounds[-1], window, strict=True)])
        ends = list(itertools.accumulate((int(np.prod(shape)) for shape in self._grids), initial=0))
        self.levels = [range(start, stop) for start, stop in itertools.pairwise(ends)]
        self.num_levels = len(self.levels)
        self._most = [len(level) for level in self.levels] if grid is None else self._affordable(grid)
        edges = tuple(tuple(int(axis[1]) for axis in level) for level in self.bounds)
        self.key = ("HierarchicalMasks", edges, self.keep, tuple(self._most), self.spatial_shape)
        self.smooth = widths_of(masks.smooth, self.spatial_shape)
        if self.smooth:
            self.key = (*self.key, "smooth", self.smooth)

    @property
    def _grids(self) -> list[list[int]]:
        """How many windows each level has along each axis."""
        return [[len(axis) - 1 for axis in level] for level in self.bounds]

    def __len__(self) -> int:
        return self.levels[-1].stop

    @property
    def at_most(self) -> int:
        """How many windows are scored at the most, for one explained score."""
        finer = zip(self.refined_at_most, itertools.count(), self.levels[1:], strict=False)
        return len(self.levels[0]) + sum(min(most * self._halves(at), len(level)) for most, at, level in finer)

    @property
    def refined_at_most(self) -> list[int]:
        """How many windows of each level but the last are refined at the most, for one explained score."""
        found, last = [], len(self.levels[0])
        for level, most in enumerate(self._most[:-1]):
            found.append(min(max(1, round(self.keep * last)), most))
            last = min(found[-1] * self._halves(level), len(self.levels[level + 1]))
        return found

    def _halves(self, level: int) -> int:
        """Into how many parts a window of a level is cut."""
        return int(np.prod([1 if a == b else 2 for a, b in zip(*self._grids[level : level + 2], strict=True)]))

    def _affordable(self, grid: PatchGrid) -> list[int]:
        """How many windows of each level are refined at the most, for all scores; the levels share what is left of the
        affordable predictions.
        """
        first = grid.predictions([int(axis[1]) for axis in self.bounds[0]])
        each = (_AFFORDABLE - first) / max(1, self.num_levels - 1)
        costs = [self._halves(at) * grid.share_touched(finer) for at, finer in enumerate(self.bounds[1:])]
        return [*(max(1, int(each / cost)) for cost in costs), 0]

    def first_round(self) -> Sequence[Id]:
        return self.levels[0]

    def next_round(
        self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[Id] | None:
        level = self._level(ids[-1])
        rows = [row for row, index in enumerate(ids) if index in self.levels[level]]
        if level + 1 == self.num_levels:
            return None
        drops = reference_scores.double() - scores[rows].double()
        chosen = worth_refining([ids[row] for row in rows], drops, self.keep)[: self._most[level]]
        return self.parts_of(chosen) or None

    def parts_of(self, ids: Sequence[Id]) -> list[int]:
        """The windows of the next level that windows of one level are halved into; none where they are one voxel."""
        return sorted(part for index in ids for part in self._parts(self._level(index), index))

    def stopped(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        level = self._level(ids[-1]) + 1
        if level == self.num_levels:
            return f"level {level} was the last"
        return f"no window of level {level} was worth halving"

    def _level(self, index: int) -> int:
        return next(number for number, level in enumerate(self.levels) if index in level)

    def _parts(self, level: int, index: int) -> list[int]:
        """The windows of the next level that a window is halved into; none where it is one voxel."""
        place = np.unravel_index(index - self.levels[level].start, self._grids[level])
        sides = []
        for axis, finer, at in zip(self.bounds[level], self.bounds[level + 1], place, strict=True):
            first, stop = np.searchsorted(finer, axis[[at, at + 1]])
            sides.append(range(first, stop))
        if all(len(side) == 1 for side in sides):
            return []
        found = np.ravel_multi_index(np.array(list(itertools.product(*sides))).T, self._grids[level + 1])
        return (found + self.levels[level + 1].start).tolist()

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        found = np.empty((2, len(ids), len(self.spatial_shape)), dtype=int)
        wanted = np.asarray(ids, dtype=int)
        for level, grid, bounds in zip(self.levels, self._grids, self.bounds, strict=True):
            here = (wanted >= level.start) & (wanted < level.stop)
            along = np.unravel_index(wanted[here] - level.start, grid)
            for axis, (ends, at) in enumerate(zip(bounds, along, strict=True)):
                found[0, here, axis], found[1, here, axis] = ends[at], ends[at + 1]
        return {"first": found[0], "stop": found[1]}

    def spread(self, ids: Sequence[Id], drops: torch.Tensor) -> np.ndarray:
        """Spread what each window of the first level took from a score over the windows of the last level inside it.

        A window that was refined divides what it has among its parts by what each took alone; parts that took nothing
        get nothing. It is spread evenly where no part took anything, and in windows that were not refined. So the sum
        over all windows is that of the first level.

        Args:
            ids: n windows, those of a level behind those of the level before.
            drops: ``(n,)``, what each took from the score.

        Returns:
            a value for each window of the last level, one axis for each axis of the image.
        """
        found = np.zeros(self._grids[-1])
        inside = self._inside_windows(ids)
        parts: dict[int, list[int]] = {}
        for row, (index, cells) in enumerate(zip(ids, inside, strict=True)):
            if index in self.levels[0]:
                found[cells] = float(drops[row]) / found[cells].size
            else:
                parts.setdefault(self._parent(int(index)), []).append(row)
        for rows in parts.values():  # a level behind the one before, since the windows are
            taken = drops[rows].clamp(min=0).double().numpy()
            if taken.sum() > 0:
                held = sum(found[inside[row]].sum() for row in rows)
                for row, share in zip(rows, taken / taken.sum(), strict=True):
                    found[inside[row]] = held * share / found[inside[row]].size
        return found

    def _inside_windows(self, ids: Sequence[Id]) -> list[tuple[slice, ...]]:
        """The windows of the last level inside each window."""
        codes = self.codes(ids)
        ends = np.stack([codes["first"], codes["stop"]], axis=1)
        for axis, bounds in enumerate(self.bounds[-1]):
            ends[:, :, axis] = np.searchsorted(bounds, ends[:, :, axis])
        return [tuple(itertools.starmap(slice, zip(*each, strict=True))) for each in ends.tolist()]

    def _parent(self, index: int) -> int:
        """The window of the level before that a window is a part of."""
        level, (first,) = self._level(index), self.codes([index])["first"]
        place = [np.searchsorted(b, at, side="right") - 1 for b, at in zip(self.bounds[level - 1], first, strict=True)]
        return int(np.ravel_multi_index(place, self._grids[level - 1])) + self.levels[level - 1].start

    def to_voxels(self, values: np.ndarray) -> np.ndarray:
        """Values ``(K, ...)`` of the windows of the last level, on all voxels: ``(K, *spatial)``."""
        for axis, ends in enumerate(self.bounds[-1]):
            values = np.repeat(values, np.diff(ends), axis=axis + 1)
        return values


def worth_refining(ids: Sequence[Id], drops: torch.Tensor, keep: float) -> list[int]:
    """The masks of a round that are worth refining: those that let a score fall most, for each score its own.

    Args:
        ids: n masks.
        drops: ``(n, K)``, how far each score falls with each.
        keep: the share of masks, at least one for each score.

    Returns:
        masks whose hiding lets a score fall: the first of each score, then the second of each, and so on.
    """
    count = max(1, round(keep * len(ids)))
    best = [
        [ids[row] for row in each.argsort(descending=True, stable=True)[:count].tolist() if each[row] > 0]
        for each in drops.T
    ]
    turns = (index for turn in itertools.zip_longest(*best) for index in turn if index is not None)
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
