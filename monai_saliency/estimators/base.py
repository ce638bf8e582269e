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

__all__ = ["Estimator", "ScoreState"]


class ScoreState:
    """The scores seen so far of one case.

    Args:
        estimator: what makes the map.
        masks: the case's masks.
        reference_scores: ``(K,)`` scores of the unperturbed image.
    """

    def __init__(self, estimator: Estimator, masks: BoundMasks, reference_scores: torch.Tensor) -> None:
        self.estimator = estimator
        self.masks = masks
        self.reference_scores = reference_scores
        self.scores = reference_scores.new_zeros(len(masks), len(reference_scores))
        self.seen = torch.zeros(len(masks), dtype=torch.bool)

    def update(self, indices: Sequence[int], scores: torch.Tensor) -> None:
        """Take the scores ``(n, K)`` of masks ``indices``.

        Raises:
            ValueError: when the shape of ``scores`` does not fit.
        """
        expected = (len(indices), self.scores.shape[1])
        if tuple(scores.shape) != expected:
            raise ValueError(
                f"`scores` must have shape {expected} (masks, explained values), got {tuple(scores.shape)}"
            )
        rows = slice(indices.start, indices.stop) if isinstance(indices, range) and indices.step == 1 else list(indices)
        self.scores[rows] = scores.to(self.scores)
        self.seen[rows] = True

    def merge(self, other: ScoreState) -> None:
        """Take over the scores of another state of the same case, from another range of masks.

        Raises:
            ValueError: when the other state is of other masks, or of another number of explained values.
        """
        if other.scores.shape != self.scores.shape or other.masks.key != self.masks.key:
            raise ValueError(
                f"only states of one case merge: {tuple(self.scores.shape)} scores of {self.masks.key} met "
                f"{tuple(other.scores.shape)} of {other.masks.key}"
            )
        rows = other.seen.nonzero().flatten().tolist()
        self.update(rows, other.scores[rows])

    def compute(self) -> torch.Tensor:
        """The map ``(K, *spatial)`` of the scores seen so far, or ``(K * C, *spatial)``: see :class:`Estimator`.

        Raises:
            ValueError: when no score has been seen.
        """
        if bool(self.seen.all()):
            indices: Sequence[int] = range(len(self.seen))
            scores = self.scores
        else:
            indices = self.seen.nonzero().flatten().tolist()
            scores = self.scores[indices]
        if not len(indices):
            raise ValueError("no map without scores: `update` the state first")
        return self.estimator.compute(self.masks, indices, scores, self.reference_scores)


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
