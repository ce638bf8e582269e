"""Maps in plain loops, and random scores to make them of."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import BoundMasks, Masks

SHAPES = [(9, 7), (5, 6, 4)]


def slow_rise(masks: np.ndarray, scores: np.ndarray, p1: float, form: str) -> np.ndarray:
    """RISE, equation 6 of the paper ("plain"), or another form of it: one voxel and one mask at a time."""
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    divisor = {"centred": (n - 1) * p1, "debiased": n * p1, "plain": n * masks.mean()}[form]
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        for i in range(n):
            score = scores[i, j] - (scores[:, j].mean() if form == "centred" else 0)
            maps[(j, *voxel)] += score * (masks[(i, *voxel)] - (0 if form == "plain" else p1)) / divisor
    return maps


def bound_with_scores(
    masks: Masks, shape: tuple[int, ...], k: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[BoundMasks, torch.Tensor, torch.Tensor]:
    bound = masks.bind(torch.zeros(1, *shape, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(bound), k, dtype=dtype, generator=generator)
    return bound, scores, torch.randn(k, dtype=dtype, generator=generator)


def map_of(estimator: Estimator, bound: BoundMasks, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    state = estimator.start(bound, reference)
    while not state.seen.all():
        rows = range(int(state.seen.sum()), len(state.seen))
        state.update(rows, scores[rows.start : rows.stop])
        if bound.in_rounds:
            state.next_round()
    return state.compute()
