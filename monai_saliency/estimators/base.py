"""The contract of estimators: a map from the scores of N masks, an array ``(N, K)``.

:class:`ScoreState` collects the scores of a run. It stores no image and no full-size mask, so its memory does not
depend on the image. Scores come in any order and any division, and make the same map.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Id, Ids
from monai_saliency.utils.arguments import written
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic

__all__ = [
    "Estimator",
    "Meaning",
    "ScoreState",
    "centred",
    "in_groups",
    "moments",
    "of_each_score",
    "own_rows",
    "ratio_error",
    "scaled",
    "score_rounding",
    "split_coverage",
    "with_ones",
]

# Voxels of maps whose standard errors are made at once: each takes a few sums in double precision.
_AT_ONCE = 2**23


class Meaning(NamedTuple):
    """The meaning of an estimator's values, for the legend of a picture."""

    words: str = "change of the score"
    largest: float = 1.0
    in_score_unit: bool = True
    signed: bool = True


class ScoreState:
    """The scores of one case so far.

    Masks come in rounds (:meth:`~monai_saliency.masks.base.BoundMasks.next_round`). Row i of the scores belongs to mask
    ``ids[i]``. Where all masks are one round, row i belongs to mask i.

    Attributes:
        ids: the masks of all rounds so far, in order, N of them.
        scores: ``(N, K)``, one row per mask, in the precision of ``reference_scores``; 0 where a mask has no score yet.
        seen: bool ``(N,)``, the masks that have a score.
    """

    def __init__(self, estimator: Estimator, masks: BoundMasks, reference_scores: Tensor) -> None:
        self.estimator = estimator
        self.masks = masks
        self.reference_scores = reference_scores
        self.ids = masks.first_round()
        self.scores = reference_scores.new_zeros(len(self.ids), len(reference_scores))
        self.seen = torch.zeros(len(self.ids), dtype=torch.bool, device="cpu")

    def next_round(self) -> bool:
        """Begin the next round of masks once the current one is scored. False when no round is left."""
        if not bool(self.seen.all()):
            raise ValueError("a round begins when all masks of the one before are scored")
        found = self._wanted() if self.masks.in_rounds else []
        if not found:
            return False
        self.ids = [*self.ids, *found]
        self.scores = torch.cat([self.scores, self.scores.new_zeros(len(found), self.scores.shape[1])])
        self.seen = torch.cat([self.seen, torch.zeros(len(found), dtype=torch.bool, device="cpu")])
        return True

    def _wanted(self) -> list[Id]:
        """The masks that the scores request next, each by itself."""
        known, found = set(self.ids), dict[Id, None]()
        for score, reference in zip(self.scores.cpu().T, self.reference_scores.cpu(), strict=True):
            _, wanted = self.masks.replayed(self.ids, score[:, None], reference[None])
            found.update(dict.fromkeys(each for each in wanted if each not in known))
        return list(found)

    def stopped(self) -> str:
        """Why no round follows, in words, for the score that requested most masks."""
        if not len(self.reference_scores):
            return ""
        each = _own_scores(self.masks, self.ids, self.scores.cpu(), self.reference_scores.cpu())
        return self.masks.stopped(*max(each, key=lambda own: len(own[0])))

    def update(self, rows: Sequence[int], scores: Tensor) -> None:
        """Add scores ``(n, K)`` of n rows, in any order; a ValueError for another shape."""
        expected = (len(rows), self.scores.shape[1])
        if tuple(scores.shape) != expected:
            raise ValueError(
                f"`scores` must have shape {expected} (masks, explained values), got {tuple(scores.shape)}"
            )
        places = slice(rows.start, rows.stop) if isinstance(rows, range) and rows.step == 1 else list(rows)
        self.scores[places] = scores.to(self.scores)
        self.seen[places] = True

    def compute(self) -> Tensor:
        """The map from the scores so far; a ValueError if no mask has a score."""
        return of_each_score(self.estimator.compute, self.masks, *self._scored(), self.reference_scores)

    def noise(self, rounding: float = 0.0) -> Tensor | None:
        """How large a value of the map can be by chance, as :meth:`Estimator.noise` returns it."""
        noise = partial(self.estimator.noise, rounding=rounding)
        return of_each_score(noise, self.masks, *self._scored(), self.reference_scores)

    def standard_error(self) -> Tensor | None:
        """The standard error of the map, as :meth:`Estimator.standard_error` returns it."""
        return of_each_score(self.estimator.standard_error, self.masks, *self._scored(), self.reference_scores)

    def _scored(self) -> tuple[Sequence[int], Tensor]:
        """The masks that have scores, and these."""
        ids, scores = self.ids, self.scores
        if not bool(self.seen.all()):
            rows = self.seen.nonzero().flatten().tolist()
            ids, scores = [ids[row] for row in rows], scores[rows]
        if not len(ids):
            raise ValueError("no map without scores: `update` the state first")
        return ids, scores


