"""Interactions of three players in the regression of Shapley values: OddSHAP written slowly, by hand, and errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.shapley import by_coalitions

import monai_saliency as ms
from monai_saliency.estimators.shapley import choose, triples
from monai_saliency.masks.coalition import inclusion

PLAYERS = 10
KEPT = np.array(list(itertools.product([0, 1], repeat=PLAYERS)), dtype=bool)[:, ::-1]


def saturating() -> np.ndarray:
    """The scores of all coalitions, ordered by their bits: a sigmoid of what players add, most of them little."""
    worth = np.abs(np.random.default_rng(1).normal(size=PLAYERS)) ** 2
    return np.asarray(1 / (1 + np.exp(3 - 8 * KEPT @ worth / worth.sum())))


def few_together() -> np.ndarray:
    rng, scores = np.random.default_rng(2), np.zeros(len(KEPT))
    for _ in range(15):
        together = rng.choice(PLAYERS, rng.integers(1, 5), replace=False)
        scores += rng.normal() * KEPT[:, together].all(axis=1)
    return scores


def dense() -> np.ndarray:
    """A network with one hidden layer, in which all players interact a little."""
    rng = np.random.default_rng(3)
    return np.asarray(np.tanh(KEPT @ rng.normal(size=(PLAYERS, 16)) + rng.normal(size=16)) @ rng.normal(size=16))


def exact(scores: np.ndarray) -> np.ndarray:
    game = lambda kept: float(scores[sum(1 << player for player in kept)])  # noqa: E731
    return np.array(list(by_coalitions(game, range(PLAYERS)).values()))


def estimate(scores: np.ndarray, count: int, seed: int = 0, interactions: bool = True) -> Any:
    regions = torch.arange(1, PLAYERS + 1)[None, None]
    bound: Any = ms.CoalitionMasks(count, seed, lambda image, spacing: regions).bind(
        torch.zeros(1, 1, PLAYERS, dtype=torch.float64)
    )
    found = torch.from_numpy(scores[bound.coalitions @ (1 << np.arange(PLAYERS))])[:, None]
    reference = torch.tensor([scores[-1]])
    values = ms.ShapleyScoring(interactions).values(bound, range(len(bound)), found, reference)
    return values, bound


def test_odd_shap_by_its_normal_equations() -> None:
    """The regression in the Fourier basis, with the sum of all values as a constraint, on the same interactions."""
    scores, count = saturating(), 161
    values, bound = estimate(scores, count)
    first = bound.coalitions[1::2]
    bits, players, sizes = 1 << np.arange(PLAYERS), range(PLAYERS), first.sum(axis=1)
    half = (scores[first @ bits] - scores[~first @ bits]) / 2
    weight = inclusion(PLAYERS, len(first))[1][sizes]
    total, signs = scores[-1] - scores[0], 2.0 * first - 1
    features = np.sqrt(weight)[:, None] * (first - sizes[:, None] / PLAYERS)
    wanted = np.sqrt(weight) * (half - total * (sizes / PLAYERS - 0.5))
    root, columns = torch.from_numpy(np.sqrt(weight))[:, None], torch.from_numpy(features)
    largest = torch.linalg.pinv(columns) @ torch.from_numpy(wanted)
    places = choose(columns, triples(first, columns, root, largest), torch.from_numpy(wanted))[0]
    assert len(places) > 3
    chosen = [(player,) for player in players] + [list(itertools.combinations(players, 3))[at] for at in places]
    products = np.stack([signs[:, list(each)].prod(axis=1) for each in chosen], axis=1)
    # A constraint's multiplier is one more unknown.
    left = np.zeros((len(chosen) + 1, len(chosen) + 1))
    left[:-1, :-1] = products.T @ (weight[:, None] * products)
    left[-1, :-1] = left[:-1, -1] = 2
    solved = np.linalg.solve(left, np.append(products.T @ (weight * half), total))[:-1]
    expected = np.zeros(PLAYERS)
    for each, height in zip(chosen, solved, strict=True):
        expected[list(each)] += 2 * height / len(each)
    np.testing.assert_allclose(values.values[:, 0].numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [saturating, few_together, dense])
def test_all_coalitions_are_exact(make: Any) -> None:
    scores = make()
    for count, atol in ((2**PLAYERS - 1, 1e-12), (2**PLAYERS - 3, 2e-3)):
        values, _ = estimate(scores, count)
        np.testing.assert_allclose(values.values[:, 0].numpy(), exact(scores), rtol=0, atol=atol)
        assert float(values.values.sum()) == pytest.approx(scores[-1] - scores[0], abs=1e-12)


def test_few_interactions_of_three_are_found() -> None:
    """Values of players and of all pairs, and five triples: exact, where KernelSHAP is not."""
    rng = np.random.default_rng(4)
    pairs = np.triu(rng.normal(size=(PLAYERS, PLAYERS)))
    scores = np.einsum("ni,ij,nj->n", KEPT, pairs, KEPT)
    for together in ([0, 1, 2], [0, 3, 4], [5, 6, 7], [2, 8, 9], [1, 5, 9]):
        scores += KEPT[:, together].all(axis=1) * rng.uniform(1, 2)
    values, _ = estimate(scores, 161)
    np.testing.assert_allclose(values.values[:, 0].numpy(), exact(scores), rtol=0, atol=1e-9)
    assert float(values.standard_error.max()) < 1e-8
    plain, _ = estimate(scores, 161, interactions=False)
    assert float(np.abs(plain.values[:, 0].numpy() - exact(scores)).max()) > 1e-2


@pytest.mark.parametrize("make", [saturating, few_together, dense])
def test_against_shapiq(make: Any) -> None:
    """Its exact values, and less error than its KernelSHAP with pairs, for as many coalitions."""
    shapiq = pytest.importorskip("shapiq", reason="needs pip install shapiq")
    scores, count = make(), 401

    def game(coalitions: Any) -> np.ndarray:
        return np.asarray(scores[np.asarray(coalitions).astype(int) @ (1 << np.arange(PLAYERS))])

    def list_of(values: Any) -> np.ndarray:
        return np.array([values[(player,)] for player in range(PLAYERS)])

    known = list_of(shapiq.ExactComputer(n_players=PLAYERS, game=game)("SV"))
    np.testing.assert_allclose(known, exact(scores), rtol=0, atol=1e-12)
    theirs, ours = [], []
    for seed in range(15):
        kernel = shapiq.KernelSHAP(PLAYERS, pairing_trick=True, random_state=seed)
        theirs.append(list_of(kernel.approximate(count + 1, game)) - known)
        ours.append(estimate(scores, count, seed)[0].values[:, 0].numpy() - known)
    assert np.square(ours).mean() < 0.8 * np.square(theirs).mean()


def test_choose_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    base, columns = (torch.randn(60, count, generator=generator, dtype=torch.float64) for count in (6, 40))
    linear, noise = base.sum(dim=1), torch.randn(60, generator=generator, dtype=torch.float64)
    places, missed = choose(base, columns, linear + 2 * columns[:, 7] - columns[:, 30])
    assert sorted(places) == [7, 30]
    assert float(missed.abs().max()) < 1e-9
    assert choose(base, columns, linear)[0] == []
    assert len(choose(base, columns, linear + noise)[0]) <= 3
    assert choose(base, columns[:, :0], noise)[0] == []
    # Nothing is chosen where there are hardly more pairs than columns.
    assert choose(base[:7], columns[:7], noise[:7])[0] == []
