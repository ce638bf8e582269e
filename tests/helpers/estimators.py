"""Maps and Shapley values in plain loops, and random scores to make them of."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from helpers.searches import searched
from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import BoundMasks, Masks

SHAPES = [(9, 7), (5, 6, 4)]


def slow_rise(masks: np.ndarray, scores: np.ndarray, p1: float, form: str) -> np.ndarray:
    """RISE, equation 6 of the paper ("plain"), or another form of it: one voxel and one mask at a time."""
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    mean_score, mean_mask, divisor = np.zeros(k), p1, n * p1
    if form == "centred":
        mean_score, divisor = scores.mean(axis=0), (n - 1) * p1
    elif form == "plain":
        mean_mask, divisor = 0.0, n * masks.mean()
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        for i in range(n):
            maps[(j, *voxel)] += (scores[i, j] - mean_score[j]) * (masks[(i, *voxel)] - mean_mask) / divisor
    return maps


def bound_with_scores(
    masks: Masks, shape: tuple[int, ...], k: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[BoundMasks, torch.Tensor, torch.Tensor]:
    bound = masks.bind(torch.zeros(1, *shape, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(bound), k, dtype=dtype, generator=generator)
    return bound, scores, torch.randn(k, dtype=dtype, generator=generator)


def map_of(estimator: Estimator, bound: BoundMasks, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The map of all rounds, where each mask that is asked for has the next row of the scores."""
    return torch.cat([estimator.compute(observed) for observed in searched(bound, scores, reference)])


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
