"""How scores and masks become a map.

The scores of N masks, an array ``(N, K)`` with the masks' seed and settings, are all that a map needs. An estimator
is therefore a pure function of scores, and :class:`ScoreState`, what a run accumulates, stores nothing else: no
image, no full-size mask and no partial sum. Ranges of masks merge in any order to the same state, and so to the same
map, and the memory of a state does not depend on the image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.masks import BoundMasks
from monai_saliency.utils import exact_arithmetic

__all__ = ["Estimator", "OcclusionScoring", "RISEScoring", "ScoreState"]


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


class RISEScoring(Estimator):
    """The average score while a voxel is kept (RISE: Petsiuk et al., BMVC 2018, equation 6).

    With f the score and M the mask over n masks: ``sum(f * M) / (n * E[M])``, where E[M] is the masks' mean value.
    A map of this plain form is read relative to its own mean. With ``p1`` it is debiased (Hatakeyama et al., ACCV
    2020): ``sum(f * (M - p1)) / (n * p1)``, how much keeping a voxel raises the score above the average perturbed
    score, centred at zero; of a voxel in no region, which no mask hides, it says 0. Both are xaitk-saliency's
    ``RISEScoring`` up to a constant factor, which it replaces by scaling every map to [-1, 1].

    Args:
        p1: the masks' probability of keeping a cell, in [0, 1]; 0 for the plain form.
    """

    def __init__(self, p1: float = 0.0) -> None:
        if not 0 <= p1 <= 1:
            raise ValueError(f"`p1` must be in [0, 1], got {p1}")
        self.p1 = float(p1)

    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        if self.p1:
            weighted = masks.weighted_sum(indices, scores)
            total = scores.to(weighted).sum(dim=0)
            weighted -= self.p1 * total.reshape(-1, *[1] * (weighted.ndim - 1))
            weighted /= self.p1 * len(indices)
            if masks.regions is not None:
                # What lies in no region is kept by every mask, not by a share p1 of them: nothing is known of it.
                weighted[..., masks.regions.index == 0] = 0
        else:
            weighted, coverage = _with_coverage(masks.weighted_sum(indices, _and_ones(scores)))
            kept = coverage.mean(dim=tuple(range(1, coverage.ndim)), keepdim=True)
            # Masks that keep nothing have nothing to say of any voxel.
            weighted = torch.where(kept > 0, weighted / kept, weighted)
        return weighted.flatten(0, 1).to(masks.dtype)


class OcclusionScoring(Estimator):
    """The mean drop of the score while a voxel is hidden (Zeiler and Fergus, ECCV 2014; xaitk-saliency's
    ``OcclusionScoring``).

    With f the score, f0 that of the unperturbed image and M the mask: ``sum((f0 - f) * (1 - M)) / sum(1 - M)`` voxel
    by voxel, and 0 where no mask hides the voxel.
    """

    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        drop, coverage = _with_coverage(_sum_of_hidden(masks, indices, _and_ones(reference_scores - scores)))
        return torch.where(coverage > 0, drop / coverage, 0.0).flatten(0, 1).to(masks.dtype)


def _and_ones(weights: torch.Tensor) -> torch.Tensor:
    """Weights ``(n, K + 1)``, the last of which count the masks."""
    return torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)


def _with_coverage(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first K weights, and what the last one, made of the masks."""
    return sums[:-1], sums[-1]


def _sum_of_hidden(masks: BoundMasks, indices: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
    """``sum_i weights[i, k] * (1 - M_i)`` as ``(K, channels or 1, *spatial)``, masks streamed, and those that
    hide a small box in that box only.

    Not from the sum of the masks, of which what no mask hides would leave a rest.
    """
    sums = masks.zero_sums(weights)
    weights = weights.to(masks.device, masks.dtype)
    boxes = masks.hidden_boxes(indices)
    if boxes is not None:
        weights = weights.to(sums).reshape(*weights.shape, *[1] * (sums.ndim - 1))
        for box, each in zip(boxes, weights, strict=True):
            everywhere: Any = (..., *box)
            sums[everywhere] += each
        return sums
    with exact_arithmetic(masks.device):
        for chunk, rendered in masks.stream(indices):
            hidden = rendered.flatten(1).neg_().add_(1)
            sums += (weights[chunk].T @ hidden).reshape(sums.shape)
    return sums
