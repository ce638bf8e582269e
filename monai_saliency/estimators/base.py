"""How scores and masks become a map.

The scores of N masks, an array ``(N, K)`` with the masks' seed and settings, are all that a map needs. An estimator
is therefore a pure function of scores, and :class:`ScoreState`, what a run accumulates, stores nothing else: no
image, no full-size mask and no partial sum. Ranges of masks merge in any order to the same state, and so to the same
map, and the memory of a state does not depend on the image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from monai_saliency.masks.base import BoundMasks

__all__ = ["Estimator", "ScoreState", "first_round"]


class ScoreState:
    """The scores of one case so far.

    Masks come in rounds (:meth:`~monai_saliency.masks.BoundMasks.next_round`). Row i of the scores belongs to mask
    ``indices[i]``; with one round of all masks, row i is mask i.

    Args:
        estimator: makes the map.
        masks: the case's masks.
        reference_scores: ``(K,)`` scores of the unperturbed image.

    Attributes:
        indices: the masks of all rounds so far, in order, N of them.
        scores: ``(N, K)``, zero where a mask is not scored yet.
        seen: bool ``(N,)``, which masks are scored.
    """

    def __init__(self, estimator: Estimator, masks: BoundMasks, reference_scores: torch.Tensor) -> None:
        self.estimator = estimator
        self.masks = masks
        self.reference_scores = reference_scores
        self.indices = first_round(masks)
        self.scores = reference_scores.new_zeros(len(self.indices), len(reference_scores))
        self.seen = torch.zeros(len(self.indices), dtype=torch.bool)

    def next_round(self) -> bool:
        """Begin the next round; False where no round is left.

        Raises:
            ValueError: when the round before is not scored yet, or the masks ask for a mask again.
        """
        if not bool(self.seen.all()):
            raise ValueError("a round begins when all masks of the one before are scored")
        found = self.masks.next_round(self.indices, self.scores.cpu(), self.reference_scores.cpu())
        if found is None:
            return False
        _check_round(self.masks, found, self.indices)
        self.indices = [*self.indices, *found]
        self.scores = torch.cat([self.scores, self.scores.new_zeros(len(found), self.scores.shape[1])])
        self.seen = torch.cat([self.seen, torch.zeros(len(found), dtype=torch.bool)])
        return True

    def update(self, rows: Sequence[int], scores: torch.Tensor) -> None:
        """Take the scores ``(n, K)`` of ``rows``.

        Raises:
            ValueError: when the shape of ``scores`` does not fit.
        """
        expected = (len(rows), self.scores.shape[1])
        if tuple(scores.shape) != expected:
            raise ValueError(
                f"`scores` must have shape {expected} (masks, explained values), got {tuple(scores.shape)}"
            )
        places = slice(rows.start, rows.stop) if isinstance(rows, range) and rows.step == 1 else list(rows)
        self.scores[places] = scores.to(self.scores)
        self.seen[places] = True

    def merge(self, other: ScoreState) -> None:
        """Take the scores of another state of the same case, which has scored other masks.

        Raises:
            ValueError: when the other state has other masks, or another number of explained values.
        """
        if other.scores.shape != self.scores.shape or other.masks.key != self.masks.key:
            raise ValueError(
                f"only states of one case merge: {tuple(self.scores.shape)} scores of {self.masks.key} met "
                f"{tuple(other.scores.shape)} of {other.masks.key}"
            )
        rows = other.seen.nonzero().flatten().tolist()
        self.update(rows, other.scores[rows])

    def compute(self) -> torch.Tensor:
        """The map ``(K, *spatial)`` of the scores so far, or ``(K * C, *spatial)``: see :class:`Estimator`.

        Raises:
            ValueError: when no mask is scored.
        """
        indices, scores = self.indices, self.scores
        if not bool(self.seen.all()):
            rows = self.seen.nonzero().flatten().tolist()
            indices, scores = [indices[row] for row in rows], scores[rows]
        if not len(indices):
            raise ValueError("no map without scores: `update` the state first")
        return self.estimator.compute(self.masks, indices, scores, self.reference_scores)


def first_round(masks: BoundMasks) -> Sequence[int]:
    """The masks of the first round, which no score decides.

    Raises:
        ValueError: when there is none.
    """
    found = masks.next_round((), torch.zeros(0, 0), torch.zeros(0))
    _check_round(masks, found or (), ())
    return found or ()


def _check_round(masks: BoundMasks, found: Sequence[int], before: Sequence[int]) -> None:
    if not isinstance(found, range) and len({*found, *before}) < len(found) + len(before):
        raise ValueError(f"{type(masks).__name__} asks for a mask that is scored already")
    if not len(found):
        raise ValueError(f"{type(masks).__name__} asks for a round without masks: give None when there is no more")


class Estimator(ABC):
    """Settings of an estimator.

    Where each channel has masks of its own, it has a map of its own, which is what the estimator makes of the channel's
    masks. Maps of several explained values lie one after the other: all channels of the first, then of the second.
    """

    def start(self, masks: BoundMasks, reference_scores: torch.Tensor) -> ScoreState:
        """An empty state for one case, given its masks and the unperturbed image's scores ``(K,)``."""
        return ScoreState(self, masks, reference_scores)

    @abstractmethod
    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        """The map of a set of scores.

        Args:
            masks: the case's masks.
            indices: which masks were scored, n of them.
            scores: ``(n, K)``.
            reference_scores: ``(K,)``, of the unperturbed image.

        Returns:
            ``(K, *spatial)``, or ``(K * C, *spatial)`` where channels have masks of their own, in the masks' precision,
            on the masks' device. Its unit is the score's, and nothing is normalised to a range. Positive where the
            image supports the score.
        """


def with_ones(weights: torch.Tensor) -> torch.Tensor:
    """Weights ``(n, K + 1)``, the last of which count the masks."""
    return torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)


def split_coverage(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first K weights, and what the last one, made of the masks."""
    return sums[:-1], sums[-1]
