"""Weighted sums of masks and of their squares, of which standard errors are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic

__all__ = ["centred", "in_groups", "moments", "scaled"]

# Voxels of maps whose standard errors are made at once: each takes a few sums in double precision.
_AT_ONCE = 2**23


def moments(
    masks: BoundMasks, ids: Sequence[Id], first: torch.Tensor, second: torch.Tensor, origin: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of ``M - origin``, and of its square, each mask M multiplied by its weights; masks are rendered once."""
    sums = masks.zero_sums(first), masks.zero_sums(second)
    weights = [each.to(masks.device, masks.dtype) for each in (first, second)]
    with exact_arithmetic(masks.device):
        for chunk, rendered in masks.stream(ids):
            power = rendered.flatten(1).sub_(origin)
            sums[0].add_((weights[0][chunk].T @ power).reshape(sums[0].shape))
            power.square_()
            sums[1].add_((weights[1][chunk].T @ power).reshape(sums[1].shape))
    return sums


def in_groups(
    masks: BoundMasks, function: Callable[[torch.Tensor], torch.Tensor], scores: torch.Tensor
) -> torch.Tensor:
    """``function`` of as many columns of scores ``(n, K)`` at a time as memory is spent on, at least one."""
    size = (masks.channels or 1) * math.prod(masks.spatial_shape)
    return torch.cat([function(columns) for columns in scores.split(max(1, _AT_ONCE // size), dim=1)])


def scaled(deviations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns ``(n, K)`` divided by their largest absolute value ``(K,)``, and this: their squares neither vanish nor
    overflow in float32. A column of zeros stays.
    """
    largest = deviations.abs().amax(dim=0)
    return deviations / torch.where(largest > 0, largest, 1.0), largest


def centred(scores: torch.Tensor) -> torch.Tensor:
    """Scores less their mean, in double precision. Equal scores give zeros exactly, however large they are."""
    shifted = scores.to(accumulation_dtype(scores.device))
    shifted = shifted - shifted[:1]
    return shifted - shifted.mean(dim=0)
