"""Crisp grids: cells by hand, in a slow loop, and on remembered patches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything

from monai_saliency.masks import GridMasks


@pytest.mark.parametrize(
    ("shape", "grid", "cells"), [((9, 7), 3, (3, 3)), ((5, 6, 4), (2, 4, 3), (2, 4, 3)), ((12, 3), 5, (5, 3))]
)
@pytest.mark.parametrize("p1", [0.5, 0.2])
def test_the_slow_loop(shape: tuple[int, ...], grid: Any, cells: tuple[int, ...], p1: float) -> None:
    found = everything(bind(GridMasks(13, grid, p1, seed=3), *shape))
    kept = (np.random.default_rng(3).random((13, int(np.prod(cells)))) < p1).reshape(13, *cells)
    for voxel in itertools.product(*map(range, shape)):
        cell = tuple(v * c // n for v, c, n in zip(voxel, cells, shape, strict=True))
        assert np.array_equal(found[(slice(None), *voxel)], kept[(slice(None), *cell)])


def test_cells_of_an_odd_axis_by_hand() -> None:
    bound: Any = bind(GridMasks(4, 4), 1, 10)
    assert bound.index[0].tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 4, 4]
    assert bound.spread(torch.tensor([[1.0, 2, 3, 4], [0, 0, 7, 0]]))[:, 0].tolist() == [
        [1, 1, 1, 2, 2, 3, 3, 3, 4, 4],
        [0, 0, 0, 0, 0, 7, 7, 7, 0, 0],
    ]
