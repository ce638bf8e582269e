"""Random coalitions of players, in pairs: a coalition, and its complement.

They are drawn by their leverage ``1 / C(n, s)`` in KernelSHAP's regression (Leverage SHAP: Musco and Witter, arXiv
2410.01917, section 3), so that each size s matters alike, without replacement.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from monai_saliency.masks.base import random_rows

__all__ = ["draw_pairs", "inclusion"]

# Draws made at a time. It decides nothing but the speed.
_CHUNK = 1024


def draw_pairs(seed: int, players: int, count: int) -> np.ndarray:
    """Draw different pairs of coalitions."""
    found: list[np.ndarray] = []
    later: list[np.ndarray] = []
    seen: set[bytes] = set()
    # Orthogonal directions that the pairs found so far span. All players together are known beforehand.
    span = np.full((1, players), players**-0.5)
    start = 0
    while len(found) < count:
        for pair in _drawn(seed, range(start, start + _CHUNK), players):
            key = (pair ^ pair[0]).tobytes()  # the same for both coalitions of a pair
            if key in seen:
                continue
            seen.add(key)
            if len(span) == players:
                found.append(pair)
                continue
            rest = pair - (span @ pair) @ span
            rest -= (span @ rest) @ span
            if np.linalg.norm(rest) < 1e-6:
                later.append(pair)
                continue
            span = np.concatenate([span, rest[None] / np.linalg.norm(rest)])
            found.append(pair)
            if len(span) == players:
                found += later
        start += _CHUNK
    return np.stack(found[:count])


def _drawn(seed: int, rows: range, players: int) -> np.ndarray:
    """Draws with replacement, bool ``(len(rows), players)``: a size in [1, players), then a set of this size."""
    numbers = random_rows(seed, rows, players + 1)
    sizes = 1 + np.minimum((numbers[:, 0] * (players - 1)).astype(int), players - 2)
    ranks = numbers[:, 1:].argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray(ranks < sizes[:, None])


@cache
def inclusion(players: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """How likely a pair of coalitions is among those drawn, and what it weighs in the regression."""
    sizes = np.arange(1, players)
    logs = np.array([math.lgamma(players + 1) - math.lgamma(s + 1) - math.lgamma(players - s + 1) for s in sizes])
    # Each pair is met twice, by the size of either coalition.
    share = 0.5

    def ring(time: float) -> tuple[np.ndarray, np.ndarray]:
        mean = np.exp(math.log(2 * time / (players - 1)) - logs)
        return mean, np.where(mean > 0, -np.expm1(-mean) / np.where(mean > 0, mean, 1), 1.0)

    def expected(time: float) -> float:
        return float((share * 2 * time / (players - 1) * ring(time)[1]).sum())

    low, high = 1e-9, 1.0
    while expected(high) < count and high < 1e300:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < count else (low, middle)
    mean, ratio = ring(high)
    chance, weight = np.zeros(players + 1), np.zeros(players + 1)
    chance[1:-1] = mean * ratio
    weight[1:-1] = 1 / (sizes * (players - sizes) * ratio)
    return chance, weight
