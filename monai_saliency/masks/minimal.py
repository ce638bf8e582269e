"""Sets of windows: the smallest one that keeps the score is searched in rounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Id, Ids, Masks, Observed, Search, Spacing
from monai_saliency.masks.hierarchical import HierarchicalMasks
from monai_saliency.masks.sizes import overlap
from monai_saliency.utils.arguments import fraction
from monai_saliency.utils.tensors import Box, within

# Sets between two sizes that are scored in one round: more need fewer rounds, and more forwards.
_CUTS = 3
# The first number in the id of a set of windows; the id of a single window begins with its level.
_SET = -1


class MinimalMasks(Masks):
    """Windows of ``HierarchicalMasks``, then the search for the smallest set of them that keeps
    the score. 2D and 3D. Compare 3D-ReX (arXiv 2502.12181).

    1. Windows are hidden one by one, and halved where the score falls most.
    2. The windows that were not halved cover the image without overlap. They are ranked by how far the score fell when
       each was hidden, per voxel.
    3. The m first of this order are kept, all else is hidden, for three m a round, until m first windows keep ``share``
       of the score's rise and m - 1 do not. Then these m windows alone are hidden.

    A set keeps the score when ``f(set) - f(fill) >= share * (f(image) - f(fill))``, where f(fill) is the score with
    everything hidden. Each explained score has its own set, empty if the image's score is not above the fill's. It is
    the smallest set of its order, not of all sets of windows.

    Args:
        share: of the score's rise that is kept, in (0, 1].
        windows: which windows are hidden one by one; ``HierarchicalMasks()`` by default.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for ``HierarchicalMasks``.

    Example::

        >>> import torch
        >>> bound = MinimalMasks(windows=HierarchicalMasks(window_size=4, levels=2)).bind(torch.zeros(1, 8, 8))
        >>> len(bound.first_round())  # every window
        4
    """

    def __init__(self, share: float = 0.9, windows: HierarchicalMasks | None = None) -> None:
        self.share = fraction("share", share)
        self.windows = windows or HierarchicalMasks()

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return BoundMinimalMasks(self, image, spacing)


@dataclass(frozen=True)
class FoundRegion:
    """The smallest set of windows that keeps a score.

    Attributes:
        boxes: the windows, which do not overlap. Empty where the image's score is not above the fill's.
        voxels: how many voxels they have.
        score, fill_score: of the image, and with everything hidden.
        kept_score, hidden_score: with only the region kept, or hidden.
    """

    boxes: list[Box]
    voxels: int
    score: float
    fill_score: float
    kept_score: float
    hidden_score: float

    @property
    def kept_share(self) -> float:
        """How much of the score's rise over the fill's the region keeps; 0 where it is empty."""
        return (self.kept_score - self.fill_score) / (self.score - self.fill_score) if self.boxes else 0.0


class BoundMinimalMasks(BoundMasks):
    """The windows of one image, and sets of them. The id of a set is -1 and, for each window that is kept, its first
    voxels and the voxels behind its last; all else is hidden.
    """

    def __init__(self, masks: MinimalMasks, image: Tensor, spacing: Spacing) -> None:
        super().__init__(image)
        self.share = masks.share
        self.windows = masks.windows.bind(image, None, spacing)
        self.key = ("MinimalMasks", self.share, *self.windows.key)

    @property
    def at_most(self) -> int:
        """The windows, three sets for each quartering of their number, and what is left at the ends of the search."""
        return self.windows.at_most + 3 * math.ceil(math.log(self.windows.at_most + 1, 4)) + 3

    def first_round(self) -> Ids:
        return self.windows.first_round()

    def search(self, reference_scores: Tensor) -> Search:
        observed = Observed(self, reference_scores)
        yield from self.windows.refine(observed)
        boxes = self._ordered(observed)
        empty, image = _id_of(boxes[:0]), float(reference_scores)
        fewest, most = 0, len(boxes)  # windows that are too few, and enough
        sizes = [0, *_between(fewest, most)]
        while sizes:
            yield from observed.ask([_id_of(boxes[:size]) for size in sizes])
            scores, rounding = observed.by_id, _rounding(observed)
            fill = scores[empty]
            if image - fill <= rounding:
                return _ended(observed, FoundRegion([], 0, image, fill, fill, image))
            wanted = fill + self.share * (image - fill) - rounding
            enough = [size for size in sizes if scores[_id_of(boxes[:size])] >= wanted]
            most = min(enough, default=most)
            fewest = max(size for size in (fewest, *sizes) if size < most)
            sizes = _between(fewest, most)
        chosen, rest = boxes[:most], _id_of(boxes[most:])
        yield from observed.ask([rest])
        scores = observed.by_id
        voxels = int((chosen[:, 1] - chosen[:, 0]).prod(axis=1).sum())
        kept = image if most == len(boxes) else scores[_id_of(chosen)]
        return _ended(observed, FoundRegion(_boxes_of(chosen), voxels, image, scores[empty], kept, scores[rest]))

    def _ordered(self, observed: Observed) -> np.ndarray:
        """The windows that were not halved, boxes ``(n, 2, axes)``, ordered by the drops per voxel."""
        codes, level_of = self.windows.codes(observed.ids), np.array([window[0] for window in observed.ids])
        first, stop = codes["first"], codes["stop"]
        drops = float(observed.reference_scores) - observed.scores[:, 0].double().cpu().numpy()
        drops[np.abs(drops) <= _rounding(observed)] = 0.0
        falls = drops / (stop - first).prod(axis=1)
        sums, halved = drops.copy(), np.zeros(len(drops), dtype=bool)
        levels = [np.flatnonzero(level_of == level) for level in range(self.windows.num_levels)]
        for coarse, fine in itertools.pairwise(levels):
            inside = (first[coarse] <= first[fine, None]) & (stop[coarse] >= stop[fine, None])
            of, around = inside.all(axis=2).nonzero()
            sums[fine[of]] += sums[coarse[around]]
            halved[coarse[around]] = True
        # What falls equally is ordered by the drops of all windows around it, and then by its place.
        order = np.lexsort((-_rounded(sums[~halved]), -_rounded(falls[~halved])))
        return np.stack([first, stop], axis=1)[~halved][order]

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``id``, an array of objects: sets of windows are not of one size."""
        found = np.empty(len(ids), dtype=object)
        found[:] = ids
        return {"id": found}

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        if all(each[0] != _SET for each in ids):
            return self.windows.restrict(ids, box)
        hidden = np.stack([self.render([each], "cpu", box).numpy().ravel() == 0 for each in ids])
        return np.asarray(hidden.any(axis=1)), np.packbits(hidden, axis=1)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        sides = [side.stop - side.start for side in box]
        masks = torch.zeros(len(codes["id"]), 1, *sides, dtype=self.dtype, device=device)
        for mask, each in zip(masks, codes["id"].tolist(), strict=True):
            if each[0] != _SET:
                mask.copy_(self.windows.render([each], device, box)[0])
                continue
            for kept in _boxes_of(np.reshape(each[1:], (-1, 2, len(box)))):
                mask[0][within(overlap(kept, box), box)] = 1
        return masks


