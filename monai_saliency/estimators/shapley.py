"""Shapley values: what each player adds to the score, on average over all orders of adding them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.masks.base import BoundMasks, Observed
from monai_saliency.masks.coalition import BoundCoalitionMasks, Meeting, inclusion

# How far exact values may miss their sum before they are refused, relative to the largest drop of the score.
_MISSED = 1e-3


@dataclass(frozen=True)
class ShapleyValues:
    """The share of each player in the score.

    Attributes:
        players: n of them: labels of regions, 0 for the background, or ``(label, channel)``; then the names of numbers.
        values: ``(n, K)``, float64, in the score's unit. They sum to the score of the image less the score of the
            image with all players hidden.
        standard_error: ``(n, K)``, what sampling leaves uncertain; None where the values are exact.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> organs = torch.tensor([[[1, 1, 2, 2]]])
        >>> explain = ms.shapley(target=ms.ClassScore([0], "none"))
        >>> case = ms.Case("a", labels=organs)
        >>> network = lambda images: images.flatten(1).sum(1, keepdim=True)
        >>> [explanation] = explain.explain(torch.ones(1, 1, 1, 4), network, cases=[case])
        >>> found = ms.estimators.shapley_values(explanation)
        >>> found.players, found.values[:, 0].tolist(), found.standard_error
        ([1, 2], [2.0, 2.0], None)
    """

    players: list[Any]
    values: Tensor
    standard_error: Tensor | None

    def table(self, k: int = 0) -> dict[Any, float]:
        """The value of each player, by the player, for the k-th score."""
        return dict(zip(self.players, self.values[:, k].tolist(), strict=True))


def shapley_values(explanation: Any) -> ShapleyValues:
    """The Shapley values of an explanation's players, from its scores.

    Args:
        explanation: the result of ``explain`` of :func:`~monai_saliency.shapley`, or of any inferer with
            :class:`~monai_saliency.masks.CoalitionMasks`.

    Raises:
        ValueError: when the masks are not coalitions, and as for :class:`ShapleyScoring`.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.shapley(regions=lambda image, spacing: image.long() // 10, target=ms.ClassScore([0], "none"))
        >>> image = torch.tensor([[[[1.0, 13.0], [20.0, 21.0]]]])  # labels 0, 1, 2 and 2
        >>> (found,) = explain.explain(image, lambda x: x.flatten(1).sum(1, keepdim=True))
        >>> ms.estimators.shapley_values(found).table()  # the score is the sum of the image
        {0: 1.0, 1: 13.0, 2: 41.0}
    """
    used = getattr(explanation, "estimator", None)
    scoring = used if isinstance(used, ShapleyScoring) else ShapleyScoring()
    (observed,) = explanation.observed
    return scoring.values(observed)


class ShapleyScoring(Estimator):
    """The Shapley value of the region that a voxel lies in (Shapley 1953): what the region adds to the score, on
    average over all orders of adding the regions to the image.

    With f the score of a coalition S, the value of player i of n is
    ``sum_S |S|! (n - |S| - 1)! / n! * (f(S with i) - f(S))`` over the coalitions without i. Values are in the score's
    unit; positive means that the region supports the score. They sum to the score of the image less the score with all
    players hidden. The value is written on each of the region's voxels, not a share of it; 0 on voxels of no player.
    :func:`shapley_values` gives the players' values.

    - If all coalitions were scored, the values are exact: the sum of Harsanyi's dividends, each shared equally among
      its players, so that players that never meet need no common coalition (:mod:`monai_saliency.masks.coalition`).
    - If coalitions were drawn, the values come from KernelSHAP's regression (Lundberg and Lee, NeurIPS 2017), on
      pairs of complements drawn without replacement by their leverage (Leverage SHAP: Musco and Witter, arXiv
      2410.01917), weighted by the probability that a pair is drawn. Their sum is exact, and so are games whose players
      interact at most two by two.

    It needs :class:`~monai_saliency.masks.CoalitionMasks`.

    Raises:
        ValueError: (from ``compute``) for other masks, when scores are missing, and when the score turns out not to be
            a sum over voxels of a sliding-window model's output.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, PerturbationInferer
        >>> from monai_saliency.estimators import ShapleyScoring
        >>> from monai_saliency.masks import CoalitionMasks
        >>> masks = CoalitionMasks(regions=lambda image, spacing: torch.tensor([[[1, 1], [2, 3]]]))
        >>> explain = PerturbationInferer(masks, ClassScore([0], "none"), ShapleyScoring())
        >>> image = torch.tensor([[[[1.0, 2.0], [4.0, 5.0]]]])  # the score is the product of the lower two voxels
        >>> explain(image, lambda x: (x[:, 0, 1, 0] * x[:, 0, 1, 1])[:, None]).tolist()
        [[[[0.0, 0.0], [10.0, 10.0]]]]
    """

    def check(self, masks: BoundMasks) -> None:
        if not isinstance(masks, BoundCoalitionMasks):
            raise ValueError(f"Shapley values need the scores of coalitions: use CoalitionMasks, got {masks.key[0]}")

    def compute(self, observed: Observed) -> Tensor:
        values = self.values(observed).values
        return cast(BoundCoalitionMasks, observed.masks).spread(values.T)

    def values(self, observed: Observed) -> ShapleyValues:
        """The values of the players."""
        self.check(observed.masks)
        masks, ids, scores = cast(BoundCoalitionMasks, observed.masks), observed.ids, observed.scores
        # How far the score falls with each mask; 0 in the last row, where none is used.
        drops = torch.zeros(len(masks) + 1, scores.shape[1], dtype=torch.float64)
        drops[torch.as_tensor(list(ids))] = observed.reference_scores.cpu().double() - scores.cpu().double()
        if masks.meetings is None:
            values, variance = _regression(masks, drops)
            return ShapleyValues(list(masks.players), values, variance.sqrt())
        values = drops.new_zeros(len(masks.players), drops.shape[1])
        for meeting in masks.meetings:
            _share(meeting, drops, values)
        allowed = _MISSED * drops.abs().amax(dim=0) + 100 * score_rounding(observed).cpu()
        if bool(((values.sum(dim=0) - drops[0]).abs() > allowed).any()):
            raise ValueError(
                f"the Shapley values sum to {values.sum(dim=0).tolist()} and hiding all players takes "
                f"{drops[0].tolist()} from the score: it is not a sum over voxels of a sliding-window model's output "
                "there, so use CoalitionMasks without `inferer`, or give `num_coalitions`"
            )
        return ShapleyValues(list(masks.players), values, None)

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The rounding of the scores where the values are exact; with random coalitions the standard error of a value
        too, the root mean square over the players.
        """
        rounded = score_rounding(observed, rounding).double().cpu()
        errors = self.values(observed).standard_error
        if errors is None:  # each value is a sum over the games of players that meet
            meetings = cast(BoundCoalitionMasks, observed.masks).meetings or ()
            return (rounded * len(meetings) ** 0.5).to(observed.scores)
        return torch.hypot(errors.square().mean(dim=0).sqrt(), rounded).to(observed.scores)

    def standard_error(self, observed: Observed) -> Tensor | None:
        """That of the player on all its voxels; None where all values are exact."""
        errors = self.values(observed).standard_error
        return None if errors is None else cast(BoundCoalitionMasks, observed.masks).spread(errors.T)


def _share(meeting: Meeting, drops: Tensor, values: Tensor) -> None:
    """Share the dividend of each set of a meeting's players, which is what it takes beyond the dividends of its
    subsets, equally among the players: add to ``values``, ``(players, K)``. Sets of an earlier meeting are left out.
    """
    dividends = drops[torch.from_numpy(meeting.rows)]
    for place in range(len(meeting.players)):
        halves = dividends.reshape(-1, 2, 2**place, drops.shape[1])
        halves[:, 1] -= halves[:, 0]
    bits = np.arange(len(dividends))
    sizes = sum((bits >> place) & 1 for place in range(len(meeting.players)))
    shares = dividends * torch.from_numpy(meeting.new / np.maximum(sizes, 1))[:, None]
    for place, player in enumerate(meeting.players):
        values[player] += shares.reshape(-1, 2, 2**place, values.shape[1])[:, 1].sum(dim=(0, 1))


def _regression(masks: BoundCoalitionMasks, drops: Tensor) -> tuple[Tensor, Tensor]:
    """Shapley values ``(players, K)`` of KernelSHAP's regression on pairs of complements, and their variances.

    A Shapley value depends on the odd part of a game alone, where pairs of complements differ.
    """
    pairs = np.asarray(masks.pairs)
    first = masks.coalitions[pairs[:, 0]]
    half = (drops[pairs[:, 1]] - drops[pairs[:, 0]]) / 2  # drops are negative
    count, players = first.shape
    sizes = first.sum(axis=1)
    size = torch.from_numpy(sizes).double()[:, None]
    chance, weights = inclusion(players, count)
    chosen = torch.from_numpy(chance[sizes])  # how likely each pair is drawn
    weight = torch.from_numpy(weights[sizes]).sqrt()[:, None]
    features = weight * (torch.from_numpy(first).double() - size / players)
    share = drops[0] / players
    wanted = weight * (half - share * (size - players / 2))
    solve = torch.linalg.pinv(features)
    rests = solve @ wanted
    # As if each pair in turn were predicted by the others, for pairs that need not have been drawn.
    leverage = (features * solve.T).sum(dim=1, keepdim=True)
    left = (wanted - features @ rests) / (1 - leverage).clamp_min(1e-3)
    return share + rests, solve.square() @ (left.square() * (1 - chosen)[:, None])
