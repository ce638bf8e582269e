"""Windows that find where the evidence lies, then random masks inside what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

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
        place: which of all boxes it is.
        everywhere: whether no evidence stood out, so that the box is the whole image.
    """

    box: Box
    rows: list[int]
    masks: BoundMasks
    indices: list[int]
    place: tuple[int, int]
    everywhere: bool


class FocusedMasks(Masks):
    """Hierarchical windows, then random masks of RISE inside the boxes that hold the evidence. 2D and 3D.

    The first rounds are those of :class:`~monai_saliency.HierarchicalMasks`. The evidence is what the windows of the
    first level took from the score, divided among the parts of those that were refined. In the last round, boxes of
    ``grid_size`` windows of the last level along each axis are laid where they hold most of it, and everything but the
    box is kept while RISE's masks (:class:`~monai_saliency.RISEMasks`) perturb the box.

    - Boxes that hold a quarter or more of the evidence of the strongest are perturbed too, each by its own masks, at
      most ``max_foci`` for each explained score. They share ``num_masks``.
    - Where the next larger box holds half as much again, it is taken: its cells are windows of the level before.
    - Where more boxes are as strong, or the boxes hold less than half of all that windows took from the score, nothing
      stands out, as in a healthy scan: the masks perturb the whole image then. So they do where a box is more than an
      eighth of the image.

    Args:
        num_masks: random masks for each explained score, at least 1.
        grid_size: cells of a box along each axis, at least 2.
        window_size: as for :class:`~monai_saliency.HierarchicalMasks`.
        levels: as for :class:`~monai_saliency.HierarchicalMasks`.
        keep: as for :class:`~monai_saliency.HierarchicalMasks`.
        p1: probability in (0, 1) that a cell is kept.
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

    Behind the windows, index ``first + (size * voxels + corner) * num_masks + i`` is random mask i of the box of a size
    whose first voxel is ``corner`` in the flattened image; the size behind the last one is the whole image.

    Attributes:
        windows: the windows.
        cells: of a box, along each axis.
        window_voxels: of a window of the last level.
    """

    def __init__(self, masks: FocusedMasks, windows: BoundHierarchicalMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        self.windows = windows
        self.num_masks, self.max_foci = masks.num_masks, masks.max_foci
        self.cells = masks.grid_size
        self.window_voxels = float(np.prod([int(axis[1]) for axis in windows.bounds[-1]]))
        self._voxels = int(np.prod(self.spatial_shape))
        #: the shape of each box, the whole image last
        self.shapes = self._sizes(masks.grid_size)
        random = RISEMasks(masks.num_masks, masks.grid_size, masks.p1, masks.seed)
        self._random = [random.bind(image[everywhere(tuple(map(slice, shape)))]) for shape in self.shapes]
        self.key = ("FocusedMasks", self.max_foci, windows.key, self._random[-1].key, tuple(self.shapes))

    def _sizes(self, cells: int) -> list[tuple[int, ...]]:
        edges = [[int(axis[1]) for axis in level] for level in reversed(self.windows.bounds)]
        found = [tuple(min(cells * e, n) for e, n in zip(each, self.spatial_shape, strict=True)) for each in edges]
        small = [shape for shape in dict.fromkeys(found) if np.prod(shape) <= _SMALL * self._voxels]
        return [*small, self.spatial_shape]

    def __len__(self) -> int:
        return len(self.windows) + ((len(self.shapes) - 1) * self._voxels + 1) * self.num_masks

    @property
    def at_most(self) -> int:
        return self.windows.at_most + self.num_masks

    def next_round(
        self, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[int] | None:
        if len(indices) and indices[-1] >= len(self.windows):
            return None
        found = self.windows.next_round(indices, scores, reference_scores)
        if found is not None:
            return found
        chosen: dict[int, None] = {}
        for column, reference in zip(scores.T, reference_scores, strict=True):
            boxes = self.asked_for(indices, column, reference)
            each = -(-self.num_masks // len(boxes))
            for size, corner in boxes:
                first = len(self.windows) + (size * self._voxels + corner) * self.num_masks
                chosen.update(dict.fromkeys(range(first, first + each)))
        return list(chosen)

    def asked_for(
        self, indices: Sequence[int], scores: torch.Tensor, reference_score: torch.Tensor
    ) -> list[tuple[int, int]]:
        """The boxes (:attr:`Focus.place`) that the evidence of one score asks for, the strongest first.

        Args:
            indices: indices of masks; windows count alone.
            scores: ``(n,)``, one score of each mask.
            reference_score: of the unperturbed image.
        """
        rows = [row for row, index in enumerate(indices) if index < len(self.windows)]
        drops = reference_score.double() - scores[rows].double()
        return self._find(self.windows.spread([indices[row] for row in rows], drops))

    def stopped(self, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        found = self.foci(indices)
        if all(focus.everywhere for focus in found):
            return "nothing stood out: random masks over the whole image were the last"
        places = f"{len(found)} place{'s' * (len(found) > 1)} with evidence"
        return f"random masks in {places} were the last"

    def _find(self, evidence: np.ndarray) -> list[tuple[int, int]]:
        """The size and the corner of each box with evidence, the strongest first; the whole image where none stands
        out.

        Args:
            evidence: what the windows took from one score, for each window of the last level.
        """
        whole_image = [(len(self.shapes) - 1, 0)]
        left = evidence.clip(min=0)
        least, total = 0.0, left.sum()
        boxes: list[tuple[int, int]] = []
        while left.sum() > 0 and len(self.shapes) > 1:
            size, corner, mass = self._strongest(left)
            if mass < least:
                break
            if len(boxes) == self.max_foci:  # and as much elsewhere
                return whole_image
            boxes.append((size, int(np.ravel_multi_index(corner, self.spatial_shape))))
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
        groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for row, index in enumerate(indices):
            if index >= len(self.windows):
                place, number = divmod(int(index) - len(self.windows), self.num_masks)
                rows, numbers = groups.setdefault(divmod(place, self._voxels), ([], []))
                rows.append(row)
                numbers.append(number)
        last = len(self.shapes) - 1
        return [
            Focus(self._box(size, corner), rows, self._random[size], numbers, (size, corner), size == last)
            for (size, corner), (rows, numbers) in groups.items()
        ]

    def _box(self, size: int, corner: int) -> Box:
        first = np.unravel_index(corner, self.spatial_shape)
        return tuple(slice(int(a), int(a) + edge) for a, edge in zip(first, self.shapes[size], strict=True))

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
        windows = np.flatnonzero(wanted < len(self.windows))
        hides[windows], rows[windows] = self.windows.restrict(wanted[windows].tolist(), box)
        for focus in self.foci(indices):
            hides[focus.rows] = _common(focus.box, box) is not None
        return hides, rows

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        indices = codes["index"].tolist()
        masks = torch.ones(len(indices), 1, *(s.stop - s.start for s in box), dtype=self.dtype, device=device)
        windows = [row for row, index in enumerate(indices) if index < len(self.windows)]
        if windows:
            masks[windows] = self.windows.render([indices[row] for row in windows], device, box)
        for focus in self.foci(indices):
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
