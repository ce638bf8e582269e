"""Occlusion: the mean drop of the score while a voxel is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.estimators.base import Estimator, split_coverage, with_ones
from monai_saliency.masks.base import BoundMasks
from monai_saliency.utils.precision import exact_arithmetic

__all__ = ["OcclusionScoring"]


class OcclusionScoring(Estimator):
    """The mean drop of the score while a voxel is hidden (Zeiler and Fergus, ECCV 2014; xaitk-saliency's
    ``OcclusionScoring``).

    With f the score, f0 that of the unperturbed image and M the mask: ``sum((f0 - f) * (1 - M)) / sum(1 - M)`` voxel
    by voxel, and 0 where no mask hides the voxel.
    """

    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        drop, coverage = split_coverage(_sum_of_hidden(masks, indices, with_ones(reference_scores - scores)))
        return torch.where(coverage > 0, drop / coverage, 0.0).flatten(0, 1).to(masks.dtype)


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
