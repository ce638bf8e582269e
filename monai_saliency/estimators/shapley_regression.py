"""KernelSHAP's regression on pairs of complements, with interactions of three players.

A Shapley value depends on the odd part of a game alone, in which pairs of complements differ. In the Fourier basis it
is a sum of products of an odd number of signs. The regression has the products of one; OddSHAP adds products of three.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

from monai_saliency.masks.coalition_draw import inclusion

__all__ = ["choose", "regression", "triples"]

# Triples are made of so many players at the most: 4060 of them.
_PLAYERS = 30
# Pairs are predicted by the others in so many groups.
_FOLDS = 5
# Of so many pairs one interaction is chosen at the most: one of ten coalitions, as in the paper.
_PAIRS = 5


class Chosen(NamedTuple):
    """Interactions that help to predict pairs."""

    places: list[int]
    missed: torch.Tensor


def triples(first: np.ndarray, features: torch.Tensor, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What the regression misses of the products of three signs, whose Shapley values are 2/3 for each of the three."""
    players = first.shape[1]
    looked_at = values.abs().argsort(descending=True, stable=True)[:_PLAYERS].sort().values.tolist()
    places = torch.tensor(list(itertools.combinations(looked_at, 3)), dtype=torch.long).reshape(-1, 3)
    signs = torch.from_numpy(first).to(features) * 2 - 1
    size = (signs.sum(dim=1, keepdim=True) + players) / 2
    products, known = signs[:, places[:, 0]], features[:, places[:, 0]]
    for place in places.T[1:]:
        products, known = products * signs[:, place], known + features[:, place]
    return weight * (products - 2 / players * (size - players / 2)) - 2 / 3 * known


def choose(base: torch.Tensor, columns: torch.Tensor, wanted: torch.Tensor) -> Chosen:
    """Choose columns beside those of a regression."""
    count, inner = len(wanted), len(wanted) * (_FOLDS - 1) // _FOLDS
    most = max(0, min(count // _PAIRS, (inner - base.shape[1]) // 2, columns.shape[1]))
    group = torch.arange(count) % _FOLDS
    missed = torch.zeros(count, most + 1, dtype=wanted.dtype)
    for each in range(_FOLDS):
        _, left = _path(base, columns, wanted, group != each, most)
        missed[group == each] = left[group == each]
    best = int(missed.square().sum(dim=0).argmin())
    places, _ = _path(base, columns, wanted, group >= 0, best)
    return Chosen(places, missed[:, best])


def _path(
    base: torch.Tensor, columns: torch.Tensor, wanted: torch.Tensor, train: torch.Tensor, steps: int
) -> tuple[list[int], torch.Tensor]:
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


def regression(
    first: np.ndarray,
    half: torch.Tensor,
    total: torch.Tensor,
    interactions: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapley values ``(players, K)`` of KernelSHAP's regression on pairs of complements, and their variances."""
    count, players = first.shape
    sizes = first.sum(axis=1)
    size = torch.from_numpy(sizes).double()[:, None]
    chance, weights = (torch.from_numpy(each[sizes])[:, None] for each in inclusion(players, count))
    weight = weights.sqrt()
    features = weight * (torch.from_numpy(first).double() - size / players)
    share = total / players
    wanted = weight * (half - share * (size - players / 2))
    values, variance = [], []
    for target in wanted.T:
        beside = features
        least = torch.zeros_like(target)
        if interactions:
            columns = triples(first, features, weight, torch.linalg.pinv(features) @ target)
            chosen = choose(beside, columns, target)
            beside = torch.cat([beside, columns[:, chosen.places]], dim=1)
            least = chosen.missed.abs() if chosen.places else least
        solve = torch.linalg.pinv(beside)
        rests = solve @ target
        # As if each pair in turn were predicted by the others, for pairs that need not have been drawn.
        leverage = (beside * solve.T).sum(dim=1)
        left = ((target - beside @ rests) / (1 - leverage).clamp_min(1e-3)).hypot(least)
        values.append(rests[:players])
        variance.append((solve.square() @ (left.square() * (1 - chance[:, 0])))[:players])
    return share + torch.stack(values, dim=1), torch.stack(variance, dim=1)
