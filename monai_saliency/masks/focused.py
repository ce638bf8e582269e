"""Windows that find where the evidence lies, then random masks inside what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.alone import BoundAloneMasks
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks, HierarchicalMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.utils.arguments import probability, whole_number
from monai_saliency.utils.boxes import Box, everywhere, within

__all__ = ["BoundFocusedMasks", "FocusedMasks", "Focus"]

# A box with at least this share of the evidence of the strongest one is looked at too.
_SECOND = 0.25
# A larger box is taken where it holds more evidence by this factor.
_LARGER = 1.5
# Without this share of all evidence in the boxes, there is no focus.
_CONCENTRATED = 0.5
# Evidence is there more than once where windows take less than this share of what the image adds to the score.
_REDUNDANT = 0.1
# So much less is kept of a place that is enough: too few masks would hide all of it, which alone changes the score.
_ENOUGH_KEPT = 0.7
# A box is not larger than this share of the image.
_SMALL = 1 / 8


@dataclass(frozen=True)
class Focus:
    """Random masks of one box.

    Attributes:
        box: the box, one slice for each spatial axis: the whole image where no evidence stands out.
        rows: which of the given indices these masks have.
        masks: the random masks, bound to an image of the box's shape.
        indices: the random masks of the rows, in the same order.
        place: which of all boxes it is, and what is hidden with it.
        everywhere: whether no evidence stood out, so that the box is the whole image.
        hidden: boxes that are hidden too: other places, each of which is enough for the score.
    """

    box: Box
    rows: list[int]
    masks: BoundMasks
    indices: list[int]
    place: int
    everywhere: bool
    hidden: list[Box]


class FocusedMasks(Masks):
    """Hierarchical windows, then random masks of RISE inside the boxes that hold the evidence. 2D and 3D.

    The first rounds are those of :class:`~monai_saliency.HierarchicalMasks`. The evidence is what the windows of the
    first level took from the score, divided among the parts of those that were refined. In the last round, boxes of
    ``grid_size`` windows of the last level along each axis are laid where they hold most of it, and everything but the
    box is kept while RISE's masks (:class:`~monai_saliency.RISEMasks`) perturb the box.

    - Boxes that hold a quarter or more of the evidence of the strongest are perturbed too, each by its own masks, at
      most ``max_foci`` for each explained score. They share ``num_masks``.
    - Where the next larger box holds half as much again, it is taken: its cells are windows of the level before.
    - Where hiding any window of the first level takes little from the score (all together less than a tenth of what
      hiding the whole image takes), the evidence is there more than once: of two lesions, either is enough. Then each
      of these windows is shown alone with a margin, all else hidden. A place that alone gives 80 % of what the image
      gives is enough. Random masks perturb a box about each such place **while the others are hidden**, so the map says
      what it adds where the others are not. With more than ``max_foci`` places it goes on as if there were none. These
      forwards are taken from ``num_masks``, of which half remain at least.
    - Where more boxes are as strong, or the boxes hold less than half of all that windows took from the score, nothing
      stands out, as in a healthy scan: the masks perturb the whole image then. So they do where a box is more than an
      eighth of the image.

    Args:
        num_masks: random masks for each explained score, at least 1.
        grid_size: cells of a box along each axis, at least 2.
        window_size: as for :class:`~monai_saliency.HierarchicalMasks`.
        levels: as for :class:`~monai_saliency.HierarchicalMasks`.
        keep: as for :class:`~monai_saliency.HierarchicalMasks`.
        p1: probability in (0, 1) that a cell is kept; where each of several places is enough, 0.7 of it.
        seed: of the random masks.
        max_foci: boxes for each explained score, at the most.
        unit: as for :class:`~monai_saliency.HierarchicalMasks`.
        inferer: as for :class:`~monai_saliency.HierarchicalMasks`.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as :class:`~monai_saliency.HierarchicalMasks`.

    Example::

        >>> import torch
        >>> bound = FocusedMasks(num_masks=10, grid_size=2, window_size=4, levels=2).bind(torch.zeros(1, 16, 16))
        >>> scores = torch.full((16, 1), 9.0)
        >>> scores[5] = 3.0  # the window at rows and columns 4 to 7 holds the evidence
        >>> finer = list(bound.next_round(range(16), scores, torch.tensor([9.0])))
        >>> scores = torch.cat([scores, torch.tensor([[9.0], [9.0], [9.0], [3.0]])])  # of its parts, the last one
        >>> last = list(bound.next_round([*range(16), *finer], scores, torch.tensor([9.0])))
        >>> len(last), bound.foci(last)[0].box  # around rows and columns 6 and 7
        (10, (slice(5, 9, None), slice(5, 9, None)))
    """

    shorter = "a smaller num_masks, whose map has more noise, or a larger window_size"

    def __init__(
        self,
        num_masks: int = 200,
        grid_size: int = 5,
        window_size: float | Sequence[float] | None = None,
        levels: int = 3,
        keep: float = 0.06,
        p1: float = 0.5,
        seed: int = 0,
        max_foci: int = 4,
        unit: str = "voxel",
        inferer: SlidingWindowInferer | None = None,
    ) -> None:
        self.num_masks = whole_number("num_masks", num_masks, 1)
        self.grid_size = whole_number("grid_size", grid_size, 2)
        self.windows = HierarchicalMasks(window_size, levels, keep, unit, inferer)
        probability("p1", p1)
        self.p1 = float(p1)
        if not 0 < self.p1 < 1:
            raise ValueError(f"`p1` must be in (0, 1), since masks of one kind explain nothing, got {p1}")
        self.seed = whole_number("seed", seed, 0)
        self.max_foci = whole_number("max_foci", max_foci, 1)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundFocusedMasks:
        return BoundFocusedMasks(self, self.windows.bind(image, labels, spacing), image)


class BoundFocusedMasks(BoundMasks):
    """The masks of one image: the windows, then those of every box that may be asked for, then those of the image.

    Behind the windows and the parts that are shown alone, index ``first + place * num_masks + i`` is random mask i of a
    place: of the box of a size whose first voxel is ``corner`` in the flattened image for place ``size * voxels +
    corner``, of the whole image for the place behind the last size. The places behind that are those that are enough
    alone, each with every set of others that may be hidden with it.

    Attributes:
        windows: the windows.
        alone: parts that are shown alone; their masks follow the windows.
        cells: of a box, along each axis.
        window_voxels: of a window of the last level.
    """

    def __init__(self, masks: FocusedMasks, windows: BoundHierarchicalMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        self.windows, self.alone = windows, BoundAloneMasks(windows, image)
        self._first_random = len(self.windows) + len(self.alone)
        self.num_masks, self.max_foci = masks.num_masks, masks.max_foci
        self.cells = masks.grid_size
        self.window_voxels = float(np.prod([int(axis[1]) for axis in windows.bounds[-1]]))
        self._voxels = int(np.prod(self.spatial_shape))
        #: the shape of each box, the whole image last
        self.shapes = self._sizes(masks.grid_size)
        self._whole = (len(self.shapes) - 1) * self._voxels
        shapes = [(shape, masks.p1) for shape in self.shapes] + [(self.alone.edges, _ENOUGH_KEPT * masks.p1)]
        self._random = [
            RISEMasks(masks.num_masks, masks.grid_size, p1, masks.seed).bind(
                image[everywhere(tuple(map(slice, shape)))]
            )
            for shape, p1 in shapes
        ]
        self._others = self._most_others()
        self.key = ("FocusedMasks", self.max_foci, windows.key, self._random[-2].key, tuple(self.shapes))

    def _most_others(self) -> int:
        """How many other places may be hidden with one, so that indices are numbers of 64 bits."""
        most = self.max_foci - 1
        while most and self._first_random + self._num_places(most) * self.num_masks > 2**62:
            most -= 1
        return most

    def _num_places(self, others: int) -> int:
        places = self.alone.num_places
        return self._whole + 1 + places * (places + 1) ** others

    def _sizes(self, cells: int) -> list[tuple[int, ...]]:
        edges = [[int(axis[1]) for axis in level] for level in reversed(self.windows.bounds)]
        found = [tuple(min(cells * e, n) for e, n in zip(each, self.spatial_shape, strict=True)) for each in edges]
        small = [shape for shape in dict.fromkeys(found) if np.prod(shape) <= _SMALL * self._voxels]
        return [*small, self.spatial_shape]

    def __len__(self) -> int:
        return self._first_random + self._num_places(self._others) * self.num_masks

    @property
    def at_most(self) -> int:
        parts = len(self.alone) - 1
        return self.windows.at_most + 1 + max(self.num_masks, parts + -(-self.num_masks // 2))

    def next_round(
        self, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[int] | None:
        if not len(indices):
            return [*self.windows.levels[0], len(self.windows)]  # and the whole image hidden
        if indices[-1] >= self._first_random:
            return None
        columns = list(zip(scores.T, reference_scores, strict=True))
        windows = self._windows(indices)
        if len(indices) == len(self.windows.levels[0]) + 1 and any(
            self._redundant(indices, *column) for column in columns
        ):
            return range(len(self.windows) + 1, self._first_random)
        places = [self._enough(indices, *column) for column in columns]
        unsettled = [k for k, found in enumerate(places) if not found]
        if unsettled:
            wanted = [indices[row] for row in windows]
            finer = self.windows.next_round(wanted, scores[windows][:, unsettled], reference_scores[unsettled])
            if finer is not None:
                return finer
        chosen: dict[int, None] = {}
        for column in columns:
            boxes = self.asked_for(indices, *column)
            affordable = self._affordable(indices, boxes)
            each = max(1, affordable // len(boxes))
            for place in boxes[:affordable]:
                first = self._first_random + place * self.num_masks
                chosen.update(dict.fromkeys(range(first, first + each)))
        return list(chosen)

    def _windows(self, indices: Sequence[int]) -> list[int]:
        """The rows of windows."""
        return [row for row, index in enumerate(indices) if index < len(self.windows)]

    def _affordable(self, indices: Sequence[int], boxes: Sequence[int]) -> int:
        """How many random masks a score has that asked for these boxes."""
        if len(self.windows) + 1 not in indices:
            return self.num_masks
        windows = len(self.windows.levels[0]) if boxes[0] > self._whole else self.windows.at_most
        return min(self.num_masks, self.at_most - windows - len(self.alone))

    def asked_for(self, indices: Sequence[int], scores: torch.Tensor, reference_score: torch.Tensor) -> list[int]:
        """The boxes (:attr:`Focus.place`) that the evidence of one score asks for, the strongest first.

        Args:
            indices: indices of masks; random masks do not count.
            scores: ``(n,)``, one score of each mask.
            reference_score: of the unperturbed image.
        """
        found = self._enough(indices, scores, reference_score)
        if found:
            return found
        rows = self._windows(indices)
        drops = reference_score.double() - scores[rows].double()
        return self._find(self.windows.spread([indices[row] for row in rows], drops))

    def _redundant(self, indices: Sequence[int], scores: torch.Tensor, reference_score: torch.Tensor) -> bool:
        """Whether hiding any window takes little from one score, compared with hiding all."""
        first = len(self.windows.levels[0])  # these windows are the first masks, the hidden image follows
        drops = reference_score.double() - scores[: first + 1].double()
        return bool(drops[:first].clamp(min=0).sum() < _REDUNDANT * drops[first])

    def _enough(self, indices: Sequence[int], scores: torch.Tensor, reference_score: torch.Tensor) -> list[int]:
        """The places that are each enough for one score, where its evidence is there more than once; else none."""
        start = len(self.windows.levels[0]) + 1
        stop = start + len(self.alone) - 1
        asked = len(indices) >= stop and indices[start] == len(self.windows) + 1
        if not asked or not self._redundant(indices, scores, reference_score):
            return []
        fill = scores[start - 1].double()
        gains = (scores[start:stop].double() - fill) / (reference_score.double() - fill)
        found = self.alone.enough(gains.cpu().numpy())
        if len(found) > self._others + 1:
            return []
        base, first, codes = self.alone.num_places, self._whole + 1, []
        for place in found:
            others = [other + 1 for other in found if other != place]
            codes.append(first + place + base * sum(other * (base + 1) ** i for i, other in enumerate(sorted(others))))
        return codes

    def _place(self, place: int) -> tuple[Box, BoundMasks, list[Box]]:
        """The box of a place, its random masks, and the boxes that are hidden with it."""
        if place <= self._whole:
            size, corner = divmod(place, self._voxels)
            first = np.unravel_index(corner, self.spatial_shape)
            box = tuple(slice(int(a), int(a) + edge) for a, edge in zip(first, self.shapes[size], strict=True))
            return box, self._random[size], []
        code, own = divmod(place - self._whole - 1, self.alone.num_places)
        others = []
        while code:
            code, other = divmod(code, self.alone.num_places + 1)
            others.append(self.alone.box(other - 1))
        return self.alone.box(own), self._random[-1], others

    def stopped(self, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        found = self.foci(indices)
        if all(focus.everywhere for focus in found):
            return "nothing stood out: random masks over the whole image were the last"
        places = [focus for focus in found if not focus.everywhere]
        enough = sum(bool(focus.hidden) for focus in places)
        words = f"random masks in {len(places)} place{'s' * (len(places) > 1)} with evidence were the last"
        return f"{words}; each of {enough} is enough, so that the others were hidden meanwhile" if enough else words

    def _find(self, evidence: np.ndarray) -> list[int]:
        """Each box with evidence, the strongest first; the whole image where none stands out.

        Args:
            evidence: what the windows took from one score, for each window of the last level.
        """
        whole_image = [self._whole]
        left = evidence.clip(min=0)
        least, total = 0.0, left.sum()
        boxes: list[int] = []
        while left.sum() > 0 and self._whole:
            size, corner, mass = self._strongest(left)
            if mass < least:
                break
            if len(boxes) == self.max_foci:  # and as much elsewhere
                return whole_image
            boxes.append(size * self._voxels + int(np.ravel_multi_index(corner, self.spatial_shape)))
            least = least or _SECOND * mass
            left = left * (1 - self._inside(corner, self.shapes[size]))
        return boxes if total - left.sum() >= _CONCENTRATED * total > 0 else whole_image

    def _strongest(self, left: np.ndarray) -> tuple[int, tuple[int, ...], float]:
        """The size, the corner and the evidence of the box that holds most; a larger one where it holds much more."""
        best: tuple[int, tuple[int, ...], float] | None = None
        for size, shape in enumerate(self.shapes[:-1]):
            corner = self._around(self._best_window(left, shape), shape)
            for _ in range(3):
                corner = self._around(self._centre(left * self._inside(corner, shape)), shape)
            mass = float((left * self._inside(corner, shape)).sum())
            if best is not None and mass < _LARGER * best[2]:
                break
            best = size, corner, mass
        assert best is not None
        return best

    def _best_window(self, left: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The middle of the window of the last level around which a box holds most, in voxels."""
        held = left
        for axis, (bounds, edge) in enumerate(zip(self.windows.bounds[-1], shape, strict=True)):
            middle = (bounds[:-1] + bounds[1:]) / 2
            near = np.abs(middle[:, None] - middle[None]) < edge / 2
            held = np.moveaxis(np.tensordot(near.astype(float), held, axes=(1, axis)), 0, axis)
        place = np.unravel_index(int(np.argmax(np.where(left > 0, held, -1))), held.shape)
        middles = [(b[:-1] + b[1:]) / 2 for b in self.windows.bounds[-1]]
        return np.array([middle[at] for middle, at in zip(middles, place, strict=True)])

    def _centre(self, left: np.ndarray) -> np.ndarray:
        """The centre of what is there, in voxels."""
        found = []
        for axis, bounds in enumerate(self.windows.bounds[-1]):
            along = left.sum(axis=tuple(other for other in range(left.ndim) if other != axis))
            found.append(along @ ((bounds[:-1] + bounds[1:]) / 2) / along.sum())
        return np.array(found)

    def _around(self, centre: np.ndarray, shape: Sequence[int]) -> tuple[int, ...]:
        """The first voxel of a box about a centre, inside the image."""
        sides = zip(centre, shape, self.spatial_shape, strict=True)
        return tuple(int(np.clip(round(c - edge / 2), 0, n - edge)) for c, edge, n in sides)

    def _inside(self, corner: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """The share of each window of the last level that lies inside a box."""
        found = np.ones(())
        for bounds, first, edge in zip(self.windows.bounds[-1], corner, shape, strict=True):
            common = np.minimum(bounds[1:], first + edge) - np.maximum(bounds[:-1], first)
            found = found[..., None] * (common.clip(min=0) / np.diff(bounds))
        return found

    def foci(self, indices: Sequence[int]) -> list[Focus]:
        """The boxes of random masks, in the order in which they were asked for; the windows are left out.

        Args:
            indices: indices of masks.
        """
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for row, index in enumerate(indices):
            if index >= self._first_random:
                place, number = divmod(int(index) - self._first_random, self.num_masks)
                rows, numbers = groups.setdefault(place, ([], []))
                rows.append(row)
                numbers.append(number)
        found = []
        for place, (rows, numbers) in groups.items():
            box, masks, hidden = self._place(place)
            found.append(Focus(box, rows, masks, numbers, place, place == self._whole, hidden))
        return found

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """``index``, int64 ``(n,)``: windows and random masks have codes of their own."""
        return {"index": np.asarray(indices, dtype=np.int64)}

    def hidden_boxes(self, indices: Sequence[int]) -> list[Box] | None:
        if any(index >= len(self.windows) for index in indices):
            return None
        return self.windows.hidden_boxes(indices)

    def restrict(self, indices: Sequence[int], box: Box) -> tuple[np.ndarray, np.ndarray]:
        wanted = np.asarray(indices, dtype=np.int64)
        hides, rows = np.zeros(len(wanted), dtype=bool), np.full((len(wanted), 2 * len(box)), -1, dtype=np.int64)
        rows[:, 0] = wanted + 1  # random masks differ wherever they hide anything; a window's row ends above -1
        for first, part in ((0, self.windows), (len(self.windows), self.alone)):
            here = np.flatnonzero((wanted >= first) & (wanted < first + len(part)))
            hides[here], rows[here] = part.restrict((wanted[here] - first).tolist(), box)
        for focus in self.foci(indices):
            hides[focus.rows] = any(_common(each, box) is not None for each in (focus.box, *focus.hidden))
            if _common(focus.box, box) is None:  # all masks of the place are alike there
                rows[focus.rows, 0], rows[focus.rows, 1:] = -2 - focus.place, 0
        return hides, rows

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        indices = codes["index"].tolist()
        masks = torch.ones(len(indices), 1, *(s.stop - s.start for s in box), dtype=self.dtype, device=device)
        for first, part in ((0, self.windows), (len(self.windows), self.alone)):
            rows = [row for row, index in enumerate(indices) if first <= index < first + len(part)]
            if rows:
                masks[rows] = part.render([indices[row] - first for row in rows], device, box)
        for focus in self.foci(indices):
            for each in focus.hidden:
                hidden = _common(each, box)
                if hidden is not None:
                    for row in focus.rows:
                        masks[row][everywhere(within(hidden, box))] = 0
            common = _common(focus.box, box)
            if common is not None:
                random = focus.masks.render(focus.indices, device, within(common, focus.box))
                for row, mask in zip(focus.rows, random, strict=True):
                    masks[row][everywhere(within(common, box))] = mask
        return masks


def _common(first: Box, second: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    sides = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first, second, strict=True)]
    return tuple(slice(*side) for side in sides) if all(start < stop for start, stop in sides) else None