def _ended(observed: Observed, region: FoundRegion) -> Observed:
    observed.finding = region
    return observed.ended(f"the smallest set of windows was known: {len(region.boxes)}")


def _rounding(observed: Observed) -> float:
    """How far scores may differ by rounding alone."""
    largest = torch.cat([observed.reference_scores[None], observed.scores]).abs().max()
    return 8 * torch.finfo(largest.dtype).eps * float(largest)


def _id_of(boxes: np.ndarray) -> Id:
    """The id of a set of windows ``(n, 2, axes)``; their order does not matter."""
    rows = boxes.reshape(len(boxes), 2 * boxes.shape[2])
    return (_SET, *rows[np.lexsort(rows.T)].ravel().tolist())


def _boxes_of(boxes: np.ndarray) -> list[Box]:
    return [tuple(map(slice, *ends)) for ends in boxes.tolist()]


def _rounded(values: np.ndarray) -> np.ndarray:
    """Values as whole multiples of what they are known by, a part of the largest one."""
    return np.round(values / max(float(np.abs(values).max()) * 2**-16, 1e-300))


def _between(low: int, high: int) -> list[int]:
    """Up to three whole numbers between two, evenly spaced."""
    cuts = {low + (high - low) * part // (_CUTS + 1) for part in range(1, _CUTS + 1)}
    return sorted(cuts - {low, high}) or list(range(low + 1, high))[:1]
