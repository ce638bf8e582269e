"""Shapley values: what each player adds to the score, on average over all orders of adding them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.masks.base import BoundMasks, Observed
from monai_saliency.masks.coalition import BoundCoalitionMasks, Meeting, inclusion
from monai_saliency.utils.arguments import flag

__all__ = ["ShapleyScoring", "ShapleyValues", "shapley_values"]

# How far exact values may miss their sum before they are refused, relative to the largest drop of the score.
_MISSED = 1e-3
# Triples are made of at most this many players: 4060 triples.
_PLAYERS = 30
# Pairs are predicted by the others in this many groups.
_FOLDS = 5
# At most one interaction is chosen for this many pairs: one for ten coalitions, as in the paper.
_PAIRS = 5


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

    Args:
        interactions: whether the regression has interactions of three players too, those that help to predict other
            pairs: OddSHAP (Fumagalli et al., arXiv 2602.01399), where a greedy choice and cross-validation replace the
            paper's boosted trees. Not read if values are exact.

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

    def __init__(self, interactions: bool = False) -> None:
        self.interactions = flag("interactions", interactions)

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
        if len(set(ids)) < len(masks):
            raise ValueError(f"Shapley values need the scores of all {len(masks)} coalitions, got {len(set(ids))}")
        # How far the score falls with each mask; 0 in the last row, where none is used.
        drops = torch.zeros(len(masks) + 1, scores.shape[1], dtype=torch.float64)
        drops[torch.as_tensor(list(ids))] = observed.reference_scores.cpu().double() - scores.cpu().double()
        if masks.meetings is None:
            values, variance = _regression(masks, drops, self.interactions)
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


def triples(first: np.ndarray, features: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """The missed part of products of three signs, whose Shapley values are 2/3 for each of the three."""
    players = first.shape[1]
    looked_at = values.abs().argsort(descending=True, stable=True)[:_PLAYERS].sort().values.tolist()
    places = torch.tensor(list(itertools.combinations(looked_at, 3)), dtype=torch.long).reshape(-1, 3)
    signs = torch.from_numpy(first).to(features) * 2 - 1
    size = (signs.sum(dim=1, keepdim=True) + players) / 2
    products, known = signs[:, places[:, 0]], features[:, places[:, 0]]
    for place in places.T[1:]:
        products, known = products * signs[:, place], known + features[:, place]
    return weight * (products - 2 / players * (size - players / 2)) - 2 / 3 * known


def choose(base: Tensor, columns: Tensor, wanted: Tensor) -> tuple[list[int], Tensor]:
    """Choose columns that help to predict pairs, in addition to a regression's, and the part that each pair misses."""
    count, inner = len(wanted), len(wanted) * (_FOLDS - 1) // _FOLDS
    most = max(0, min(count // _PAIRS, (inner - base.shape[1]) // 2, columns.shape[1]))
    group = torch.arange(count) % _FOLDS
    missed = torch.zeros(count, most + 1, dtype=wanted.dtype)
    for each in range(_FOLDS):
        _, left = _path(base, columns, wanted, group != each, most)
        missed[group == each] = left[group == each]
    best = int(missed.square().sum(dim=0).argmin())
    places, _ = _path(base, columns, wanted, group >= 0, best)
    return places, missed[:, best]


def _path(base: Tensor, columns: Tensor, wanted: Tensor, train: Tensor, steps: int) -> tuple[list[int], Tensor]:
    """Choose one column after another by the pairs ``train``, bool ``(m,)``."""
    solve = torch.linalg.pinv(base[train])
    left = wanted - base @ (solve @ wanted[train])
    rest = columns - base @ (solve @ columns[train])
    scale = columns[train].square().sum(dim=0)
    places: list[int] = []
    missed = [left]
    for _ in range(steps):
        norm = rest[train].square().sum(dim=0)
        gain = (left[train] @ rest[train]).square() / norm
        gain = torch.where(norm > 1e-6 * scale, gain, -1.0)
        best = int(gain.argmax())
        if gain[best] > 1e-20 * wanted.square().sum():
            places.append(best)
            along = rest[:, best] / norm[best].sqrt()
            left = left - along * (along[train] @ left[train])
            rest = rest - along[:, None] * (along[train] @ rest[train])
        missed.append(left)
    return places, torch.stack(missed, dim=1)


def _regression(masks: BoundCoalitionMasks, drops: Tensor, interactions: bool) -> tuple[Tensor, Tensor]:
    """Shapley values ``(players, K)`` of KernelSHAP's regression on pairs of complements, and their variances.

    A Shapley value depends on the odd part of a game alone, where pairs of complements differ. In the Fourier basis
    it is a sum of products of an odd number of signs. The regression has the products of one; OddSHAP adds products of
    three.
    """
    pairs = np.asarray(masks.pairs)
    first, half = masks.coalitions[pairs[:, 0]], (drops[pairs[:, 1]] - drops[pairs[:, 0]]) / 2  # drops are negative
    count, players = first.shape
    sizes = first.sum(axis=1)
    size = torch.from_numpy(sizes).double()[:, None]
    chance, weights = (torch.from_numpy(each[sizes])[:, None] for each in inclusion(players, count))
    weight = weights.sqrt()
    features = weight * (torch.from_numpy(first).double() - size / players)
    share = drops[0] / players
    wanted = weight * (half - share * (size - players / 2))
    values, variance = [], []
    for target in wanted.T:
        beside, least = features, torch.zeros_like(target)
        if interactions:
            columns = triples(first, features, weight, torch.linalg.pinv(features) @ target)
            places, missed = choose(features, columns, target)
            beside, least = torch.cat([features, columns[:, places]], dim=1), missed.abs() * bool(places)
        solve = torch.linalg.pinv(beside)
        rests = solve @ target
        # As if each pair in turn were predicted by the others, for pairs that need not have been drawn.
        leverage = (beside * solve.T).sum(dim=1)
        left = ((target - beside @ rests) / (1 - leverage).clamp_min(1e-3)).hypot(least)
        values.append(rests[:players])
        variance.append((solve.square() @ (left.square() * (1 - chance[:, 0])))[:players])
    return share + torch.stack(values, dim=1), torch.stack(variance, dim=1)
