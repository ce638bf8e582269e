"""Regions that are split by windows where hiding them lets the score fall most."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.base import BoundMasks, Id, Masks, Regions
from monai_saliency.masks.hierarchical import HierarchicalMasks, worth_refining
from monai_saliency.masks.region import find_regions, reads_labels
from monai_saliency.masks.smooth import averaged, grown
from monai_saliency.utils.arguments import instance, whole_number
from monai_saliency.utils.boxes import Box, within
from monai_saliency.utils.tensors import to_device

__all__ = ["BoundRegionHierarchyMasks", "RegionHierarchyMasks"]


class RegionHierarchyMasks(Masks):
    """Regions, split in rounds where they matter, in 2D and 3D: which organ, and where in it?

    The first round hides each region: all voxels of one label of the case's label map, or a supervoxel. Voxels of label
    0 are in no region and are always kept. Each further round splits those parts of the round before that let the score
    fall most, and hides each piece. A piece of a region is what lies in one of the windows of
    :class:`~monai_saliency.HierarchicalMasks`, and a piece of that what lies in a window half as long. Windows that do
    not split a part are passed over, so that no set of voxels is hidden twice. A part is not split if hiding it does
    not let the score fall.

    Args:
        regions: function that makes the label map ``(1, *spatial)`` from an image ``(C, *spatial)`` and its voxel sizes
            in mm (None if unknown), such as :class:`~monai_saliency.Supervoxels`. By default the case's label map is
            used.
        window_size: edge of the first windows, as for :class:`~monai_saliency.HierarchicalMasks`.
        levels: how many sizes, at least 1: the regions, and the windows.
        keep: share of a round's parts that is split, in (0, 1], at least one part for each explained score.
        unit: unit of ``window_size``, ``"voxel"`` or ``"mm"``.
        inferer: a sliding-window inferer, on whose patch grid the windows lie by default.
        smooth: width in voxels over which the edge of a part rises, one number or one per axis; crisp by default.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for :class:`~monai_saliency.RegionMasks`, and for
            the windows as for :class:`~monai_saliency.HierarchicalMasks`.

    Example::

        >>> import torch
        >>> labels = torch.tensor([[[0, 0, 3, 3], [7, 7, 7, 3], [7, 7, 7, 7], [7, 7, 7, 7]]])
        >>> bound = RegionHierarchyMasks(window_size=2, levels=2).bind(torch.zeros(1, 4, 4), labels)
        >>> first = bound.first_round()  # regions 3 and 7
        >>> pieces = bound.next_round(first, torch.tensor([[5.0], [1.0]]), torch.tensor([5.0]))
        >>> [int((mask == 0).sum()) for mask in bound.render(pieces)]  # the voxels of region 7 in four windows
        [2, 1, 4, 4]
    """

    shorter = "fewer regions, a larger window_size, fewer levels or a smaller keep, for a coarser map"

    def __init__(
        self,
        regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
        window_size: float | Sequence[float] | None = None,
        levels: int = 4,
        keep: float = 0.08,
        unit: str = "voxel",
        inferer: SlidingWindowInferer | None = None,
        smooth: float | Sequence[float] = 0,
    ) -> None:
        words = "a function of an image that makes a label map, such as Supervoxels(200)"
        self.regions = instance("regions", regions, (), words, function=True, none=True)
        self.needs_labels = reads_labels(regions)
        self.levels = whole_number("levels", levels, 1)
        self.windows = HierarchicalMasks(window_size, max(1, self.levels - 1), keep, unit, inferer, smooth)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundRegionHierarchyMasks:
        return BoundRegionHierarchyMasks(self, image, find_regions(self.regions, image, labels, spacing), spacing)


class BoundRegionHierarchyMasks(BoundMasks):
    """The regions of one image, and their pieces. The id of a part is its level, its region, counted from 1, and the
    place of its window on the grid of that level. The window of level 0 is the whole image.
    """

    def __init__(
        self, masks: RegionHierarchyMasks, image: torch.Tensor, regions: Regions, spacing: Sequence[float] | None
    ) -> None:
        super().__init__(image)
        self.values, self.index = regions.values, regions.index.cpu().numpy()
        windows = masks.windows.bind(image, None, spacing)
        whole = [np.array([0, size]) for size in self.spatial_shape]
        #: for each level and axis, where windows begin, and the axis' end
        self.bounds = [whole, *windows.bounds[: masks.levels - 1]]
        self.num_levels, self.keep, self.smooth = len(self.bounds), masks.windows.keep, windows.smooth
        self._known: dict[Id, list[Id]] = {}
        digest = hashlib.sha256(self.index.tobytes()).hexdigest()
        edges = tuple(tuple(int(axis[1]) for axis in level) for level in self.bounds)
        shape = (self.spatial_shape, self.smooth)
        self.key = ("RegionHierarchyMasks", edges, self.keep, tuple(self.values), digest, *shape)

    @property
    def at_most(self) -> int:
        """The largest number of parts that are scored for one explained score."""
        found = last = len(self.values)
        pieces = sorted((len(self._pieces(region)) for region in self.first_round()), reverse=True)
        for level in range(1, self.num_levels):
            count = max(1, round(self.keep * last))
            last = sum(pieces[:count]) if level == 1 else count * 2 ** len(self.spatial_shape)
            found += last
        return found

    def first_round(self) -> Sequence[Id]:
        nowhere = (0,) * len(self.spatial_shape)
        return [(0, region + 1, *nowhere) for region in range(len(self.values))]

    def next_round(
        self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[Id] | None:
        *_, last = self._rounds(ids, scores, reference_scores)
        return self._split(ids, scores, reference_scores, last) or None

    def stopped(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        rounds = list(self._rounds(ids, scores, reference_scores))
        level = max(ids[row][0] for row in rounds[-1]) + 1
        if level == self.num_levels:
            return f"level {level} was the last"
        return f"no part of round {len(rounds)} was worth splitting"

    def _rounds(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> Iterator[list[int]]:
        """The rows of each round, which the rounds before it decide."""
        rows = list(range(len(self.values)))
        while rows:
            yield rows
            stop = rows[-1] + 1
            count = len(self._split(ids, scores, reference_scores, rows)) if stop < len(ids) else 0
            rows = list(range(stop, stop + count))

    def _split(
        self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor, rows: Sequence[int]
    ) -> list[Id]:
        """The pieces of those parts of a round that are worth it, ascending by level and place."""
        drops = reference_scores.double() - scores[rows].double()
        chosen = worth_refining([ids[row] for row in rows], drops, self.keep)
        pieces = (piece for part in chosen for piece in self._pieces(part))
        return sorted(pieces, key=lambda piece: (piece[0], piece[2:], piece[1]))

    def _pieces(self, part: Id) -> list[Id]:
        """The pieces of a part in the longest windows that split it; none if no window does."""
        if part not in self._known:
            level, region, *_ = part
            box = self._box(part)
            places = [at + side.start for at, side in zip((self.index[box] == region).nonzero(), box, strict=True)]
            self._known[part] = []
            for finer in range(level + 1, self.num_levels):
                along = [
                    np.searchsorted(b, at, side="right") - 1 for b, at in zip(self.bounds[finer], places, strict=True)
                ]
                windows = np.unique(np.stack(along, axis=1), axis=0)
                if len(windows) > 1:
                    self._known[part] = [(finer, region, *window) for window in windows.tolist()]
                    break
        return self._known[part]

    def _box(self, part: Id) -> Box:
        """The window of a part."""
        level, _, *place = part
        return tuple(slice(int(b[at]), int(b[at + 1])) for b, at in zip(self.bounds[level], place, strict=True))

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``region`` int ``(n,)``, counted from 1; ``first`` and ``stop``, int ``(n, spatial_dims)``, its window."""
        boxes = [[(side.start, side.stop) for side in self._box(part)] for part in ids]
        ends = np.array(boxes, dtype=int).reshape(len(ids), len(self.spatial_shape), 2)
        regions = np.array([part[1] for part in ids], dtype=int)
        return {"region": regions, "first": ends[:, :, 0], "stop": ends[:, :, 1]}

    def _tight(self, region: int, box: Box) -> Box | None:
        """The smallest box around the voxels of a region inside a box; None if there are none."""
        found = (self.index[box] == region).nonzero()
        if not len(found[0]):
            return None
        sides = zip(found, box, strict=True)
        return tuple(slice(side.start + int(at.min()), side.start + int(at.max()) + 1) for at, side in sides)

    def changed_boxes(self, ids: Sequence[Id]) -> list[Box] | None:
        empty = (slice(0, 0),) * len(self.spatial_shape)
        boxes = [self._tight(part[1], self._box(part)) for part in ids]
        if self.smooth:
            boxes = [box and grown(box, self.smooth, self.spatial_shape) for box in boxes]
        return [box or empty for box in boxes]

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        if self.smooth:
            box = grown(box, self.smooth, self.spatial_shape)
        rows = np.zeros((len(ids), 1 + 2 * len(box)), dtype=int)
        for row, part in zip(rows, ids, strict=True):
            # The region and the smallest box around its hidden voxels here decide which voxels these are.
            common = _common(self._box(part), box)
            tight = self._tight(part[1], common) if common else None
            if tight:
                row[:] = [part[1], *(end for side in tight for end in (side.start, side.stop))]
        return rows[:, 0] > 0, rows

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        around = grown(box, self.smooth, self.spatial_shape) if self.smooth else box
        shape = [side.stop - side.start for side in around]
        hidden = torch.zeros(len(codes["region"]), 1, *shape, dtype=self.dtype, device=device)
        for mask, region, first, stop in zip(hidden, codes["region"], codes["first"], codes["stop"], strict=True):
            common = _common(tuple(map(slice, first.tolist(), stop.tolist())), around)
            if common:
                inside: Any = (0, *within(common, around))
                mask[inside] = to_device(self.index[common] == region, device, self.dtype)
        return 1 - (averaged(hidden, box, self.smooth, self.spatial_shape) if self.smooth else hidden)


def _common(one: Box, other: Box) -> Box | None:
    """What lies in two boxes; None where nothing does."""
    sides = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)]
    return tuple(sides) if all(side.start < side.stop for side in sides) else None
