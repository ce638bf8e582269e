"""Windows that find where the evidence lies, then random masks inside what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.alone import BoundAloneMasks
from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.masks.blocks import BoundBlockMasks
from monai_saliency.masks.evidence_boxes import EvidenceBoxes
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks, HierarchicalMasks
from monai_saliency.masks.looks import Found, LookMasks, look
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.utils.arguments import probability, whole_number
from monai_saliency.utils.boxes import Box, everywhere, within

__all__ = ["BoundFocusedMasks", "FocusedMasks", "Focus"]

# While others are hidden, cells of a place are kept with p1 times one of these: a place may be enough with nearly all
# of it hidden. Some masks of the second one tell which is used.
_KEPT = (1.0, 0.7, 0.4)
_ALL, _USUAL, _LESS = range(len(_KEPT))
_TRIED = 8
# It stays where what these masks leave of what the image adds is between these shares, on average.
_MIDDLE = (0.2, 0.6)
# So many looks are remembered: of two rounds of a case with as many scores as organs.
_REMEMBERED = 256
# What is left with all boxes hidden is said from this share on.
_SAID = 0.25


@dataclass(frozen=True)
class Focus:
    """Random masks of one box.

    Attributes:
        box: the box, one slice for each spatial axis: the whole image where no evidence stands out.
        rows: which of the given ids these masks have.
        masks: the random masks, bound to an image of the box's shape.
        ids: the random masks of the rows, in the same order.
        place: which of all boxes it is, and what is hidden with it.
        everywhere: whether no evidence stood out, so that the box is the whole image.
        hidden: boxes that are hidden too: other places, which give what this one gives.
        before: those of them that were found before this one. They are hidden inside the box too.
    """

    box: Box
    rows: list[int]
    masks: BoundMasks
    ids: list[int]
    place: int
    everywhere: bool
    hidden: list[Box]
    before: list[Box]


class FocusedMasks(Masks):
    """Hierarchical windows, then random masks of RISE inside the boxes that hold the evidence. 2D and 3D.

    The first rounds are those of :class:`~monai_saliency.HierarchicalMasks`. The evidence is what the windows of the
    first level took from the score, divided among the parts of those that were refined. In the last round, boxes of
    ``grid_size`` windows of the last level along each axis are laid where they hold most of it, and everything but the
    box is kept while RISE's masks (:class:`~monai_saliency.RISEMasks`) perturb the box.

    - Boxes that hold a quarter or more of the evidence of the strongest are perturbed too, each by its own masks, at
      most ``max_foci`` for each explained score. They share ``num_masks``.
    - Where the next larger box holds half as much again, it is taken: its cells are windows of the level before.
    - Before that, all boxes are hidden together. Where the score stays, though the windows took nothing elsewhere, the
      evidence is there more than once: of two lesions, either is enough. Then the image is looked at again **with
      these boxes hidden**, by blocks of two windows along each axis and by windows inside the blocks that take most,
      which find the next one. A box that adds less than a twentieth of what the image adds, where the others are
      hidden, is dropped. Random masks perturb each box while the others are hidden, so the map says what it adds where
      the others are not. What all boxes leave of the score is said. These forwards are taken from ``num_masks``, of
      which a third remains at least: in 3D a further look takes 36 to 132 of them with the default settings. There are
      more as long as the masks last.
    - Where all windows together take less than a tenth of what hiding the whole image takes, at most two boxes stand
      out. With none, each window is shown alone with a margin, all else hidden. A place that alone gives 80 % of what
      the image gives is enough, and is a box. With more than ``max_foci`` such places it goes on as if there were none.
    - Where more boxes are as strong, or the boxes hold less than half of all that windows took from the score, nothing
      stands out, as in a healthy scan: the masks perturb the whole image then. So they do where a box is more than an
      eighth of the image.

    Args:
        num_masks: random masks for each explained score, at least 1.
        grid_size: cells of a box along each axis, at least 2.
        window_size: as for :class:`~monai_saliency.HierarchicalMasks`.
        levels: as for :class:`~monai_saliency.HierarchicalMasks`.
        keep: as for :class:`~monai_saliency.HierarchicalMasks`.
        p1: probability in (0, 1) that a cell is kept. Where the other places are hidden meanwhile, eight masks with 0.7
            of it tell whether 0.4 of it, 0.7 of it or p1 itself is used: that which keeps about half of the score.
        seed: of the random masks.
        max_foci: boxes for each explained score, at the most.
        unit: as for :class:`~monai_saliency.HierarchicalMasks`.
        inferer: as for :class:`~monai_saliency.HierarchicalMasks`.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as :class:`~monai_saliency.HierarchicalMasks`.

    Example::

        >>> import torch
        >>> bound = FocusedMasks(num_masks=10, grid_size=2, window_size=4, levels=2).bind(torch.zeros(1, 16, 16))
        >>> score = torch.tensor([9.0])
        >>> ids = list(bound.first_round())  # 16 windows, and all hidden
        >>> scores = torch.tensor([[9.0]] * 16 + [[3.0]])
        >>> scores[5] = 3.0  # the window at rows and columns 4 to 7 holds the evidence
        >>> ids += bound.next_round(ids, scores, score)
        >>> scores = torch.cat([scores, torch.tensor([[9.0], [9.0], [9.0], [3.0]])])  # of its parts, the last one
        >>> ids += bound.next_round(ids, scores, score)  # the box hidden
        >>> last = list(bound.next_round(ids, torch.cat([scores, torch.tensor([[3.0]])]), score))
        >>> len(last), bound.foci(last)[0].box  # around rows and columns 6 and 7
        (10, (slice(4, 8, None), slice(4, 8, None)))
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
    """The masks of one image: those of looks at it, then the random masks of every box that may be asked for.

    The first masks are the windows. What follows is coded in the index: masks of looks with boxes hidden
    (:class:`~monai_saliency.masks.looks.LookMasks`), then, for each box and each row of others that may be hidden with
    it, ``num_masks`` random masks. The box behind the last is the whole image.

    Attributes:
        windows: the windows.
        alone: parts that are shown alone.
        blocks: of windows, with which further looks begin.
        boxes: where random masks may lie.
        looks: the masks of looks.
        cells: of a box, along each axis.
        window_voxels: of a window of the last level.
    """

    def __init__(self, masks: FocusedMasks, windows: BoundHierarchicalMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        self.windows, self.alone = windows, BoundAloneMasks(windows, image)
        self.num_masks, self.cells = masks.num_masks, masks.grid_size
        self.window_voxels = float(np.prod([int(axis[1]) for axis in windows.bounds[-1]]))
        self.boxes = EvidenceBoxes(windows, masks.grid_size, self.alone.edges)
        self.blocks = BoundBlockMasks(windows, image)
        inside = len(_KEPT) * self.num_masks
        self.looks = LookMasks(windows, self.alone, self.blocks, self.boxes, inside, masks.max_foci)
        shapes = [*self.boxes.shapes, self.spatial_shape]
        self._random = [
            [
                RISEMasks(masks.num_masks, masks.grid_size, p1, masks.seed).bind(
                    image[everywhere(tuple(map(slice, each)))]
                )
                for each in shapes
            ]
            for p1 in (kept * masks.p1 for kept in _KEPT)
        ]
        self._found: dict[tuple[tuple[int, ...], bytes, float], Found] = {}
        self.key = ("FocusedMasks", masks.max_foci, self.blocks.key, self._random[0][-1].key, tuple(self.boxes.shapes))

    def __len__(self) -> int:
        most = self.looks.most
        return len(self.looks) + (len(self.boxes) + 1) ** most * most * len(_KEPT) * self.num_masks

    @property
    def at_most(self) -> int:
        return self._first_look + max(self.num_masks, max(len(self.alone) - 1, self._further_look) + self._least)

    @property
    def _first_look(self) -> int:
        """Windows, the whole image hidden, and the boxes hidden."""
        return self.windows.at_most + 2

    @property
    def _further_look(self) -> int:
        """At the most: boxes hidden, their inner parts, blocks and windows, and what is asked of each box then."""
        return self.blocks.at_most + 3 + 3 * self.looks.most

    @property
    def _least(self) -> int:
        """How many random masks a score has, however many masks its looks took."""
        return -(-self.num_masks // 3)

    def first_round(self) -> Sequence[Id]:
        return [*self.windows.levels[0], self.looks.whole]

    def next_round(
        self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[Id] | None:
        if all(index <= self.looks.whole for index in ids):
            windows = [row for row, index in enumerate(ids) if index < len(self.windows)]
            finer = self.windows.next_round([ids[row] for row in windows], scores[windows], reference_scores)
            if finer is not None:
                return finer
        done = set(map(int, ids))
        rounds: list[list[int]] = [[], [], []]
        for score, reference in zip(scores.T, reference_scores, strict=True):
            found = self._look(ids, score, reference)
            rounds[0] += found.wanted
            if not found.wanted:
                rounds[1] += self._tried(found)
                rounds[2] += self.random_masks(found, ids, score)
        missing = ([index for index in dict.fromkeys(wanted) if index not in done] for wanted in rounds)
        return next(filter(None, missing), None)

    def _look(self, ids: Sequence[Id], scores: torch.Tensor, reference_score: torch.Tensor) -> Found:
        """What the looks found for one score ``(n,)``, as far as they went."""
        own = [row for row, index in enumerate(ids) if index < len(self.looks)]
        numbers, scores = [int(ids[row]) for row in own], scores[own].cpu().double()
        # Asked for by the next round, by the map, by its error: it is read once.
        key = tuple(numbers), scores.numpy().tobytes(), float(reference_score)
        found = self._found.get(key)
        if found is None:
            spare = self.at_most - self._first_look - self._least
            found = look(self.looks, numbers, scores, reference_score, spare)
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[key] = found
        return found

    def _num_random(self, found: Found) -> int:
        """How many random masks each place of one score has."""
        most = self.num_masks
        if found.spent:
            most = min(most, max(self._least, self.at_most - self._first_look - found.spent))
        return max(1, most // max(1, len(found.boxes)))

    def random_masks(self, found: Found, ids: Sequence[Id], scores: torch.Tensor) -> list[int]:
        """The random masks of one score, without those that were tried and left."""
        return [index for each in self.shares(found, ids, scores) for index in each]

    def shares(self, found: Found, ids: Sequence[Id], scores: torch.Tensor) -> list[range]:
        """The random masks of each place that one score asks for, without those that were tried and left.

        Args:
            found: what the looks found for this score.
            ids: the masks that were scored.
            scores: ``(n,)``, one score of each mask.
        """
        tried, count = set(self._tried(found)), self._num_random(found)
        places = self._places(found, ids, scores)[: self.num_masks]
        firsts = [len(self.looks) + place * self.num_masks for place in places]
        left = [max(1, count - _TRIED) if tried and first not in tried else count for first in firsts]
        return [range(first, first + each) for first, each in zip(firsts, left, strict=True)]

    def _tried(self, found: Found) -> list[int]:
        """The masks that tell how much is to be kept of each place of one score."""
        if not found.redundant or len(found.boxes) < 2:
            return []
        firsts = [
            len(self.looks) + self._place_of(found, before, _USUAL) * self.num_masks
            for before in range(len(found.boxes))
        ]
        return [index for first in firsts for index in range(first, first + min(_TRIED, self._num_random(found)))]

    def _place_of(self, found: Found, before: int, kept: int) -> int:
        """The number of a box with the others that are hidden, and with how much of it is kept."""
        code = 0
        if found.redundant:
            for other in reversed([*found.hides[:before], *found.hides[before + 1 :]]):
                code = code * (len(self.boxes) + 1) + other + 1
            code = (code * self.looks.most + before) * len(_KEPT) + kept
        return code * (len(self.boxes) + 1) + found.boxes[before]

    def _places(self, found: Found, ids: Sequence[Id], scores: torch.Tensor) -> list[int]:
        """The places of one score: each box with the others that are hidden, or the whole image."""
        if not found.boxes:
            return [len(self.boxes)]
        tried = self._tried(found)
        if not tried:
            return [self._place_of(found, before, _ALL) for before in range(len(found.boxes))]
        rows = {int(index): row for row, index in enumerate(ids)}
        places = []
        for before, own in enumerate(np.split(np.array(tried), len(found.boxes))):
            of = [rows[index] for index in own.tolist() if index in rows]
            share = (float(scores[of].double().mean()) - found.fill) / found.adds if of else sum(_MIDDLE) / 2
            kept = _ALL if share < _MIDDLE[0] else _LESS if share > _MIDDLE[1] else _USUAL
            places.append(self._place_of(found, before, kept))
        return places

    def asked_for(self, ids: Sequence[Id], scores: torch.Tensor, reference_score: torch.Tensor) -> list[int]:
        """The places (:attr:`Focus.place`) that the evidence of one score asks for, the first found first.

        Args:
            ids: ids of masks; random masks do not count.
            scores: ``(n,)``, one score of each mask.
            reference_score: of the unperturbed image.
        """
        return self._places(self._look(ids, scores, reference_score), ids, scores)

    def stopped(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        columns = list(zip(scores.T, reference_scores, strict=True))
        found = [self._look(ids, *column) for column in columns]
        asked = [self._places(each, ids, score) for each, (score, _) in zip(found, columns, strict=True)]
        places = {place for each, own in zip(found, asked, strict=True) for place in own if each.boxes}
        if not places:
            return "nothing stood out: random masks over the whole image were the last"
        words = f"random masks in {len(places)} place{'s' * (len(places) > 1)} with evidence were the last"
        redundant = max((len(each.boxes) for each in found if each.redundant and len(each.boxes) > 1), default=0)
        if redundant:
            words += f"; one of {redundant} gives what another gives, so the others were hidden meanwhile"
        left = max((each.left for each in found if each.boxes and each.left is not None), default=0.0)
        if _SAID <= left <= 1:  # above 1, what hides the boxes adds more than the image did
            words += f"; hiding all of them leaves {left:.0%} of what the image adds to the score"
        return words

    def _place(self, place: int) -> tuple[Box, BoundMasks, list[Box], list[Box]]:
        """The box of a place, its random masks, the boxes that are hidden with it, and those of them found before."""
        code, own = divmod(place, len(self.boxes) + 1)
        code, kept = divmod(code, len(_KEPT))
        code, before = divmod(code, self.looks.most)
        if own == len(self.boxes):
            return tuple(slice(0, n) for n in self.spatial_shape), self._random[0][-1], [], []
        hidden = []
        while code:
            code, other = divmod(code, len(self.boxes) + 1)
            hidden.append(self.boxes.box(other - 1))
        return self.boxes.box(own), self._random[kept][self.boxes.size(own)], hidden, hidden[:before]

    def foci(self, ids: Sequence[Id]) -> list[Focus]:
        """The boxes of random masks, in the order in which they were asked for; masks of looks are left out.

        Args:
            ids: ids of masks.
        """
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for row, index in enumerate(ids):
            if index >= len(self.looks):
                place, number = divmod(int(index) - len(self.looks), self.num_masks)
                rows, numbers = groups.setdefault(place, ([], []))
                rows.append(row)
                numbers.append(number)
        found = []
        for place, (rows, numbers) in groups.items():
            box, masks, hidden, before = self._place(place)
            found.append(Focus(box, rows, masks, numbers, place, place == len(self.boxes), hidden, before))
        return found

    def _looked(self, ids: Sequence[Id]) -> list[tuple[list[int], list[int], list[Box]]]:
        """Masks of looks by what is hidden with them: their rows, their numbers without that, and the boxes."""
        groups: dict[int, tuple[list[int], list[int], list[Box]]] = {}
        for row, index in enumerate(ids):
            if index < len(self.looks):
                own, hidden = self.looks.split(int(index))
                code = int(index) // self.looks.each
                rows, numbers, _ = groups.setdefault(code, ([], [], [self.boxes.box(each) for each in hidden]))
                rows.append(row)
                numbers.append(own)
        return list(groups.values())

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``index``, int64 ``(n,)``: windows and random masks have codes of their own."""
        return {"index": np.asarray(ids, dtype=np.int64)}

    def hidden_boxes(self, ids: Sequence[Id]) -> list[Box] | None:
        if any(index >= len(self.windows) for index in ids):
            return None
        return self.windows.hidden_boxes(ids)

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        wanted = np.asarray(ids, dtype=np.int64)
        hides, rows = np.zeros(len(wanted), dtype=bool), np.full((len(wanted), 2 * len(box)), -1, dtype=np.int64)
        # A mask that differs wherever it hides anything has a row of its own; a window's row ends above -1.
        rows[:, 0] = wanted + 1
        for at, numbers, hidden in self._looked(ids):
            here, own = np.asarray(at), np.asarray(numbers)
            touched = any(_common(each, box) is not None for each in hidden)
            for first, part in self.looks.families:
                of = (own >= first) & (own < first + len(part))
                hides[here[of]], found = part.restrict((own[of] - first).tolist(), box)
                if not touched:
                    rows[here[of]] = found
            if touched:  # where nothing more is hidden, all are alike
                same = here[~hides[here]]
                rows[same, 0], rows[same, 1:] = -2 - wanted[here[0]] // self.looks.each, -2
                hides[here] = True
        for focus in self.foci(ids):
            hides[focus.rows] = any(_common(each, box) is not None for each in (focus.box, *focus.hidden))
            if _common(focus.box, box) is None:  # all masks of the place are alike there
                rows[focus.rows, 0], rows[focus.rows, 1:] = -2 - focus.place, -3
        return hides, rows

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        ids = codes["index"].tolist()
        foci = self.foci(ids)
        if len(foci) == 1 and len(foci[0].rows) == len(ids) and foci[0].box == box and not foci[0].before:
            return foci[0].masks.render(foci[0].ids, device)
        masks = torch.ones(len(ids), 1, *(s.stop - s.start for s in box), dtype=self.dtype, device=device)
        for rows, numbers, hidden in self._looked(ids):
            for first, part in self.looks.families:
                of = [k for k, number in enumerate(numbers) if first <= number < first + len(part)]
                if of:
                    masks[[rows[k] for k in of]] = part.render([numbers[k] - first for k in of], device, box)
            _hide(masks, rows, hidden, box)
        for focus in foci:
            _hide(masks, focus.rows, focus.hidden, box)
            common = _common(focus.box, box)
            if common is not None:
                random = focus.masks.render(focus.ids, device, within(common, focus.box))
                for row, mask in zip(focus.rows, random, strict=True):
                    masks[row][everywhere(within(common, box))] = mask
            _hide(masks, focus.rows, focus.before, box)
        return masks


def _hide(masks: torch.Tensor, rows: Sequence[int], hidden: Sequence[Box], box: Box) -> None:
    """Hide boxes in some of the masks of a box."""
    for each in hidden:
        common = _common(each, box)
        if common is not None:
            for row in rows:
                masks[row][everywhere(within(common, box))] = 0


def _common(first: Box, second: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    sides = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first, second, strict=True)]
    return tuple(slice(*side) for side in sides) if all(start < stop for start, stop in sides) else None
