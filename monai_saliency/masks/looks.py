"""What one score's looks at an image have found, and which masks the next one needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from monai_saliency.masks.alone import BoundAloneMasks
from monai_saliency.masks.evidence_boxes import EvidenceBoxes
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks

__all__ = ["Found", "LookMasks", "look"]

# Evidence is left where neither the boxes nor windows elsewhere took so much of what hiding the image takes.
_LEFT = 0.15
# Parts are shown alone where nothing stands out and all windows take less than this share of what the image adds.
_REDUNDANT = 0.1
# More places than this do not stand out where windows take so little: chance takes as much.
_TINY_FOCI = 2


@dataclass
class Found:
    """What one score's looks have found.

    Attributes:
        boxes: with evidence, the first found first.
        redundant: whether one gives what another gives, so that the others are hidden while one is perturbed.
        wanted: the masks that the next round needs; none where all looks are done.
        spent: how many masks the looks took that only some images need.
        left: which share of what the image adds to the score is there with all boxes hidden; None where that was not
            asked.
    """

    boxes: list[int] = field(default_factory=list)
    redundant: bool = False
    wanted: list[int] = field(default_factory=list)
    spent: int = 0
    left: float | None = None


class LookMasks:
    """The numbers of the masks of looks: windows, the image hidden, parts shown alone, nothing; with boxes hidden too.

    Args:
        windows: the windows of a look.
        alone: the whole image hidden, and parts that are shown alone.
        boxes: which may be hidden.
        num_masks: random masks inside of each box.
        max_foci: how many boxes may be found.

    Attributes:
        most: how many boxes may be hidden at once: ``max_foci``, or fewer, so that the numbers have 64 bits.
    """

    def __init__(
        self,
        windows: BoundHierarchicalMasks,
        alone: BoundAloneMasks,
        boxes: EvidenceBoxes,
        num_masks: int,
        max_foci: int,
    ) -> None:
        self.windows, self.alone, self.boxes, self.max_foci = windows, alone, boxes, max_foci
        #: the mask that hides the whole image, those that show a part alone, the mask that hides nothing
        self.whole = len(windows)
        self.parts = range(self.whole + 1, self.whole + len(alone))
        self.nothing = self.whole + len(alone)
        self.each = self.nothing + 1
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
    masks: LookMasks, indices: Sequence[int], scores: torch.Tensor, reference_score: torch.Tensor, looks: int
) -> Found:
    """Read what one score's looks have found.

    1. The windows of the first look hide parts of the image. Boxes are laid where what they took lies.
    2. All boxes are hidden together. Where the score stays though the windows found nothing more, the evidence is there
       more than once: of two lesions, either is enough. Then the windows look again, with these boxes hidden.
    3. Where the first look found nothing that stands out, and hiding any window takes next to nothing, parts of the
       image are shown alone.

    Args:
        masks: the numbers of masks.
        indices: the masks that were scored.
        scores: ``(n,)``.
        reference_score: of the unperturbed image.
        looks: how many there may be.
    """
    rows = {int(index): row for row, index in enumerate(indices)}
    found, level = Found(), reference_score.double()
    fill = scores[rows[masks.whole]].double()
    adds = float(level - fill)
    for number in range(looks):
        base = masks.index(0, found.boxes)
        inner = [index - base for index in rows if base <= index < base + len(masks.windows)]
        own = scores[[rows[base + index] for index in inner]].double()
        if number:
            finer = masks.windows.next_round(inner, own[:, None], level[None])
            found.wanted = [base + index for index in finer or () if base + index not in rows]
            if found.wanted:
                return found
            found.spent += len(inner)
        evidence = masks.windows.spread(inner, level - own).clip(min=0)
        tiny = not number and evidence.sum() < _REDUNDANT * adds
        most = min(_TINY_FOCI, masks.max_foci) if tiny else masks.most if number else masks.max_foci
        more = masks.boxes.find(evidence, most - len(found.boxes))
        found.boxes += more
        if not more or len(found.boxes) > masks.most:
            break
        check = masks.index(masks.nothing, found.boxes)
        if check not in rows:
            found.wanted = [check]
            return found
        found.spent += number > 0
        after = scores[rows[check]].double()
        elsewhere = masks.boxes.outside(evidence, more)
        found.left = float(after - fill) / adds if adds else None
        # Together the boxes take more than their windows did one by one.
        together = float(level - after) - (float(evidence.sum()) - elsewhere)
        found.redundant = found.redundant or number > 0 or together > _LEFT * adds > 0
        level = after
        if not float(after - fill) - elsewhere > _LEFT * adds > 0 or len(found.boxes) >= masks.most:
            break
    if not found.boxes and evidence.sum() < _REDUNDANT * adds:
        _look_alone(masks, rows, scores, (fill, adds), found)
    return found


def _look_alone(
    masks: LookMasks, rows: dict[int, int], scores: torch.Tensor, fill: tuple[torch.Tensor, float], found: Found
) -> None:
    """Put the places that are each enough alone into what was found."""
    if not all(part in rows for part in masks.parts):
        found.wanted = list(masks.parts)
        return
    found.spent += len(masks.parts)
    gains = (scores[[rows[part] for part in masks.parts]].double() - fill[0]) / fill[1]
    places = masks.alone.enough(gains.cpu().numpy())
    if len(places) <= masks.most:
        size = len(masks.boxes.shapes) - 1
        found.boxes = list(dict.fromkeys(masks.boxes.about(place, size) for place in places))
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
