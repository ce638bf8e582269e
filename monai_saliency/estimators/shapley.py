"""Shapley values: what each player adds to the score, on average over all orders in which they may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.estimators.shapley_regression import regression
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.coalition import BoundCoalitionMasks
from monai_saliency.masks.patch_cells import Meeting
from monai_saliency.utils.arguments import flag

__all__ = ["ShapleyScoring", "ShapleyValues", "shapley_values"]

#: how far values may miss their sum, relative to the largest drop of the score, before they are refused
_MISSED = {torch.float64: 1e-7}
_MISSED_OTHERWISE = 1e-3
# Rounding is carried through the sums by so many random signs.
_PROBES = 16


@dataclass(frozen=True)
class ShapleyValues:
    """What each player adds to the score.

    Attributes:
        players: n of them: labels of regions, 0 for the background; or ``(label, channel)``.
        values: ``(n, K)``, float64, in the score's unit. They sum to the score of the image less that of the image
            with all players hidden.
        standard_error: ``(n, K)``, what sampling leaves uncertain; None where the values are exact.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> organs = torch.tensor([[[1, 1, 2, 2]]])
        >>> explain = ms.shapley(target=ms.ClassScore([0], "none"))
        >>> case = ms.Case("a", labels=organs)
        >>> network = lambda images: images.flatten(1).sum(1, keepdim=True)
        >>> [explanation] = explain.explain(torch.ones(1, 1, 1, 4), network, cases=[case])
        >>> found = ms.shapley_values(explanation)
        >>> found.players, found.values[:, 0].tolist(), found.standard_error
        ([1, 2], [2.0, 2.0], None)
    """

    players: list[Any]
    values: torch.Tensor
    standard_error: torch.Tensor | None

    def table(self, k: int = 0) -> dict[Any, float]:
        """The value of each player, by the player, for the k-th score."""
        return dict(zip(self.players, self.values[:, k].tolist(), strict=True))


class Scored(Protocol):
    """What :func:`shapley_values` reads of an :class:`~monai_saliency.Explanation`, which says what each is."""

    @property
    def masks(self) -> BoundMasks: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def scores(self) -> torch.Tensor: ...
    @property
    def reference_scores(self) -> torch.Tensor: ...


def shapley_values(explanation: Scored) -> ShapleyValues:
    """The Shapley values of an explanation's players.

    Args:
        explanation: the result of ``explain`` of :func:`~monai_saliency.shapley`, or of any inferer with
            :class:`~monai_saliency.CoalitionMasks`.

    Returns:
        the values. Nothing is run again: they are computed from the scores.

    Raises:
        ValueError: when the masks are not coalitions, and as for :class:`ShapleyScoring`.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.shapley(regions=lambda image, spacing: image.long() // 10, target=ms.ClassScore([0], "none"))
        >>> image = torch.tensor([[[[1.0, 13.0], [20.0, 21.0]]]])  # labels 0, 1, 2 and 2
        >>> (found,) = explain.explain(image, lambda x: x.flatten(1).sum(1, keepdim=True))
        >>> ms.shapley_values(found).table()  # the score is the sum of the image
        {0: 1.0, 1: 13.0, 2: 41.0}
    """
    used = getattr(explanation, "estimator", None)
    scoring = used if isinstance(used, ShapleyScoring) else ShapleyScoring()
    return scoring.values(explanation.masks, explanation.ids, explanation.scores, explanation.reference_scores)


class ShapleyScoring(Estimator):
    """The Shapley value of the region that a voxel lies in (Shapley 1953): what the region adds to the score, on
    average over all orders in which the regions may come into the image.

    With f the score of a coalition S, the value of player i of n is
    ``sum_S |S|! (n - |S| - 1)! / n! * (f(S with i) - f(S))`` over the coalitions without i. Values are in the score's
    unit; positive means that the region supports the score. They sum to the score of the image less the score with all
    players hidden. The value is written on each of the region's voxels, not a share of it; 0 on voxels of no player.
    :func:`shapley_values` gives the players' values.

    - If all coalitions were scored, the values are exact: the sum of Harsanyi's dividends, each shared equally among
      its players, so that players that never meet need no common coalition (:mod:`monai_saliency.masks.patch_cells`).
    - If coalitions were drawn, the values are those of KernelSHAP's regression (Lundberg and Lee, NeurIPS 2017), on
      pairs of complements drawn without replacement by their leverage (Leverage SHAP: Musco and Witter, arXiv
      2410.01917), weighted by the probability that a pair is drawn. Their sum is exact, and so are games whose players
      interact at most two by two.

    It needs :class:`~monai_saliency.CoalitionMasks`.

    Args:
        interactions: whether the regression has interactions of three players too, those that help to predict other
            pairs: OddSHAP (Fumagalli et al., arXiv 2602.01399), where a greedy choice and cross-validation replace the
            paper's boosted trees. Not read if values are exact.

    Raises:
        ValueError: from :meth:`compute`, :meth:`noise` and
            :meth:`values`, for other masks, when scores are missing, and when the score turns out not to be a sum over
            voxels of a sliding-window model's output.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, CoalitionMasks, PerturbationInferer, ShapleyScoring
        >>> masks = CoalitionMasks(regions=lambda image, spacing: torch.tensor([[[1, 1], [2, 3]]]))
        >>> explain = PerturbationInferer(masks, ClassScore([0], "none"), ShapleyScoring())
        >>> image = torch.tensor([[[[1.0, 2.0], [4.0, 5.0]]]])  # the score is the product of the lower two voxels
        >>> explain(image, lambda x: (x[:, 0, 1, 0] * x[:, 0, 1, 1])[:, None]).tolist()
        [[[[0.0, 0.0], [10.0, 10.0]]]]
    """

    def __init__(self, interactions: bool = False) -> None:
        self.interactions = flag("interactions", interactions)

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        coalitions = _checked(masks)
        return coalitions.paint(self.values(masks, ids, scores, reference_scores).values).flatten(0, 1)

    def values(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> ShapleyValues:
        """The values of the players, from the arguments of :meth:`compute`."""
        coalitions = _checked(masks)
        drops = _drops(coalitions, ids, scores, reference_scores)
        values, variance = _solve(coalitions, drops, self.interactions)
        if coalitions.meetings is not None:
            largest = torch.cat([scores.cpu(), reference_scores[None].cpu()]).abs().amax(dim=0).double()
            _check_sum(values, drops, largest, scores.dtype)
        errors = None if coalitions.pairs is None else variance.sqrt()
        return ShapleyValues(list(coalitions.players), values, errors)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The rounding of the scores where the values are exact; with random coalitions the standard error of a value
        too, the root mean square over the players.
        """
        coalitions = _checked(masks)
        rounded = score_rounding(scores, reference_scores, rounding).double().cpu()
        errors = self.values(masks, ids, scores, reference_scores).standard_error
        if errors is not None:
            return torch.hypot(errors.square().mean(dim=0).sqrt(), rounded).to(scores)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(len(coalitions) + 1, _PROBES))
        probes, _ = _solve(coalitions, torch.from_numpy(signs))
        return (rounded * max(1.0, float(probes.square().mean(dim=1).sqrt().max()))).to(scores)

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """That of the player on all its voxels; None where all values are exact."""
        errors = self.values(masks, ids, scores, reference_scores).standard_error
        return None if errors is None else _checked(masks).paint(errors).flatten(0, 1)


