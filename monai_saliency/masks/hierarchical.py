"""Windows, or regions, that are refined where hiding them lets the score fall most."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from torch import Tensor

from monai_saliency.masks.base import Id, Ids, MakesRegions, Masks, Observed, Regions, Search, Spacing
from monai_saliency.masks.region import check_regions, find_regions
from monai_saliency.masks.sizes import check_sizes, check_unit, in_voxels, overlap
from monai_saliency.masks.sliding_window import BoundBoxMasks, affordable
from monai_saliency.utils.arguments import fraction, whole_number
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import Box, tight, to_device, within

# Windows of the first level, about, if no window size is given.
_FIRST_LEVEL = 64
# On a patch grid: at most this many predictions of the image for all levels, and for the first level.
_AFFORDABLE, _AFFORDABLE_FIRST = 40, 16


class HierarchicalMasks(Masks):
    """Windows side by side, halved in rounds where they matter (HiPe, Cooper et al., arXiv 2103.05108), in 2D and 3D.

    The first round hides every window of the first level. Each further round halves along every axis those windows of
    the round before that let the score fall most, and hides each part. HiPe refines all above the middle of a level's
    range; here it is a share of the windows. A window is not refined if hiding it does not let the score fall.

    Args:
        window_size: edge of a window of the first level in ``unit``, one number or one per axis. By default about an
            eighth of each axis in 2D and a quarter in 3D. With an ``inferer`` about the step from patch to patch, such
            that up to four levels cost at most 40 predictions of the image for each explained score.
        levels: how many sizes, at least 1, each half as long as the one before. Fewer once windows are one voxel.
        keep: share of a level's windows that is refined, in (0, 1], at least one window for each explained score.
        unit: unit of ``window_size``, ``"voxel"`` or ``"mm"``, rounded to whole voxels, at least one.
        inferer: a sliding-window inferer, on whose patch grid the windows lie: they touch as few patches as possible.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when one window covers the whole image, or when sizes
            are in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> bound = HierarchicalMasks(window_size=4, levels=3).bind(torch.zeros(1, 8, 8))
        >>> bound.first_round()
        [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    """

    def __init__(
        self,
        window_size: float | Sequence[float] | None = None,
        levels: int = 4,
        keep: float = 0.08,
        unit: str = "voxel",
        inferer: SlidingWindowInferer | None = None,
    ) -> None:
        self.unit = check_unit(unit, "window_size", window_size)
        check_sizes(unit, window_size=window_size)
        self.window_size = window_size
        self.levels = whole_number("levels", levels, 1)
        self.keep = fraction("keep", keep)
        self.inferer = inferer

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundHierarchicalMasks:
        return BoundHierarchicalMasks(self, image, spacing)

    def edges(self, spatial_shape: Sequence[int]) -> Any:
        """The window of the first level for an image of a shape, in the unit: one number or one per axis."""
        if self.window_size is not None:
            return self.window_size
        if self.inferer is not None:
            grid = PatchGrid(self.inferer, spatial_shape)
            # A window of one step would cover a single patch.
            return affordable(grid, _AFFORDABLE_FIRST, finer=len(grid.boxes) == 1)
        parts = round(_FIRST_LEVEL ** (1 / len(spatial_shape)))
        halves = 2 ** (self.levels - 1)
        return [round(n / parts / halves) * halves or -(-n // parts) for n in spatial_shape]


class BoundHierarchicalMasks(BoundBoxMasks):
    """The windows of one image. The id of a window is its level, from 0, and its place on the grid of that level."""

    def __init__(self, masks: HierarchicalMasks, image: Tensor, spacing: Spacing) -> None:
        super().__init__(image)
        shape = self.spatial_shape
        window = in_voxels("window_size", masks.edges(shape), masks.unit, shape, spacing)
        window = tuple(min(w, n) for w, n in zip(window, shape, strict=True))
        if window == shape:
            raise ValueError(
                f"one window of {window} voxels covers the whole image, whose spatial shape is {shape}: it cannot show "
                "where the evidence lies; use a smaller `window_size`"
            )
        self.keep = masks.keep
        #: for each level and axis, where windows begin, and the axis' end
        self.bounds = [[np.append(np.arange(0, n, w), n) for n, w in zip(shape, window, strict=True)]]
        while len(self.bounds) < masks.levels and any(edge > 1 for edge in window):
            window = tuple(-(-edge // 2) for edge in window)
            self.bounds.append([_halved(axis, edge) for axis, edge in zip(self.bounds[-1], window, strict=True)])
        #: how many windows of each level are refined at the most
        self._most = [math.prod(grid) for grid in self.grids]
        if masks.inferer is not None and masks.window_size is None:
            self._most = self._affordable(PatchGrid(masks.inferer, shape))
        edges = tuple(tuple(int(axis[1]) for axis in level) for level in self.bounds)
        self.key = ("HierarchicalMasks", edges, self.keep, tuple(self._most), shape)

    @property
    def num_levels(self) -> int:
        return len(self.bounds)

    @property
    def grids(self) -> list[list[int]]:
        """How many windows each level has along each axis."""
        return [[len(axis) - 1 for axis in level] for level in self.bounds]

    @property
    def at_most(self) -> int:
        """The largest number of masks that are scored for one explained score."""
        found = last = len(self.first_round())
        for level, most in enumerate(self._most[:-1]):
            last = min(max(1, round(self.keep * last)), most) * self._num_parts(level)
            found += last
        return found

    def _num_parts(self, level: int) -> int:
        """Into how many parts a window of a level is cut, at most."""
        return math.prod(-(-finer // own) for own, finer in zip(*self.grids[level : level + 2], strict=True))

    def _affordable(self, grid: PatchGrid) -> list[int]:
        """How many windows of each level are refined at the most for each score; the levels share what is left of the
        affordable predictions.
        """
        first = grid.predictions([int(axis[1]) for axis in self.bounds[0]])
        each = (_AFFORDABLE - first) / max(1, self.num_levels - 1)
        costs = [self._num_parts(at) * grid.share_touched(finer) for at, finer in enumerate(self.bounds[1:])]
        return [*(max(1, int(each / cost)) for cost in costs), 0]

    def first_round(self) -> Ids:
        return [(0, *place) for place in np.ndindex(*self.grids[0])]

    def search(self, reference_scores: Tensor) -> Search:
        observed = Observed(self, reference_scores)
        yield from self.refine(observed)
        level = observed.ids[-1][0] + 1
        if level == self.num_levels:
            return observed.ended(f"level {level} was the last")
        return observed.ended(f"no part of level {level} was worth splitting")

    def refine(self, observed: Observed) -> Generator[Ids, Tensor, None]:
        """Hide the parts of the first level, then the pieces of those that let the score fall most, level by level."""
        parts = self.first_round()
        for most in self._most:
            yield from observed.ask(parts)
            drops = (observed.reference_scores.double() - observed.scores[-len(parts) :].double())[:, 0].cpu()
            kept = max(1, round(self.keep * len(parts)))
            order = drops.argsort(descending=True, stable=True)[:kept].tolist()
            split = [parts[row] for row in order if drops[row] > 0][:most]
            parts = sorted(piece for part in split for piece in self._pieces(part))
            if not parts:
                return

    def _pieces(self, part: Id) -> list[Id]:
        """The windows of the next level that a window is halved into; none if it is one voxel."""
        level, *place = part
        if level + 1 == self.num_levels:
            return []
        sides = []
        for axis, finer, at in zip(self.bounds[level], self.bounds[level + 1], place, strict=True):
            sides.append(range(*np.searchsorted(finer, axis[[at, at + 1]])))
        pieces = [(level + 1, *piece) for piece in itertools.product(*sides)]
        return pieces if len(pieces) > 1 else []

    def _box(self, part: Id) -> Box:
        """The window of a part."""
        axes = zip(self.bounds[part[0]], part[1 : 1 + len(self.spatial_shape)], strict=True)
        return tuple(slice(int(ends[at]), int(ends[at + 1])) for ends, at in axes)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        boxes = [[(side.start, side.stop) for side in self._box(part)] for part in ids]
        ends = np.array(boxes, dtype=int).reshape(len(ids), len(self.spatial_shape), 2)
        return {"first": ends[:, :, 0], "stop": ends[:, :, 1]}


def _halved(ends: np.ndarray, edge: int) -> np.ndarray:
    """Where windows begin that are cut after ``edge`` voxels, and the axis' end."""
    middles = ends[:-1] + edge
    return np.union1d(ends, middles[middles < ends[1:]])


class RegionHierarchyMasks(Masks):
    """Regions, split in rounds where they matter, in 2D and 3D: which organ, and where in it?

    The first round hides each region: all voxels of one label of the case's label map, or a supervoxel. Voxels of label
    0 are in no region and are always kept. Each further round splits those parts of the round before that let the score
    fall most, and hides each piece. A piece of a region is what lies in one of the windows of
    ``HierarchicalMasks``, and a piece of that what lies in a window half as long. Windows that do
    not split a part are passed over. A part is not split if hiding it does not let the score fall.

    Args:
        regions: makes the regions, as for :class:`~monai_saliency.masks.RegionMasks`; by default the case's label map.
        window_size: edge of the first windows, as for :class:`~monai_saliency.masks.HierarchicalMasks`.
        levels: how many sizes, at least 1: the regions, and the windows.
        keep: share of a round's parts that is split, in (0, 1], at least one part for each explained score.
        unit: as for :class:`~monai_saliency.masks.HierarchicalMasks`.
        inferer: as for :class:`~monai_saliency.masks.HierarchicalMasks`.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for ``RegionMasks``, and for
            the windows as for :class:`~monai_saliency.masks.HierarchicalMasks`.

    Example::

        >>> import torch
        >>> labels = torch.tensor([[[0, 0, 3, 3], [7, 7, 7, 3], [7, 7, 7, 7], [7, 7, 7, 7]]])
        >>> bound = RegionHierarchyMasks(window_size=2, levels=2).bind(torch.zeros(1, 4, 4), labels)
        >>> search = bound.search(torch.tensor([5.0]))
        >>> first = next(search)  # regions 3 and 7
        >>> pieces = search.send(torch.tensor([[5.0], [1.0]]))
        >>> [int((mask == 0).sum()) for mask in bound.render(pieces)]  # the voxels of region 7 in four windows
        [2, 1, 4, 4]
    """

    def __init__(
        self,
        regions: MakesRegions | None = None,
        window_size: float | Sequence[float] | None = None,
        levels: int = 4,
        keep: float = 0.08,
        unit: str = "voxel",
        inferer: SlidingWindowInferer | None = None,
    ) -> None:
        self.regions, self.needs_labels = check_regions(regions)
        self.levels = whole_number("levels", levels, 1)
        self.windows = HierarchicalMasks(window_size, max(1, self.levels - 1), keep, unit, inferer)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundRegionHierarchyMasks:
        return BoundRegionHierarchyMasks(self, image, find_regions(self.regions, image, labels, spacing), spacing)


class BoundRegionHierarchyMasks(BoundHierarchicalMasks):
    """The regions of one image, and their pieces. The id of a part is its level, the place of its window on the grid of
    that level, and its region, counted from 1. The window of level 0 is the whole image.
    """

    def __init__(self, masks: RegionHierarchyMasks, image: Tensor, regions: Regions, spacing: Spacing) -> None:
        super().__init__(masks.windows, image, spacing)
        self.values, self.index = regions.values, regions.index.cpu().numpy()
        whole = [np.array([0, size]) for size in self.spatial_shape]
        self.bounds = [whole, *self.bounds[: masks.levels - 1]]
        self._most = [self.index.size] * self.num_levels
        digest = hashlib.sha256(self.index.tobytes()).hexdigest()
        self.key = ("RegionHierarchyMasks", self.key, self.num_levels, tuple(self.values), digest)

    def first_round(self) -> Ids:
        nowhere = (0,) * len(self.spatial_shape)
        return [(0, *nowhere, region + 1) for region in range(len(self.values))]

    def _pieces(self, part: Id) -> list[Id]:
        """The pieces of a part in the longest windows that split it; none if no window does."""
        level, region, box = part[0], part[-1], self._box(part)
        places = [at + side.start for at, side in zip((self.index[box] == region).nonzero(), box, strict=True)]
        for finer in range(level + 1, self.num_levels):
            sides = zip(self.bounds[finer], places, strict=True)
            along = [np.searchsorted(ends, at, side="right") - 1 for ends, at in sides]
            windows = np.unique(np.stack(along, axis=1), axis=0)
            if len(windows) > 1:
                return [(finer, *window, region) for window in windows.tolist()]
        return []

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """As for windows, and ``region`` int ``(n,)``, counted from 1."""
        return super().codes(ids) | {"region": np.array([part[-1] for part in ids], dtype=int)}

    def _tight(self, part: Id, box: Box) -> Box | None:
        """The smallest box around the voxels of a part inside a box; None if there are none."""
        common = overlap(self._box(part), box)
        return tight(self.index[common] == part[-1], common)

    def changed_boxes(self, ids: Ids) -> list[Box] | None:
        return [self._tight(part, self._whole) or self._whole for part in ids]

    @property
    def hides_boxes(self) -> bool:
        return False  # a region need not fill its box

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        rows = np.zeros((len(ids), 1 + 2 * len(box)), dtype=int)
        for row, part in zip(rows, ids, strict=True):
            # The region and the smallest box around its hidden voxels here decide which voxels these are.
            if around := self._tight(part, box):
                row[:] = [part[-1], *(end for side in around for end in (side.start, side.stop))]
        return rows[:, 0] > 0, rows

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        shape = [side.stop - side.start for side in box]
        masks = torch.ones(len(codes["region"]), 1, *shape, dtype=self.dtype, device=device)
        for mask, region, first, stop in zip(masks, codes["region"], codes["first"], codes["stop"], strict=True):
            common = overlap(tuple(map(slice, first.tolist(), stop.tolist())), box)
            inside: Any = (0, *within(common, box))
            mask[inside] = to_device(self.index[common] != region, device, self.dtype)
        return masks
