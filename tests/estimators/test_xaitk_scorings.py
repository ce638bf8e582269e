"""Occlusion, squared differences, similarity and D-RISE: plain loops in 2D and 3D, and what is known of chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.estimators import SHAPES, bound_with_scores, map_of

import monai_saliency as ms
from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import Masks

FAMILIES: list[Masks] = [
    ms.RISEMasks(12, 3, 0.4, seed=1),
    ms.RandomGridMasks(12, 3, 0.4, seed=1),
    ms.SlidingWindowMasks(3, 2),
    ms.SlidingWindowMasks(2, 4),
    ms.SlidingRadialMasks(2, 2),
    ms.SlidingRadialMasks(1.5, 2, 1.0),
    ms.MultiScaleWindowMasks(3, 2),
]
ESTIMATORS: dict[str, Estimator] = {
    "occlusion": ms.OcclusionScoring(),
    "squared": ms.SquaredDifferenceScoring(),
    "similarity": ms.SimilarityScoring(),
    "centred": ms.DRISEScoring(),
    "plain": ms.DRISEScoring("plain"),
}


def slow(kind: str, masks: np.ndarray, scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """One voxel and one mask at a time, as the docstrings say."""
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        total = weight = 0.0
        for i in range(n):
            mask, f, f0 = float(masks[(i, *voxel)]), float(scores[i, j]), float(reference[j])
            if kind == "occlusion":
                value, share = f0 - f, 1 - mask
            elif kind == "squared":
                value, share = 0.5 * (f0 - f) ** 2, 1 - mask
            elif kind == "similarity":
                value, share = max(f0 - f, 0.0), 1 - mask
            else:
                value, share = f - (scores[:, j].mean() if kind == "centred" else 0.0), mask
            total += value * share
            weight += share
        maps[(j, *voxel)] = total / weight if weight else 0.0
    return maps


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("masks", FAMILIES, ids=lambda masks: type(masks).__name__)
def test_equals_slow_loop(masks: Masks, kind: str, shape: tuple[int, ...]) -> None:
    bound, scores, reference = bound_with_scores(masks, shape)
    rendered = bound.render(range(len(bound)))[:, 0].numpy()
    ours = map_of(ESTIMATORS[kind], bound, scores, reference)
    np.testing.assert_allclose(ours, slow(kind, rendered, scores.numpy(), reference.numpy()), rtol=0, atol=1e-12)


def test_what_is_known_of_chance() -> None:
    """Windows leave nothing to chance but rounding; random masks have a standard error, except the plain form's."""
    windows, scores, reference = bound_with_scores(ms.SlidingWindowMasks(3, 2), (9, 7), dtype=torch.float32)
    places = range(len(windows))
    rounding = torch.cat([reference[None], scores]).abs().amax(dim=0) * 2**-20
    known = {"occlusion": rounding, "similarity": rounding, "centred": rounding, "squared": 0.5 * rounding**2}
    for kind, expected in known.items():
        noise = ESTIMATORS[kind].noise(windows, places, scores, reference)
        assert noise is not None
        torch.testing.assert_close(noise, expected)
        assert ESTIMATORS[kind].standard_error(windows, places, scores, reference) is None
    assert ESTIMATORS["plain"].noise(windows, places, scores, reference) is None
    drawn, scores, reference = bound_with_scores(ms.RISEMasks(9, 3), (9, 7))
    for kind, estimator in ESTIMATORS.items():
        assert estimator.noise(drawn, range(9), scores, reference) is None
        error = estimator.standard_error(drawn, range(9), scores, reference)
        assert (error is None) == (kind == "plain")
        assert estimator.standard_error(drawn, range(2), scores[:2], reference) is None
        if error is not None:
            assert error.shape == (3, 9, 7)


def test_voxels_in_no_region_are_0() -> None:
    """All masks keep them, so nothing is known of them."""
    labels = torch.zeros(1, 6, 6, dtype=torch.long)
    labels[0, :3], labels[0, 3:5] = 1, 2
    bound = ms.RegionMasks(num_masks=20).bind(torch.zeros(1, 6, 6), labels=labels)
    scores = torch.rand(20, 1, generator=torch.Generator().manual_seed(0))
    maps = map_of(ms.DRISEScoring(), bound, scores, torch.zeros(1))
    assert bool((maps[0, 5] == 0).all())
    assert bool((maps[0, :5] != 0).all())
    error = ms.DRISEScoring().standard_error(bound, range(20), scores, torch.zeros(1))
    assert error is not None
    assert bool((error[0, 5] == 0).all())
