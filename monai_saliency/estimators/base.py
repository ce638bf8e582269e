"""The contract of estimators: a map from the scores of N masks, an array ``(N, K)``.

An estimator is a pure function of scores and masks. :class:`ScoreState` collects the scores of a run. It stores no
image, no full-size mask and no partial sum, so its memory does not depend on the image. Scores of different ranges of
masks can be merged in any order and give the same state, and so the same map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from monai_saliency.masks.base import BoundMasks

__all__ = ["Estimator", "ScoreState"]


class ScoreState:
    """The scores of one case, as far as they are known.

    Args:
        estimator: makes the map from the scores.
        masks: the masks of the case, N of them.
        reference_scores: ``(K,)``, the scores of the unperturbed image.

    Attributes:
        scores: ``(N, K)``, one row per mask, in the precision of ``reference_scores``; 0 where a score is not known.
        seen: bool ``(N,)``, the masks whose scores are known.

    Example::

        >>> import torch
        >>> from monai_saliency import OcclusionScoring, SlidingWindowMasks
        >>> masks = SlidingWindowMasks((1, 2), (1, 2)).bind(torch.zeros(1, 1, 6))
        >>> state = OcclusionScoring().start(masks, torch.tensor([5.0]))
        >>> state.update(range(3), torch.tensor([[5.0], [1.0], [4.0]]))
        >>> state.compute().tolist()  # hiding the second window takes 4 of the score, the third 1
        [[[0.0, 0.0, 4.0, 4.0, 1.0, 1.0]]]
    """

    def __init__(self, estimator: Estimator, masks: BoundMasks, reference_scores: torch.Tensor) -> None:
        self.estimator = estimator
        self.masks = masks
        self.reference_scores = reference_scores
        self.scores = reference_scores.new_zeros(len(masks), len(reference_scores))
        self.seen = torch.zeros(len(masks), dtype=torch.bool)

    def update(self, indices: Sequence[int], scores: torch.Tensor) -> None:
        """Add the scores of some masks.

        Args:
            indices: the masks' indices, n of them, in any order.
            scores: ``(n, K)``.

        Raises:
            ValueError: when ``scores`` has another shape.
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
        """Add the scores of another state of the same case.

        Raises:
            ValueError: when the other state has other masks or another number of explained values.
        """
        if other.scores.shape != self.scores.shape or other.masks.key != self.masks.key:
            raise ValueError(
                f"only states of one case merge: {tuple(self.scores.shape)} scores of {self.masks.key} met "
                f"{tuple(other.scores.shape)} of {other.masks.key}"
            )
        rows = other.seen.nonzero().flatten().tolist()
        self.update(rows, other.scores[rows])

    def compute(self) -> torch.Tensor:
        """Make the map from the scores known so far.

        Returns:
            the map, as :meth:`Estimator.compute` returns it.

        Raises:
            ValueError: when no score is known.
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
    """The settings of an estimator. A subclass implements :meth:`compute`.

    Where each channel has its own masks, each channel gets its own map, made from the channel's masks alone. Maps are
    ordered by explained value, then by channel: all channels of the first value, all channels of the second, ...
    """

    def start(self, masks: BoundMasks, reference_scores: torch.Tensor) -> ScoreState:
        """An empty state for one case, from its masks and the scores ``(K,)`` of its unperturbed image."""
        return ScoreState(self, masks, reference_scores)

    @abstractmethod
    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        """Make the map from scores.

        Args:
            masks: the masks of the case.
            indices: the indices of the n masks that were scored.
            scores: ``(n, K)``, one row per scored mask.
            reference_scores: ``(K,)``, the scores of the unperturbed image.

        Returns:
            the map ``(K, *spatial)``, or ``(K * C, *spatial)`` where each channel has its own masks, in the masks'
            precision and on their device. It is in the score's unit and not normalised. Positive values mean that the
            image supports the score there.
        """


def with_ones(weights: torch.Tensor) -> torch.Tensor:
    """Weights ``(n, K)`` with a further column of ones, ``(n, K + 1)``; its weighted sum is the sum of the masks."""
    return torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)


def split_coverage(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split sums ``(K + 1, ...)`` weighted by :func:`with_ones` into the K weighted sums and the sum of the masks."""
    return sums[:-1], sums[-1]
