"""What one score's looks at an image have found, and which masks the next one needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from monai_saliency.masks.alone import BoundAloneMasks
from monai_saliency.masks.base import Id
from monai_saliency.masks.blocks import BoundBlockMasks
from monai_saliency.masks.evidence_boxes import EvidenceBoxes
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks

__all__ = ["Found", "LookMasks", "look"]

# Evidence is left where neither the boxes nor windows elsewhere took so much of what hiding the image takes.
_LEFT = 0.1
# Parts are shown alone where nothing stands out and all windows take less than this share of what the image adds.
_REDUNDANT = 0.1
# More places than this do not stand out where windows take so little: chance takes as much.
_TINY_FOCI = 2
# In a further look the strongest box stands out with this share of the evidence, or where a window takes this share of
# what is left of the score, whatever others take.
_MUCH, _MOST = 1 / 3, 0.5
# A place adds at least this share of what the image adds, where the other places are hidden.
_ADDS = 0.05
# The inner part of a box is hidden in its place where that takes less by at most this share of what the image adds.
_AS_MUCH = 0.1


@dataclass
class Found:
    """What one score's looks have found.

    Attributes:
        boxes: with evidence, the first found first.
        hides: what of each of them is hidden while another is looked at: the box, or its inner part, by its number.
        redundant: whether one gives what another gives, so that the others are hidden while one is perturbed.
        wanted: the masks that the next round needs; none where all looks are done.
        spent: how many masks the looks took that only some images need.
        left: which share of what the image adds to the score is there with all boxes hidden; None where that was not
            asked.
        fill: the score with the whole image hidden.
        adds: what the image adds to that.
    """

    boxes: list[int] = field(default_factory=list)
    hides: list[int] = field(default_factory=list)
    redundant: bool = False
    wanted: list[int] = field(default_factory=list)
    spent: int = 0
    left: float | None = None
    fill: float = 0.0
    adds: float = 0.0


class LookMasks:
    """The numbers of the masks of looks: windows, the image hidden, parts shown alone, nothing, blocks; with boxes
    hidden too.

    Args:
        windows: the windows of a look.
        alone: the whole image hidden, and parts that are shown alone.
        blocks: of windows, with which a further look begins.
        boxes: which may be hidden.
        num_masks: random masks inside of each box.
        max_foci: how many boxes may be found.

    Attributes:
        most: how many boxes may be hidden at once: ``max_foci``, or fewer, so that the numbers have 64 bits.
        families: the first number of windows, of what is shown alone, and of blocks, and their masks.
    """

    def __init__(
        self,
        windows: BoundHierarchicalMasks,
        alone: BoundAloneMasks,
        blocks: BoundBlockMasks,
        boxes: EvidenceBoxes,
        num_masks: int,
        max_foci: int,
    ) -> None:
        self.windows, self.alone, self.blocks, self.boxes, self.max_foci = windows, alone, blocks, boxes, max_foci
        #: the mask that hides the whole image, those that show a part alone, the mask that hides nothing, blocks
        self.whole = len(windows)
        self.parts = range(self.whole + 1, self.whole + len(alone))
        self.nothing = self.whole + len(alone)
        self.block = self.nothing + 1
        self.each = self.block + len(blocks)
        self.families = ((0, windows), (self.whole, alone), (self.block, blocks))
        self.most = _fitting(self.each, len(boxes), num_masks, max_foci)

    def __len__(self) -> int:
        return self.each * (len(self.boxes) + 1) ** self.most

    def index(self, own: int, hidden: Sequence[int]) -> int:
        """The number of a mask with some boxes hidden."""
        code = 0
        for number in reversed(hidden):
            code = code * (len(self.boxes) + 1) + number + 1
        return code * self.each + own

    def split(self, index: int) -> tuple[int, list[int]]:
        """The mask, and the boxes that are hidden with it."""
        code, own = divmod(index, self.each)
        hidden = []
        while code:
            code, number = divmod(code, len(self.boxes) + 1)
            hidden.append(number - 1)
        return own, hidden


def look(
    masks: LookMasks,
    ids: Sequence[Id],
    scores: torch.Tensor,
    reference_score: torch.Tensor,
    spare: int,
) -> Found:
    """Read what one score's looks have found.

    1. The windows of the first look hide parts of the image. Boxes are laid where what they took lies.
    2. All boxes are hidden together. Where the score stays though the windows found nothing more, the evidence is there
       more than once: of two lesions, either is enough. Then blocks of windows look again with these boxes hidden, then
       windows inside the blocks that take most, and the strongest box is laid. Of a box its inner part is hidden: a
       whole box may reach into the next place. When all are found, boxes are dropped that add nothing where the others
       are hidden, and it is asked which must be hidden whole, so that nothing of their evidence is left.
    3. Where the first look found nothing that stands out, and hiding any window takes next to nothing, parts of the
       image are shown alone.

    Args:
        masks: the numbers of masks.
        ids: the masks that were scored.
        scores: ``(n,)``.
        reference_score: of the unperturbed image.
        spare: how many masks may be taken that only some images need. There are further looks as long as they last.
    """
    scored = dict(zip(map(int, ids), scores.double().tolist(), strict=True))
    found, level = Found(fill=scored[masks.whole]), float(reference_score)
    adds = found.adds = level - found.fill
    for number in itertools.count():
        # With two more for the boxes and their inner parts, then three for each box that is found.
        if number and found.spent + masks.blocks.at_most + 2 + 3 * (len(found.boxes) + 1) > spare:
            break
        taken = _taken(masks, scored, level, found)
        if taken is None:
            return found
        evidence, largest = taken
        if number:
            evidence = masks.boxes.beyond(evidence, found.boxes)
            more = _strongest(masks, evidence, largest > _MOST * (level - found.fill) > 0)
        else:
            tiny = evidence.sum() < _REDUNDANT * adds
            more = masks.boxes.find(evidence, min(_TINY_FOCI, masks.max_foci) if tiny else masks.max_foci)
        before, found.boxes = found.hides, found.boxes + more
        found.hides = before + [masks.boxes.inner(each) for each in more]
        if not more or len(found.boxes) > masks.most:
            break
        whole = masks.index(masks.nothing, [*before, *more])
        if not _asked([whole], scored, found):
            return found
        found.spent += number > 0
        after, elsewhere = scored[whole], masks.boxes.outside(evidence, more)
        found.left = (after - found.fill) / adds if adds else None
        # Together the boxes take more than their windows did one by one.
        together = level - after - (float(evidence.sum()) - elsewhere)
        found.redundant = found.redundant or number > 0 or together > _LEFT * adds > 0
        if not after - found.fill - elsewhere > _LEFT * adds > 0 or len(found.boxes) >= masks.most:
            break
        inner = masks.index(masks.nothing, found.hides)
        if not _asked([inner], scored, found):
            return found
        found.spent += 1
        level = scored[inner]
    if not found.boxes and evidence.sum() < _REDUNDANT * adds:
        _look_alone(masks, scored, found)
    elif found.redundant and 1 < len(found.boxes) <= masks.most and _drop_empty(masks, scored, found):
        _hide_whole(masks, scored, found)
    return found


def _taken(masks: LookMasks, scored: dict[int, float], level: float, found: Found) -> tuple[np.ndarray, float] | None:
    """What windows of a look took: for each window of the last level, and the most that one took; None where some are
    wanted.
    """
    base = masks.index(0, found.hides)
    inner = [index - base for index in scored if base <= index < base + len(masks.windows)]
    own = level - torch.tensor([scored[base + index] for index in inner], dtype=torch.float64)
    if not found.boxes:
        return masks.windows.spread(inner, own).clip(min=0), float(own.max())
    # A further look: one of the first level's blocks, then windows inside of it.
    blocks = [base + masks.block + block for block in range(len(masks.blocks))]
    if not _asked(blocks, scored, found):
        return None
    taken = level - torch.tensor([scored[index] for index in blocks], dtype=torch.float64)
    finer = masks.blocks.finer(taken, inner, own)
    if not _asked([base + index for index in finer], scored, found):
        return None
    found.spent += len(blocks) + len(inner)
    return masks.blocks.spread(taken, inner, own).clip(min=0), float(torch.cat([taken, own]).max())


def _strongest(masks: LookMasks, evidence: np.ndarray, takes_most: bool) -> list[int]:
    """The box that stands out in a further look: it holds much evidence, or one window takes most of the score."""
    total = float(evidence.sum())
    if not total or not masks.boxes.further:
        return []
    number, held = masks.boxes.strongest(evidence)
    return [number] if takes_most or held >= _MUCH * total else []


def _asked(wanted: Sequence[int], scored: dict[int, float], found: Found) -> bool:
    """Whether masks are scored. Those that are not are wanted."""
    found.wanted = [index for index in wanted if index not in scored]
    return not found.wanted


def _drop_empty(masks: LookMasks, scored: dict[int, float], found: Found) -> bool:
    """Drop boxes that add nothing where the others are hidden, the last found first; whether all of that is scored."""
    boxes, hides = list(found.boxes), list(found.hides)
    for own in reversed(range(len(boxes))):
        others = [*boxes[:own], *boxes[own + 1 :]]
        checks = [masks.index(masks.nothing, hidden) for hidden in (boxes, others)]
        if not others:
            break
        if not _asked(checks, scored, found):
            return False
        found.spent += 1
        without, alone = (scored[check] for check in checks)
        if alone - without < _ADDS * found.adds:
            del boxes[own], hides[own]
    found.boxes, found.hides = boxes, hides
    return len(boxes) > 1


def _hide_whole(masks: LookMasks, scored: dict[int, float], found: Found) -> None:
    """Hide boxes whole whose inner part takes less, while the others are hidden."""
    boxes = found.boxes
    inner = [[masks.boxes.inner(each) if each == own else each for each in boxes] for own in boxes]
    checks = [masks.index(masks.nothing, hidden) for hidden in (boxes, *inner)]
    if _asked(checks, scored, found):
        found.spent += len(checks)
        whole, *each = (scored[check] for check in checks)
        found.hides = [
            box if score - whole > _AS_MUCH * found.adds else masks.boxes.inner(box)
            for box, score in zip(boxes, each, strict=True)
        ]


def _look_alone(masks: LookMasks, scored: dict[int, float], found: Found) -> None:
    """Put the places that are each enough alone into what was found."""
    if not _asked(list(masks.parts), scored, found):
        return
    found.spent += len(masks.parts)
    gains = [(scored[part] - found.fill) / found.adds for part in masks.parts]
    places = masks.alone.enough(np.array(gains))
    if len(places) <= masks.most:
        found.boxes = list(dict.fromkeys(masks.boxes.about(place, masks.boxes.further) for place in places))
        found.hides = list(found.boxes)
        found.redundant = len(found.boxes) > 1


def _fitting(each: int, boxes: int, inside: int, most: int) -> int:
    """How many boxes can be hidden at once, so that numbers of masks have 64 bits; at least 1.

    Args:
        each: masks without a box hidden.
        boxes: how many boxes there are.
        inside: masks inside of each box.
        most: at the most.
    """
    while most > 1 and (each + most * inside) * (boxes + 1) ** most > 2**62:
        most -= 1
    return most
