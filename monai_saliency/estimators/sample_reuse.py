"""What a regression of Shapley values misses, estimated by maximum sample reuse: each pair counts for every player.

Regression-adjusted Monte Carlo (Witter, Liu, Musco: Regression-adjusted Monte Carlo Estimators for Shapley Values and
Probabilistic Values, NeurIPS 2025, arXiv 2506.11849, section 3): the values of a game are those of a model f of it,
which are known, and those of what f misses, which are sums over coalitions and so are estimated without bias by the
coalitions that were drawn. Each coalition must be predicted by an f that has not seen it.

With s players in S, a pair of complements adds ``c_i(S) (f(S) - f(complement)) / 2`` to the value of player i, where
``c_i(S)`` is ``2 / (n C(n - 1, s - 1))`` with i in S and ``-2 / (n C(n - 1, s))`` without. Over all pairs, and with
an equal share of the sum of all values, these make the Shapley value.

The model is the linear regression (Linear MSR), which without one pair is had in closed form. Pairs are drawn without
replacement, and those of one size alike. So what the model that has not seen a pair misses of all pairs of its size is
what it misses of those that were drawn, and of the others, for which that pair stands. The mean over the pairs of a
size counts. Sizes of which all pairs were drawn are exact, and sizes of which none was drawn are left to the model.
"""

from __future__ import annotations

import math

import numpy as np
import torch

__all__ = ["adjusted"]


def adjusted(
    first: np.ndarray, weight: torch.Tensor, columns: torch.Tensor, wanted: torch.Tensor, chance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rests of Shapley values beside an equal share of their sum, and their variances.

    Args:
        first: bool ``(m, players)``, the first coalition of each pair.
        weight: ``(m, 1)``, the square root of the weight of each pair.
        columns: ``(m, p)``, multiplied by ``weight``: one for each player, then further ones of no Shapley value.
        wanted: ``(m,)``, what the regression explains, multiplied by ``weight``.
        chance: ``(m,)``, how likely each pair is drawn.

    Returns:
        two tensors ``(players,)``. The rests sum to 0.
    """
    players = first.shape[1]
    solve = torch.linalg.pinv(columns)
    whole = solve @ wanted
    leverage = (columns * solve.T).sum(dim=1)
    # As if each pair in turn were predicted by the others.
    left = (wanted - columns @ whole) / (1 - leverage).clamp_min(1e-3)
    without = whole[:, None] - solve * left
    counts = _shares_of_pairs(first) / weight
    found, variance, further = torch.zeros(3, players, dtype=wanted.dtype)
    unseen, is_partly = 1.0, False
    sizes = np.minimum(first.sum(axis=1), (~first).sum(axis=1))
    for size in np.unique(sizes).tolist():
        own = torch.from_numpy(sizes == size)
        halves = 2 * size == players  # complements have the same size
        there, drawn = math.comb(players, size) // (2 if halves else 1), int(own.sum())
        share = (1 if halves else 2) / (players - 1)  # of an additive game's values, what pairs of this size make
        unseen -= share
        if drawn == there:
            found += counts[own].T @ wanted[own]
            further += counts[own].T @ (columns[own, players:] @ whole[players:])
            continue
        is_partly = True
        missed = counts[own].T @ (wanted[own] - columns[own] @ whole)
        moved = (counts[own].T @ columns[own]) @ (solve[:, own] * left[own]).mean(dim=1)
        single = counts[own] * left[own, None]
        found += share * without[:players, own].mean(dim=1) + missed + moved + (there - drawn) * single.mean(dim=0)
        variance += there * (there - drawn) / drawn * single.square().mean(dim=0)
    if is_partly:
        found -= further  # further columns have no value in all: what is exact of them, the other sizes take back
    if unseen > 1e-9:
        found += unseen * whole[:players]
        variance += unseen**2 * (solve.square() @ (left.square() * (1 - chance)))[:players]
    return found, variance


def _shares_of_pairs(first: np.ndarray) -> torch.Tensor:
    """``(m, players)``, ``c_i(S)``: how half the difference of a pair's scores counts in the value of each player."""
    players = first.shape[1]
    size = first.sum(axis=1, keepdims=True)
    with_it = np.array([[2 / players / math.comb(players - 1, int(s) - 1)] for s in size[:, 0]])
    without = np.array([[2 / players / math.comb(players - 1, int(s))] for s in size[:, 0]])
    return torch.from_numpy(np.where(first, with_it, -without))
