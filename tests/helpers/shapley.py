"""Shapley values in plain loops, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np


def by_permutations(game: Callable[[frozenset[int]], float], players: int) -> np.ndarray:
    """The definition: what a player adds when it comes, averaged over all orders."""
    values = np.zeros(players)
    for order in itertools.permutations(range(players)):
        before: frozenset[int] = frozenset()
        for player in order:
            values[player] += game(before | {player}) - game(before)
            before |= {player}
    return values / math.factorial(players)


def by_coalitions(game: Callable[[frozenset[int]], float], players: Sequence[int]) -> dict[int, float]:
    """The same, summed over the coalitions without a player."""
    values = dict.fromkeys(players, 0.0)
    for player in players:
        others = [other for other in players if other != player]
        for size in range(len(players)):
            weight = math.factorial(size) * math.factorial(len(others) - size) / math.factorial(len(players))
            for coalition in itertools.combinations(others, size):
                kept = frozenset(coalition)
                values[player] += weight * (game(kept | {player}) - game(kept))
    return values


def table_game(players: int, seed: int) -> Callable[[frozenset[int]], float]:
    """A game without any structure: each coalition has a random value, also that of nobody."""
    values = np.random.default_rng(seed).normal(size=2**players)
    return lambda coalition: float(values[sum(1 << player for player in coalition)])
