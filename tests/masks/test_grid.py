"""Crisp grids: cells by hand, in a slow loop, and on remembered patches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
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


@pytest.mark.parametrize("kind", ["hsic", "sobol"])
def test_remembered_patches(kind: str) -> None:
    image = torch.rand(1, 1, 40, 24, generator=torch.Generator().manual_seed(1))

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(x, 3, 1, 1).square()

    inferer = SlidingWindowInferer((16, 12), 4, 0.5)
    target = ms.RegionScore(0, "none", region="all")
    explain = {
        "hsic": lambda **settings: ms.hsic(30, (5, 3), target=target, inferer=inferer, **settings),
        "sobol": lambda **settings: ms.sobol(2, (5, 3), target=target, inferer=inferer, **settings),
    }[kind]
    remembered, whole = (explain(patch_memory=memory).explain(image, network)[0] for memory in (True, False))
    torch.testing.assert_close(remembered.scores, whole.scores, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(remembered.saliency, whole.saliency, rtol=1e-3, atol=1e-5)
    if kind == "sobol":  # a mask changes what the cell's patches see, and nothing else
        assert remembered.num_forwards / remembered.per_prediction < 0.5 * whole.num_forwards


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_masks": 0}, "`num_masks` must be a whole number of at least 1"),
        ({"num_masks": 5, "grid_size": 0}, "`grid_size` must be a whole number of at least 1"),
        ({"num_masks": 5, "p1": 1.5}, r"`p1` must be in \[0, 1\]"),
        ({"num_masks": 5, "seed": -1}, "`seed` must be a whole number of at least 0"),
    ],
)
def test_errors(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GridMasks(**settings)
    with pytest.raises(ValueError, match="one number or one per spatial axis"):
        bind(GridMasks(5, (2, 2, 2)), 8, 8)
