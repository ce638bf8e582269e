"""RISE: the average score while a voxel is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, split_coverage, with_ones
from monai_saliency.masks.base import BoundMasks

__all__ = ["RISEScoring"]


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
            weighted, coverage = split_coverage(masks.weighted_sum(indices, with_ones(scores)))
            kept = coverage.mean(dim=tuple(range(1, coverage.ndim)), keepdim=True)
            # Masks that keep nothing have nothing to say of any voxel.
            weighted = torch.where(kept > 0, weighted / kept, weighted)
        return weighted.flatten(0, 1).to(masks.dtype)
