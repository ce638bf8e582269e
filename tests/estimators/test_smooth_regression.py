"""The smooth regression against one refitted without each mask, in plain NumPy; its error against other seeds."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from helpers.searches import observed_of
from helpers.tolerances import SOLVED, assert_close, assert_same_bits

import monai_saliency as ms
from monai_saliency.estimators import regression as regression_room
from monai_saliency.masks.base import Observed


def bumps(size: int, length: float) -> np.ndarray:
    count = math.ceil((size + 2 * length) / length)
    found = np.zeros((size, count + 1))
    for voxel in range(size):
        for bump in range(count + 1):
            place = (size - 1) / 2 + (bump - count / 2) * length
            found[voxel, bump] = math.exp(-(((voxel - place) / length) ** 2))
    return found


def ridge(features: np.ndarray, wanted: np.ndarray, strength: float) -> tuple[np.ndarray, float]:
    """Heights and the constant that is not penalised, from the normal equations of both."""
    design = np.column_stack([features, np.ones(len(features))])
    penalty = strength * np.eye(design.shape[1])
    penalty[-1, -1] = 0
    solved = np.linalg.solve(design.T @ design + penalty, design.T @ wanted)
    return solved[:-1], float(solved[-1])


def best_strength(features: np.ndarray, wanted: np.ndarray) -> float:
    """Halfway between the penalty with the least leave-one-out error, by refits, and the largest whose error is within
    one standard error of that.
    """
    centred = features - features.mean(axis=0)
    mean = np.linalg.eigvalsh(centred @ centred.T).clip(0).mean()
    strengths = mean * np.logspace(-3, 2, 31)
    errors = []
    for strength in strengths:
        missed = []
        for i in range(len(wanted)):
            others = np.arange(len(wanted)) != i
            heights, constant = ridge(features[others], wanted[others], strength)
            missed.append(wanted[i] - features[i] @ heights - constant)
        errors.append(np.square(missed))
    least = min(range(31), key=lambda number: float(errors[number].mean()))
    most = errors[least].mean() + errors[least].std(ddof=1) / len(wanted) ** 0.5
    largest = max(number for number, squares in enumerate(errors) if squares.mean() <= most)
    return float(strengths[math.ceil((least + largest) / 2)])


def reference(masks: np.ndarray, scores: np.ndarray, cells: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """The effect of each voxel, and its jackknife error, by refitting without each mask: changes add up in groups."""
    basis = np.ones((1, 1))
    for size in masks.shape[1:]:
        basis = np.kron(basis, bumps(size, max(1.0, 0.7 * size / cells)))
    features, n = masks.reshape(len(masks), -1) @ basis, len(scores)
    every = np.arange(n)

    def fitted(variance: np.ndarray, strength: float, kept: np.ndarray) -> np.ndarray:
        return np.sqrt(variance) * ridge((features * np.sqrt(variance))[kept], scores[kept], strength)[0]

    variances, strengths, heights = [np.ones(basis.shape[1])], [best_strength(features, scores)], []
    for number in range(3):
        heights.append(fitted(variances[number], strengths[number], every))
        if number < 2:
            variances.append(np.maximum(np.abs(heights[number]) / np.abs(heights[number]).max(), 0.01))
            strengths.append(best_strength(features * np.sqrt(variances[-1]), scores))
    slope = np.polyfit((features - features.mean(axis=0)) @ heights[-1], scores, 1)[0]
    changes, step = [], 1e-4
    for i in range(n):
        others, moved, change = every[every != i], np.zeros(basis.shape[1]), np.zeros(basis.shape[1])
        for number, (variance, strength) in enumerate(zip(variances, strengths, strict=True)):
            if number:
                moved = np.sign(heights[number - 1]) * change / np.abs(heights[number - 1]).max() * (variance > 0.01)
            up, down = (fitted(variance + side * step * moved, strength, every) for side in (1, -1))
            change = heights[number] - fitted(variance, strength, others) + (up - down) / (2 * step)
        changes.append(change)
    maps = slope * np.array(changes) @ basis.T
    maps -= maps.mean(axis=0)
    grouped = [maps[group::groups].sum(axis=0) for group in range(groups)]
    error = np.sqrt((groups - 1) * np.square(grouped).mean(axis=0))
    voxels = math.prod(max(1.0, size / cells) for size in masks.shape[1:])
    return voxels * (slope * basis @ heights[-1]).reshape(masks.shape[1:]), voxels * error.reshape(masks.shape[1:])


@pytest.mark.parametrize(
    ("shape", "num_masks", "grid", "cells"),
    [((10, 12), 24, 3, 3), ((6, 5, 7), 24, 2, 2), pytest.param((10, 12), 40, 3, 1, id="more masks than bumps")],
)
@pytest.mark.parametrize("groups", [10, 128])
def test_against_refitting_without_each_mask(
    shape: tuple[int, ...], num_masks: int, grid: int, cells: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monai_saliency.estimators.regression._GROUPS", groups)
    bound = ms.masks.RISEMasks(num_masks, grid, seed=4).bind(torch.zeros(1, *shape, dtype=torch.float64))
    masks = bound.render(range(num_masks))[:, 0].numpy()
    rng = np.random.default_rng(0)
    scores = 1 / (1 + np.exp(-masks.reshape(num_masks, -1) @ rng.normal(size=masks[0].size)))
    effects, error = reference(masks, scores, cells, min(groups, num_masks))
    both = torch.from_numpy(np.stack([scores, 5 - 2 * scores], axis=1))
    observed = observed_of(bound, both, both[0])
    found = ms.estimators.RegressionScoring(cells).compute(observed).numpy()
    assert_close(found[0], effects, within=SOLVED)
    assert_close(found[1], -2 * found[0], within=SOLVED)
    np.testing.assert_allclose(ms.estimators.RegressionScoring(cells).over_seeds(observed)[0].numpy(), error, rtol=1e-4)
    first = np.arange(num_masks) % 2 == 0
    halves = [reference(masks[rows], scores[rows], cells, 3)[0] for rows in (first, ~first)]
    bias = 2 * (effects - np.mean(halves, axis=0))
    both = np.hypot(error, bias)
    shrunk = np.sign(bias) == np.sign(effects)
    both[shrunk] = np.maximum(error, np.minimum(both, 0.45 * np.abs(effects)))[shrunk]
    np.testing.assert_allclose(
        ms.estimators.RegressionScoring(cells).standard_error(observed)[0].numpy(), both, rtol=1e-4
    )
    squares = np.square(error).mean() ** 0.5
    assert float(ms.estimators.RegressionScoring(cells).noise(observed)[0]) == pytest.approx(squares, rel=1e-4)


def test_a_linear_network_is_found() -> None:
    """The sum of the effects is what keeping everything adds, up to the penalty; the place is where the weight lies."""
    weight = torch.zeros(16, 16, dtype=torch.float64)
    weight[3:9, 8:13] = 1
    bound = ms.masks.RISEMasks(400, 4, seed=1).bind(torch.zeros(1, 16, 16, dtype=torch.float64))
    scores = (bound.render(range(400))[:, 0] * weight).flatten(1).sum(dim=1, keepdim=True)
    effects = ms.estimators.RegressionScoring(4).compute(observed_of(bound, scores, scores[0]))[0]
    assert float(effects.sum()) / 16 == pytest.approx(30, rel=0.15)
    assert float(effects[weight > 0].mean()) > 10 * float(effects[weight == 0].abs().mean())


def test_scores_that_say_nothing() -> None:
    bound, regression = ms.masks.RISEMasks(20, 3).bind(torch.zeros(1, 9, 9)), ms.estimators.RegressionScoring(3)
    for scores in (torch.full((20, 1), 70.1), torch.zeros(20, 1)):
        observed = observed_of(bound, scores, scores[0])
        assert not regression.compute(observed).any()
        assert not regression.standard_error(observed).any()
    two = observed_of(bound, torch.tensor([[1.0], [2.0]]), torch.tensor([1.0]))
    assert not regression.compute(two).any()
    assert regression.standard_error(two) is None


def test_channels_of_their_own_are_refused_before_the_network_runs() -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        pytest.fail("the network ran")

    explain = ms.rise(60, 3, form="regression", per_channel=True, target=ms.RegressionScore())
    with pytest.raises(ValueError, match="a regression needs masks that all channels share: leave out `per_channel`"):
        explain(torch.ones(1, 2, 9, 9), network)


def test_a_fit_serves_the_regression_that_made_it() -> None:
    """One of other cells, such as the one that a search stops by, makes its own of the same scores."""
    bound = ms.masks.RISEMasks(60, 3, seed=1).bind(torch.zeros(1, 12, 12))
    scores = bound.render(range(60))[:, :, 3:6, 6:9].mean((2, 3))
    shared = Observed(bound, scores[0], range(60), scores)
    for cells in (16, 4):
        alone = Observed(bound, scores[0], range(60), scores)
        regression = ms.estimators.RegressionScoring(cells)
        assert_same_bits(regression.compute(shared), regression.compute(alone))


@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_few_masks_have_a_map_and_an_error(count: int) -> None:
    """Also where a half of them is a single mask."""
    bound, regression = ms.masks.RISEMasks(count, 3).bind(torch.zeros(1, 9, 9)), ms.estimators.RegressionScoring(3)
    scores = torch.arange(1.0, count + 1)[:, None]
    observed = Observed(bound, scores[0], range(count), scores)
    assert bool(regression.compute(observed).isfinite().all())
    error = regression.standard_error(observed)
    assert bool(error.isfinite().all())
    assert float(error.max()) > 0


@pytest.mark.parametrize("limit", ["memory", "masks"])
def test_more_masks_than_fit_are_divided(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map is the mean of those of all parts, and the memory that of one part and its halves."""
    bound = ms.masks.RISEMasks(90, 3, seed=1).bind(torch.zeros(1, 12, 12))
    scores = bound.render(range(90))[:, :, 3:6, 6:9].mean((2, 3))
    regression = ms.estimators.RegressionScoring(3)
    maps = []
    for part in range(3):
        rows = list(range(part, 90, 3))
        maps.append(regression.compute(Observed(bound, scores[0], rows, scores[rows])))
    expected = torch.stack(maps).mean(dim=0)
    numbers = {"memory": ("_AT_ONCE", 30 * bumps(12, 2.8).shape[1] ** 2), "masks": ("_MOST", 30)}
    monkeypatch.setattr(regression_room, *numbers[limit])
    fit, held = regression_room._fit, []

    def counted(part: Any, *given: object) -> object:
        held.append(weakref.ref(part.features))
        assert len({id(each()) for each in held} - {id(None)}) <= 3  # this part, and its halves
        return fit(part, *given)

    monkeypatch.setattr("monai_saliency.estimators.regression._fit", counted)
    observed = observed_of(bound, scores, scores[0])
    found = regression.compute(observed)
    assert_close(found, expected)
    assert regression.standard_error(observed).shape == found.shape
    assert len(held) == 9  # once of each part, and of each of its halves


def test_the_error_over_seeds_is_calibrated() -> None:
    """The nominal 95 % interval holds the mean of 200 seeds in 90 to 98 % of voxels and seeds."""
    effects, errors = [], []
    for seed in range(200):
        bound = ms.masks.RISEMasks(100, 4, seed=seed).bind(torch.zeros(1, 16, 16))
        masks = bound.render(range(100))[:, 0].double()
        scores = torch.sigmoid(10 * (masks[:, 5:9, 4:8].mean((1, 2)) + masks[:, 10:13, 9:13].mean((1, 2)) / 2 - 0.8))
        observed = observed_of(bound, scores[:, None], scores[:1])
        effects.append(ms.estimators.RegressionScoring(4).compute(observed)[0])
        errors.append(ms.estimators.RegressionScoring(4).over_seeds(observed)[0])
    found, error = torch.stack(effects), torch.stack(errors)
    covered = ((found - found.mean(dim=0)).abs() <= 1.96 * error).double().mean()
    assert 0.90 <= float(covered) <= 0.98
