"""Occlusion: the average drop of the score while a voxel is hidden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.estimators.base import Estimator, score_rounding, split_coverage, with_ones
from monai_saliency.estimators.moments import in_groups, moments, scaled
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.boxes import Box, voxels_of
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic
from monai_saliency.utils.tensors import to_device

__all__ = ["OcclusionScoring", "error_while_hidden", "mean_while_hidden", "sum_of_hidden"]

# Boxes of so few voxels are added together: beyond, one addition a box is faster. So many voxels at once, and no more
# than the image has.
_SMALL, _AT_ONCE = 512, 2**20


class OcclusionScoring(Estimator):
    """The average drop of the score while a voxel is hidden (Zeiler and Fergus, ECCV 2014, section 4.2).

    With f the score, f0 the score of the unperturbed image and M the mask, the map is, voxel by voxel,
    ``sum((f0 - f) * (1 - M)) / sum(1 - M)``, and 0 where no mask hides the voxel. It is in the score's unit. A constant
    network gives a map of zeros. xaitk-saliency's ``OcclusionScoring`` is this map, scaled to [-1, 1].

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, OcclusionScoring, PerturbationInferer, SlidingWindowMasks
        >>> explain = PerturbationInferer(SlidingWindowMasks(1), ClassScore([0], "none"), OcclusionScoring())
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> explain(image, lambda x: x.flatten(1).sum(1, keepdim=True)).tolist()  # the score is the sum of the image
        [[[[1.0, 2.0], [3.0, 4.0]]]]
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        return mean_while_hidden(masks, ids, reference_scores - scores)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The rounding of the scores, where windows or regions are hidden in turn and nothing is left to chance.

        None for masks drawn at random, those with a ``num_masks``.
        """
        return None if masks.drawn else score_rounding(scores, reference_scores, rounding)

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """The standard error of each voxel where masks are drawn at random; None where windows or regions are hidden in
        turn, which leaves nothing to chance, and for fewer than three masks.

        A value S is a ratio of two means over masks, that of ``(f0 - f) * (1 - M)`` and that of ``1 - M``. Its standard
        error is the root mean square of ``(f0 - f - S) * (1 - M)`` over masks, divided by ``sqrt(n - 1)`` and by the
        mean of ``1 - M``. Voxels that no mask hides have 0, as in the map.
        """
        drops = reference_scores.to(accumulation_dtype(scores.device)) - scores
        return error_while_hidden(masks, ids, drops)


def mean_while_hidden(masks: BoundMasks, ids: Sequence[Id], values: torch.Tensor) -> torch.Tensor:
    """The average of some values of masks while a voxel is hidden: ``sum_i y_i (1 - M_i) / sum_i (1 - M_i)``, and 0
    where no mask hides the voxel.

    Args:
        masks: the masks of the case.
        ids: the ids of n masks.
        values: ``(n, K)``, the values y.

    Returns:
        ``(K, *spatial)``, or ``(K * C, *spatial)`` where each channel has its own masks, in the masks' precision.
    """
    total, coverage = split_coverage(sum_of_hidden(masks, ids, with_ones(values)))
    return torch.where(coverage > 0, total / coverage, 0.0).flatten(0, 1).to(masks.dtype)


def error_while_hidden(masks: BoundMasks, ids: Sequence[Id], values: torch.Tensor) -> torch.Tensor | None:
    """The standard error of :func:`mean_while_hidden`, see :meth:`OcclusionScoring.standard_error`.

    Args:
        masks: the masks of the case.
        ids: the ids of n masks.
        values: ``(n, K)``, the values y, best in double precision.

    Returns:
        of the shape and precision of the mean; None where nothing is left to chance, and for fewer than three masks.
    """
    n = len(ids)
    if not masks.drawn or n < 3:
        return None

    def error(drops: torch.Tensor) -> torch.Tensor:
        drops = drops - drops[:1]
        d, scale = scaled(drops - drops.mean(dim=0))
        k = d.shape[1]
        # M - 1 is what is hidden, below zero.
        first, second = moments(masks, ids, with_ones(-d), with_ones(torch.cat([d.square(), d], 1)), 1.0)
        drop, coverage = first[:k], -first[k:]
        squares, mixed, hidden = second.split([k, k, 1])
        value = torch.where(coverage > 0, drop / coverage, 0.0)
        sums = (squares - 2 * value * mixed + value.square() * hidden).clamp_min_(0)
        found = (sums * (n / (n - 1))).sqrt_() * scale.to(sums).reshape(-1, *[1] * (sums.ndim - 1))
        return torch.where(coverage > 0, found / coverage, 0.0).flatten(0, 1).to(masks.dtype)

    return in_groups(masks, error, values)


def sum_of_hidden(masks: BoundMasks, ids: Sequence[Id], weights: torch.Tensor) -> torch.Tensor:
    """``sum_i weights[i, k] * (1 - M_i)`` as ``(K, channels or 1, *spatial)``.

    Masks that each hide one box, or change nothing outside of one, are added inside that box only; others are rendered
    a few at a time. The sum is not computed as ``sum_i weights[i, k] - sum_i weights[i, k] * M_i``: rounding would
    leave small values where no mask hides the voxel.
    """
    sums = masks.zero_sums(weights)
    weights = weights.to(masks.device, masks.dtype)
    boxes = masks.hidden_boxes(ids)
    if boxes is not None:
        return _sum_of_boxes(sums, boxes, weights.to(sums))
    changed = masks.changed_boxes(ids)
    if changed is not None:
        weights = weights.to(sums).reshape(*weights.shape, *[1] * (sums.ndim - 1))
        for index, box, each in zip(ids, changed, weights, strict=True):
            inside: Any = (..., *box)
            sums[inside] += each * (1 - masks.render([index], box=box)[0])
        return sums
    with exact_arithmetic(masks.device):
        for chunk, rendered in masks.stream(ids):
            hidden = rendered.flatten(1).neg_().add_(1)
            sums += (weights[chunk].T @ hidden).reshape(sums.shape)
    return sums


def _sum_of_boxes(sums: torch.Tensor, boxes: Sequence[Box], weights: torch.Tensor) -> torch.Tensor:
    """Add the weights ``(n, K)`` of n boxes to sums ``(K, channels or 1, *spatial)``, inside each box, in order."""
    shape = sums.shape[2:]
    step = max(1, min(_AT_ONCE, math.prod(shape)) // _SMALL)
    for first in range(0, len(boxes), step):
        some, given = boxes[first : first + step], weights[first : first + step]
        found = voxels_of(some, shape, _SMALL)
        if found is None:
            for box, each in zip(some, given.reshape(*given.shape, *[1] * (sums.ndim - 1)), strict=True):
                everywhere: Any = (..., *box)
                sums[everywhere] += each
            continue
        # One operation adds many small boxes, in order, so that sums repeat to the bit.
        places, once = (to_device(each, sums.device) for each in found)
        values = (given.T[:, :, None] * once).flatten(1)
        rows = torch.arange(sums.shape[0] * sums.shape[1], device=sums.device)
        flat = sums.view(len(rows), -1)
        flat.index_put_((rows[:, None], places.flatten()), values.repeat_interleave(sums.shape[1], 0), accumulate=True)
    return sums
