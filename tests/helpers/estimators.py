"""Maps in plain loops, and random scores to make them of."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import BoundMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks

SHAPES = [(9, 7), (5, 6, 4)]


def slow_rise(masks: np.ndarray, scores: np.ndarray, p1: float | None) -> np.ndarray:
    """RISE, equation 6, or with `p1` its debiased form: one voxel and one mask at a time."""
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    expectation = masks.mean() if p1 is None else p1
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        for i in range(n):
            maps[(j, *voxel)] += scores[i, j] * (masks[(i, *voxel)] - (p1 or 0)) / (n * expectation)
    return maps


def slow_occlusion(masks: np.ndarray, scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        hidden = [1 - masks[(i, *voxel)] for i in range(n)]
        drops = [(reference[j] - scores[i, j]) * hidden[i] for i in range(n)]
        maps[(j, *voxel)] = sum(drops) / sum(hidden) if sum(hidden) else 0.0
    return maps


def bound_with_scores(
    masks: RISEMasks | SlidingWindowMasks, shape: tuple[int, ...], k: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[BoundMasks, torch.Tensor, torch.Tensor]:
    bound = masks.bind(torch.zeros(1, *shape, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(bound), k, dtype=dtype, generator=generator)
    return bound, scores, torch.randn(k, dtype=dtype, generator=generator)


def map_of(estimator: Estimator, bound: BoundMasks, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    state = estimator.start(bound, reference)
    state.update(range(len(bound)), scores)
    return state.compute()
