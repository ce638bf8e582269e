"""The contract of estimators: a map from what a search has observed, masks and their scores ``(n, K)``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, Observed
from monai_saliency.utils.arguments import written
from monai_saliency.utils.precision import accumulation_dtype

# Voxels of maps whose standard errors are made at once: each takes a few sums in double precision.
_AT_ONCE = 2**23


class Meaning(NamedTuple):
    """The meaning of an estimator's values, for the legend of a picture."""

    words: str = "change of the score"
    largest: float = 1.0
    in_score_unit: bool = True
    signed: bool = True


class Estimator(ABC):
    """The settings of an estimator. A subclass implements :meth:`compute`.

    Where each channel has its own masks, each channel gets its own map, made from the channel's masks alone. Maps are
    ordered by explained value, then by channel: all channels of the first value, all channels of the second, ...
    """

    __repr__ = written

    def check(self, masks: BoundMasks) -> None:
        """Refuse masks that this estimator cannot read, by a ValueError, before the network runs: none by default."""
        return

    @abstractmethod
    def compute(self, observed: Observed) -> Tensor:
        """Make the map from the scores that a search has observed.

        Args:
            observed: the masks that were asked for, with their scores ``(n, K)``.

        Returns:
            the map ``(K, *spatial)``, or ``(K * C, *spatial)`` if each channel has its own masks, in the masks'
            precision and on their device, not normalised. Positive values mean that the image supports the score.
        """

    def meaning(self, masks: BoundMasks) -> Meaning:
        """The meaning of the map's values: by default the change of the score, in its unit, within its range."""
        return Meaning()

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """How large a value of the map can be by chance, ``(K,)`` in the map's unit: the standard error that sampling
        leaves, and the rounding of the scores. Values that are not several times larger mean nothing. ``rounding`` is
        how far a score may be off by the network's own precision, relative to the largest score: 2^-20 for float32,
        2^-11 for float16, 2^-8 for bfloat16. None, the default, if it is not known.
        """
        return None

    def standard_error(self, observed: Observed) -> Tensor | None:
        """How far each voxel of the map may be from the value that endless masks would give: its standard deviation
        over seeds, each with as many random masks. In 95 of 100 cases the value plus and minus 1.96 times this holds
        the value of endless masks, if the estimator has no bias.

        Returns:
            of the shape and unit of the map, and 0 if all scores are equal. None, the default, for windows or regions
            that are hidden in turn, and for fewer than three random masks.
        """
        return None


def score_rounding(observed: Observed, rounding: float = 0.0) -> Tensor:
    """How far scores of one image may differ by rounding alone, ``(K,)``: eight units in the last place of the largest
    score, one millionth of it in float32.
    """
    largest = torch.cat([observed.reference_scores[None], observed.scores]).abs().amax(dim=0)
    return max(8 * torch.finfo(largest.dtype).eps, rounding) * largest


def with_ones(weights: Tensor) -> Tensor:
    """Weights ``(n, K)`` with a further column of ones, ``(n, K + 1)``; its weighted sum is the sum of the masks."""
    return torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)


def split_coverage(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Split sums ``(K + 1, ...)`` weighted by :func:`with_ones` into the K weighted sums and the sum of the masks."""
    return sums[:-1], sums[-1]


def in_groups(masks: BoundMasks, function: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """``function`` of as many columns of scores ``(n, K)`` at a time as memory is spent on, at least one."""
    size = (masks.channels or 1) * math.prod(masks.spatial_shape)
    return torch.cat([function(columns) for columns in scores.split(max(1, _AT_ONCE // size), dim=1)])


def scaled(deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Columns ``(n, K)`` divided by their largest absolute value ``(K,)``, and this: their squares neither vanish nor
    overflow in float32. A column of zeros stays.
    """
    largest = deviations.abs().amax(dim=0)
    return deviations / torch.where(largest > 0, largest, 1.0), largest


def centred(scores: Tensor) -> Tensor:
    """Scores less their mean, in double precision. Equal scores give zeros exactly, however large they are."""
    shifted = scores.to(accumulation_dtype(scores.device))
    shifted = shifted - shifted[:1]
    return shifted - shifted.mean(dim=0)


def ratio_error(masks: BoundMasks, ids: Ids, values: Tensor, origin: float, above_mean: bool) -> Tensor:
    """The standard errors of ratios ``S = sum(d * w) / sum(w)`` of n masks with ``w = M - origin`` and values ``d``,
    ``(n, K)``; with ``above_mean`` of ``S - mean d``. 0 where no mask has a weight.

    With ``m = mean w`` that is the root mean square of ``(d - S) * w / m``, or of ``(d - S) * w / m - d``, over masks,
    divided by ``sqrt(n - 1)``.
    """
    n = len(ids)

    def error(values: Tensor) -> Tensor:
        d, scale = scaled(centred(values))
        k = d.shape[1]
        weights = with_ones(torch.cat([d.square(), d], dim=1))
        first, second = masks.moments(ids, weights, weights, origin)
        square, linear, weight = first.split([k, k, 1])
        own_square, own_linear, own = second.split([k, k, 1])
        value = torch.where(weight != 0, linear / weight, 0.0)
        sums = (own_square - 2 * value * own_linear + value.square() * own).clamp_min(0) * (n / weight).square()
        shape = (-1, *[1] * (sums.ndim - 1))
        if above_mean:
            sums = sums - 2 * (square - value * linear) * (n / weight) + d.square().sum(dim=0).to(sums).reshape(shape)
        found = (sums.clamp_min(0) / (n * (n - 1))).sqrt() * scale.to(sums).reshape(shape)
        return torch.where(weight != 0, found, 0.0).flatten(0, 1).to(masks.dtype)

    return in_groups(masks, error, values)
