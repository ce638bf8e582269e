"""Regression-adjusted MSR: in plain loops, without bias, exact where all coalitions are known, and its sum."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.shapley import by_coalitions

import monai_saliency as ms
from monai_saliency.masks.coalition_draw import inclusion

PLAYERS = 6
BITS = 1 << np.arange(PLAYERS)
KEPT = np.array(list(itertools.product([0, 1], repeat=PLAYERS)), dtype=bool)[:, ::-1]


def saturating() -> np.ndarray:
    """The scores of all coalitions, ordered by their bits: what players add, cut off."""
    worth = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    return np.asarray(1 / (1 + np.exp(4 - 2 * KEPT @ worth)))


def any_game() -> np.ndarray:
    return np.asarray(np.random.default_rng(7).normal(size=2**PLAYERS))


def exact(scores: np.ndarray) -> np.ndarray:
    game = lambda kept: float(scores[sum(1 << player for player in kept)])  # noqa: E731
    return np.array(list(by_coalitions(game, range(PLAYERS)).values()))


def estimate(scores: np.ndarray, count: int, seed: int = 0, unbiased: bool = True) -> tuple[Any, Any]:
    regions = torch.arange(1, PLAYERS + 1)[None, None]
    bound: Any = ms.CoalitionMasks(count, seed, lambda image, spacing: regions).bind(
        torch.zeros(1, 1, PLAYERS, dtype=torch.float64)
    )
    found = torch.from_numpy(scores[bound.coalitions @ BITS])[:, None]
    reference = torch.tensor([scores[-1]])
    return ms.ShapleyScoring(unbiased=unbiased).values(bound, range(len(bound)), found, reference), bound


def kernel_shap(first: np.ndarray, half: np.ndarray, weights: np.ndarray, total: float) -> np.ndarray:
    """The values of a weighted regression of pairs, with their sum as a constraint."""
    signs = first - 0.5
    left = np.zeros((PLAYERS + 1, PLAYERS + 1))
    left[:-1, :-1] = signs.T @ (weights[:, None] * signs)
    left[-1, :-1] = left[:-1, -1] = 1
    right = np.append(signs.T @ (weights * half), total)
    return np.asarray(np.linalg.lstsq(left, right, rcond=None)[0][:-1])


@pytest.mark.parametrize(("count", "seed"), [(29, 3), (41, 1), (53, 0)])
@pytest.mark.parametrize("make", [saturating, any_game])
def test_in_plain_loops(make: Any, count: int, seed: int) -> None:
    """Each pair is predicted by a regression that was solved without it, and each size is a stratum."""
    scores = make()
    found, bound = estimate(scores, count, seed)
    first = bound.coalitions[1::2]
    half = (scores[first @ BITS] - scores[~first @ BITS]) / 2
    total = scores[-1] - scores[0]
    weights = inclusion(PLAYERS, len(first))[1][first.sum(axis=1)]
    strata: dict[int, list[int]] = {}
    for pair, kept in enumerate(first):
        strata.setdefault(min(int(kept.sum()), int((~kept).sum())), []).append(pair)
    model = kernel_shap(first, half, weights, total)
    expected = np.full(PLAYERS, total / PLAYERS)
    for size in range(1, PLAYERS // 2 + 1):
        everyone = [kept for kept in KEPT if kept.sum() == size and (2 * size < PLAYERS or kept[0])]
        drawn = strata.get(size, [])
        for pair in drawn or [-1]:
            rest = [other for other in range(len(first)) if other != pair]
            one = kernel_shap(first[rest], half[rest], weights[rest], total) if drawn else model
            for player in range(PLAYERS):

                def counts(kept: np.ndarray, player: int = player) -> float:
                    s = int(kept.sum())
                    least = s - 1 if kept[player] else s
                    return (2 if kept[player] else -2) / PLAYERS / math.comb(PLAYERS - 1, least)

                said = sum(counts(kept) * (one[kept].sum() - total / 2) for kept in everyone)
                for other in drawn:
                    missed = half[other] - (one[first[other]].sum() - total / 2)
                    times = len(everyone) - len(drawn) + 1 if other == pair else 1
                    said += times * counts(first[other]) * missed
                expected[player] += said / max(1, len(drawn))
    np.testing.assert_allclose(found.values[:, 0].numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [saturating, any_game])
def test_all_coalitions_are_exact_and_the_sum_always_is(make: Any) -> None:
    scores = make()
    whole, _ = estimate(scores, 2**PLAYERS - 1)
    np.testing.assert_allclose(whole.values[:, 0].numpy(), exact(scores), rtol=0, atol=1e-12)
    assert whole.standard_error is None
    for count in (19, 33, 61):
        few, _ = estimate(scores, count, seed=count)
        assert float(few.values.sum()) == pytest.approx(scores[-1] - scores[0], abs=1e-12)


def test_there_is_no_bias_and_errors_are_as_large_as_said() -> None:
    scores, seeds = saturating(), 400
    found = [estimate(scores, 33, seed)[0] for seed in range(seeds)]
    errors = np.stack([each.values[:, 0].numpy() for each in found]) - exact(scores)
    said = np.stack([each.standard_error[:, 0].numpy() for each in found])
    assert np.abs(errors.mean(axis=0) / (errors.std(axis=0) / seeds**0.5)).max() < 3.5
    assert 0.85 <= (np.abs(errors) < 1.96 * said).mean() <= 0.99
    # Plain MSR, without a model of the game: a multiple of the error.
    plain = []
    for seed in range(seeds):
        _, bound = estimate(scores, 33, seed)
        first = bound.coalitions[1::2]
        half = (scores[first @ BITS] - scores[~first @ BITS]) / 2
        sizes = np.minimum(first.sum(axis=1), (~first).sum(axis=1))
        there = np.array([math.comb(PLAYERS, int(s)) / (2 if 2 * s == PLAYERS else 1) for s in sizes])
        times = there / np.array([(sizes == s).sum() for s in sizes])
        with_it = np.array([[2 / PLAYERS / math.comb(PLAYERS - 1, int(s) - 1)] for s in first.sum(axis=1)])
        without = np.array([[2 / PLAYERS / math.comb(PLAYERS - 1, int(s))] for s in first.sum(axis=1)])
        shares = np.where(first, with_it, -without)
        plain.append((scores[-1] - scores[0]) / PLAYERS + (times * half) @ shares)
    assert np.square(np.stack(plain) - exact(scores)).mean() > 2 * np.square(errors).mean()


def test_games_of_pairs_are_exact_from_few() -> None:
    rng = np.random.default_rng(4)
    pairs = np.triu(rng.normal(size=(PLAYERS, PLAYERS)))
    scores = np.einsum("ni,ij,nj->n", KEPT, pairs, KEPT)
    found, _ = estimate(scores, 19)
    np.testing.assert_allclose(found.values[:, 0].numpy(), exact(scores), rtol=0, atol=1e-9)


def test_the_method_has_the_choice() -> None:
    """And the table of the players' values is that of the map."""
    labels = torch.arange(PLAYERS)[None, None]
    network = lambda x: torch.sigmoid(x.flatten(1).cumsum(1)[:, -1:] - 2)  # noqa: E731
    explain = ms.shapley(19, unbiased=True, target=ms.RegressionScore())
    (found,) = explain.explain(torch.ones(1, 1, 1, PLAYERS), network, cases=[ms.Case("a", labels=labels)])
    values = ms.shapley_values(found)
    torch.testing.assert_close(found.saliency[0, 0].double(), values.values[:, 0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="choose one"):
        ms.shapley(19, interactions=True, unbiased=True, target=ms.RegressionScore())