def _checked(masks: BoundMasks) -> BoundCoalitionMasks:
    if not isinstance(masks, BoundCoalitionMasks):
        raise ValueError(f"Shapley values need the scores of coalitions: use CoalitionMasks, got {masks.key[0]}")
    return masks


def _drops(
    masks: BoundCoalitionMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
) -> torch.Tensor:
    """How far the score falls with each mask, float64 ``(N + 1, K)`` on the CPU; 0 in the last row, where
    none is used.
    """
    if len(set(ids)) < len(masks):
        raise ValueError(f"Shapley values need the scores of all {len(masks)} coalitions, got {len(set(ids))}")
    drops = torch.zeros(len(masks) + 1, scores.shape[1], dtype=torch.float64)
    drops[torch.as_tensor(list(ids))] = reference_scores.cpu().double() - scores.cpu().double()
    return drops


def _solve(
    masks: BoundCoalitionMasks, drops: torch.Tensor, interactions: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapley values ``(players, K)``, and their variances."""
    if masks.meetings is None:
        assert masks.pairs is not None
        first, second = masks.pairs.T
        half = (drops[second] - drops[first]) / 2  # the scores' difference: drops are negative
        return regression(masks.coalitions[first], half, drops[0], interactions)
    values = drops.new_zeros(len(masks.players), drops.shape[1])
    for meeting in masks.meetings:
        _share(meeting, _dividends(meeting, drops), values)
    return values, torch.zeros_like(values)


def _dividends(meeting: Meeting, drops: torch.Tensor) -> torch.Tensor:
    """The dividend of each set of a meeting's players, ``(2^k, K)``: what it takes beyond the dividends of its subsets.
    0 for sets of an earlier meeting; so it is for players that never meet.
    """
    dividends = drops[torch.from_numpy(meeting.rows)]
    for place in range(len(meeting.players)):
        halves = dividends.reshape(-1, 2, 2**place, drops.shape[1])
        halves[:, 1] -= halves[:, 0]
    return dividends * torch.from_numpy(meeting.new)[:, None]


def _share(meeting: Meeting, dividends: torch.Tensor, values: torch.Tensor) -> None:
    """Share dividends equally among the players of each set: add them to ``values``, ``(players, K)``."""
    bits = np.arange(len(dividends))
    sizes = sum((bits >> place) & 1 for place in range(len(meeting.players)))
    shares = dividends / torch.from_numpy(np.maximum(sizes, 1))[:, None]
    for place, player in enumerate(meeting.players):
        values[player] += shares.reshape(-1, 2, 2**place, values.shape[1])[:, 1].sum(dim=(0, 1))


def _check_sum(values: torch.Tensor, drops: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse exact values that do not sum to what all players together take from the score."""
    missed = (values.sum(dim=0) - drops[0]).abs()
    allowed = _MISSED.get(dtype, _MISSED_OTHERWISE) * drops.abs().amax(dim=0) + 1e3 * torch.finfo(dtype).eps * largest
    if bool((missed > allowed).any()):
        k = int((missed - allowed).argmax())
        raise ValueError(
            f"the Shapley values sum to {float(values[:, k].sum()):.6g} and hiding all players takes "
            f"{float(drops[0, k]):.6g} from the score: it is not a sum over voxels of a sliding-window model's output "
            "there, so use CoalitionMasks without `inferer`, or give `num_coalitions`"
        )
