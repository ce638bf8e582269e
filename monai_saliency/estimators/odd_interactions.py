"""Interactions of three players, for the regression of Shapley values: which of them the scores show.

A Shapley value depends on the odd part of a game alone, what pairs of complements differ in (OddSHAP: Fumagalli et al.,
arXiv 2602.01399). In the Fourier basis that part is a sum of products of an odd number of signs, 1 for a player that is
kept and -1 for one that is hidden. KernelSHAP's regression has the products of one; this module chooses among those of
three. Their own Shapley values are known, so that what is left for the regression has less to say of the values.

The paper lets boosted trees choose interactions. Here they are chosen greedily, each time the product that explains
most of what is left (orthogonal matching pursuit: Pati et al., Asilomar 1993), and cross-validation says how many: none
where they do not help to predict other pairs. No tree is needed, and the answer is the same everywhere.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Chosen", "choose", "triples"]

# Triples are made of so many players at the most: 4060 of them.
_PLAYERS = 30
# Pairs are predicted by the others in so many groups.
_FOLDS = 5
# Of so many pairs one interaction is chosen at the most: one of ten coalitions, as in the paper.
_PAIRS = 5


class Chosen(NamedTuple):
    """Interactions that help to predict pairs.

    Attributes:
        places: their columns.
        missed: ``(m,)``, what is missed of each pair where others predict it and choose the interactions.
    """

    places: list[int]
    missed: torch.Tensor


def triples(first: np.ndarray, features: torch.Tensor, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What the regression misses of the products of three signs, whose Shapley values are 2/3 for each of the three.

    Args:
        first: bool ``(m, players)``, the first coalition of each pair.
        features: ``(m, players)``, the columns of the regression, multiplied by ``weight``.
        weight: ``(m, 1)``, the square root of the weight of each pair.
        values: ``(players,)``, a first estimate of the values: players of large ones are looked at.

    Returns:
        ``(m, triples)``; no column for fewer than three players.
    """
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
    """Choose columns beside those of a regression.

    Args:
        base: ``(m, p)``, the columns of the regression.
        columns: ``(m, q)``, from which to choose.
        wanted: ``(m,)``, what to explain.
    """
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
    """Choose one column after another by the pairs ``train``, bool ``(m,)``.

    Returns:
        the columns, and what is left of each pair after none, one, two, ... of them, ``(m, steps + 1)``.
    """
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
