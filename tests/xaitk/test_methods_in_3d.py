"""Each method of xaitk-saliency on volumes: equal to a slow one, voxel by voxel and mask by mask, in float64.

The slow one makes its own masks, perturbs, scores and averages in plain loops; it shares nothing with the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.numpy_boxes import BlackBox
from helpers.slow_masks import slow_balls, slow_grids, slow_mc_rise, slow_windows

import monai_saliency as ms

SHAPE = (7, 6, 5)
IMAGE = np.random.default_rng(1).normal(size=(2, *SHAPE))
FILLS = [0.5, -1.0, 2.0]
P1, SEED = 0.4, 3
TARGET = ms.ClassScore("all", "none")
#: a method's settings, its slow masks ``(n, K, *spatial)``, and what it averages
Slow = tuple[Callable[..., ms.PerturbationInferer], dict[str, Any], Callable[[], np.ndarray], str]


def one(masks: np.ndarray) -> np.ndarray:
    return masks[:, None]


METHODS: dict[str, Slow] = {
    "rise": (
        ms.rise,
        {"num_masks": 25, "grid_size": 3, "p1": P1, "seed": SEED},
        lambda: slow_mc_rise(SHAPE, 25, 1, (3, 3, 3), P1, SEED),
        "rise",
    ),
    "random_grid": (
        ms.random_grid,
        {"num_masks": 25, "cell_size": (3, 2, 2), "p1": P1, "seed": SEED},
        lambda: one(slow_grids(SHAPE, 25, (3, 2, 2), P1, SEED)),
        "rise",
    ),
    "mc_rise": (
        ms.mc_rise,
        {"num_masks": 25, "grid_size": 3, "p1": P1, "seed": SEED, "more_fills": FILLS[1:]},
        lambda: slow_mc_rise(SHAPE, 25, 3, (3, 3, 3), P1, SEED),
        "mc_rise",
    ),
    "multi_scale_window": (
        ms.multi_scale_window,
        {"window_size": 4, "levels": 2},
        lambda: one(np.concatenate([slow_windows(SHAPE, 4, 2), slow_windows(SHAPE, 2, 1)])),
        "drop",
    ),
    "sliding_radial": (
        ms.sliding_radial,
        {"radius": (2.5, 2, 2), "stride": 3},
        lambda: one(slow_balls(SHAPE, (2.5, 2, 2), (3, 3, 3), None)),
        "drop",
    ),
    "squared_difference": (
        ms.squared_difference,
        {"radius": 2, "stride": 3, "sigma": (1, 0.5, 2)},
        lambda: one(slow_balls(SHAPE, (2, 2, 2), (3, 3, 3), (1, 0.5, 2))),
        "squared",
    ),
    "sbsm": (ms.sbsm, {"window_size": 3, "stride": 2}, lambda: one(slow_windows(SHAPE, 3, 2)), "loss"),
    "drise": (
        ms.drise,
        {"num_masks": 25, "grid_size": 3, "p1": P1, "seed": SEED},
        lambda: slow_mc_rise(SHAPE, 25, 1, (3, 3, 3), P1, SEED),
        "kept",
    ),
}


def perturbed(mask: np.ndarray) -> np.ndarray:
    """One mask ``(K, *spatial)``, voxel by voxel."""
    found = np.empty_like(IMAGE)
    for place in itertools.product(*map(range, IMAGE.shape)):
        hidden = [1 - float(each[place[1:]]) for each in mask]
        found[place] = (1 - sum(hidden)) * IMAGE[place] + sum(h * f for h, f in zip(hidden, FILLS, strict=False))
    return found


def slow_map(masks: np.ndarray, scores: np.ndarray, reference: np.ndarray, rule: str) -> np.ndarray:
    """Maps by score, then by fill, one voxel at a time."""
    n, fills = masks.shape[:2]
    maps = np.zeros((scores.shape[1], fills, *SHAPE))
    for j, k, voxel in itertools.product(range(len(reference)), range(fills), itertools.product(*map(range, SHAPE))):
        total = weight = 0.0
        mean = sum(scores[:, j]) / n
        for i in range(n):
            hidden = [1 - float(each[voxel]) for each in masks[i]]
            kept, f, f0 = 1 - sum(hidden), float(scores[i, j]), float(reference[j])
            if rule == "rise":
                total, weight = total + (f - mean) * (kept - P1), (n - 1) * P1
            elif rule == "mc_rise":
                total += (f - mean) * (kept / P1 - fills * hidden[k] / (1 - P1))
                weight = n - 1
            elif rule == "kept":
                total, weight = total + (f - mean) * kept, weight + kept
            else:
                value = {"drop": f0 - f, "loss": max(f0 - f, 0), "squared": (f0 - f) ** 2 / 2}[rule]
                total, weight = total + value * hidden[k], weight + hidden[k]
        maps[(j, k, *voxel)] = total / weight if weight else 0.0
    return maps.reshape(-1, *SHAPE)


def settings_of(name: str, **others: Any) -> dict[str, Any]:
    return {"target": TARGET, "fill": ms.ConstantFill(FILLS[0]), "mask_batch_size": 7} | METHODS[name][1] | others


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_slow_one(name: str) -> None:
    method, _, make, rule = METHODS[name]
    box = BlackBox(IMAGE.shape)
    masks = make()
    scores = np.stack([box(perturbed(mask)) for mask in masks])
    expected = slow_map(masks, scores, box(IMAGE), rule)
    (found,) = method(**settings_of(name)).explain(torch.from_numpy(IMAGE)[None], box.describe)
    np.testing.assert_allclose(found.scores, scores, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.saliency, expected, rtol=0, atol=1e-12)
    assert np.abs(expected).max() > 1e-3