def of_each_score(
    made: Callable[..., Any], masks: BoundMasks, ids: Ids, scores: Tensor, reference_scores: Tensor
) -> Any:
    """An estimator's result for some scores: each from the masks that it requested itself, if they come in rounds."""
    found = [made(masks, *own) for own in _own_scores(masks, ids, scores, reference_scores)]
    return None if found[0] is None else torch.cat(found)


def own_rows(masks: BoundMasks, ids: Ids, scores: Tensor, reference_scores: Tensor) -> list[list[int]]:
    """The rows of the masks that each explained score asks for itself, where masks come in rounds; else all rows."""
    everything = list(range(len(ids)))
    if not masks.in_rounds:
        return [everything] * len(reference_scores)
    each = zip(scores.cpu().split(1, dim=1), reference_scores.cpu().split(1), strict=True)
    # A part of the first round is not a round yet.
    return [masks.replayed(ids, score, reference)[0] or everything for score, reference in each]


def _own_scores(
    masks: BoundMasks, ids: Ids, scores: Tensor, reference_scores: Tensor
) -> list[tuple[Ids, Tensor, Tensor]]:
    """The masks and scores that each explained score asks for itself, where masks come in rounds; else all at once."""
    if not masks.in_rounds or not len(reference_scores):
        return [(ids, scores, reference_scores)]
    each = enumerate(own_rows(masks, ids, scores, reference_scores))
    return [([ids[row] for row in rows], scores[rows, k : k + 1], reference_scores[k : k + 1]) for k, rows in each]


class Estimator(ABC):
    """The settings of an estimator. A subclass implements :meth:`compute`.

    Where each channel has its own masks, each channel gets its own map, made from the channel's masks alone. Maps are
    ordered by explained value, then by channel: all channels of the first value, all channels of the second, ...
    """

    __repr__ = written

    def start(self, masks: BoundMasks, reference_scores: Tensor) -> ScoreState:
        """An empty state for one case, from its masks and the scores ``(K,)`` of its unperturbed image."""
        return ScoreState(self, masks, reference_scores)

    @abstractmethod
    def compute(self, masks: BoundMasks, ids: Ids, scores: Tensor, reference_scores: Tensor) -> Tensor:
        """Make the map from scores.

        Args:
            masks: the masks of the case.
            ids: the ids of the n masks that were scored.
            scores: ``(n, K)``, one row per scored mask.
            reference_scores: ``(K,)``, the scores of the unperturbed image.

        Returns:
            the map ``(K, *spatial)``, or ``(K * C, *spatial)`` if each channel has its own masks, in the masks'
            precision and on their device, not normalised. Positive values mean that the image supports the score.
        """

    def meaning(self, masks: BoundMasks) -> Meaning:
        """The meaning of the map's values: by default the change of the score, in its unit, within its range."""
        return Meaning()

    def noise(
        self, masks: BoundMasks, ids: Ids, scores: Tensor, reference_scores: Tensor, rounding: float = 0.0
    ) -> Tensor | None:
        """How large a value of the map can be by chance, ``(K,)`` in the map's unit: the standard error that sampling
        leaves, and the rounding of the scores. Values that are not several times larger mean nothing. ``rounding`` is
        how far a score may be off by the network's own precision, relative to the largest score: 2^-20 for float32,
        2^-11 for float16, 2^-8 for bfloat16. None, the default, if it is not known.
        """
        return None

    def standard_error(self, masks: BoundMasks, ids: Ids, scores: Tensor, reference_scores: Tensor) -> Tensor | None:
        """How far each voxel of the map may be from the value that endless masks would give: its standard deviation
        over seeds, each with as many random masks. In 95 of 100 cases the value plus and minus 1.96 times this holds
        the value of endless masks, if the estimator has no bias.

        Returns:
            of the shape and unit of the map, and 0 if all scores are equal. None, the default, for windows or regions
            that are hidden in turn, and for fewer than three random masks.
        """
        return None


def score_rounding(scores: Tensor, reference_scores: Tensor, rounding: float = 0.0) -> Tensor:
    """How far scores of one image may differ by rounding alone: eight units in the last place of the largest score, one
    millionth of it in float32.
    """
    largest = torch.cat([reference_scores[None], scores]).abs().amax(dim=0)
    return max(8 * torch.finfo(scores.dtype).eps, rounding) * largest


def with_ones(weights: Tensor) -> Tensor:
    """Weights ``(n, K)`` with a further column of ones, ``(n, K + 1)``; its weighted sum is the sum of the masks."""
    return torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)


def split_coverage(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Split sums ``(K + 1, ...)`` weighted by :func:`with_ones` into the K weighted sums and the sum of the masks."""
    return sums[:-1], sums[-1]


def moments(masks: BoundMasks, ids: Ids, first: Tensor, second: Tensor, origin: float) -> tuple[Tensor, Tensor]:
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
        first, second = moments(masks, ids, weights, weights, origin)
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
