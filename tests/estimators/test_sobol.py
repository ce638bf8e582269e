"""Total Sobol indices against functions whose indices are known, and a slow loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.estimators import SHAPES, bound_with_scores, map_of

import monai_saliency as ms
from monai_saliency.estimators.dependence import SobolScoring
from monai_saliency.masks import GridMasks, SobolMasks


def cells(masks: torch.Tensor) -> torch.Tensor:
    """The numbers of the cells of images of ones: a network's view of an image in cells of 2 voxels an axis."""
    everywhere: Any = (slice(None), 0, *[slice(None, None, 2)] * (masks.ndim - 2))
    return masks[everywhere].flatten(1)


def indices_of(function: Callable[[torch.Tensor], torch.Tensor], grid: tuple[int, ...], designs: int) -> np.ndarray:
    shape = [2 * size for size in grid]
    explain = ms.sobol(designs, grid, target=ms.RegressionScore(), mask_batch_size=512)
    (found,) = explain.explain(torch.ones(1, 1, *shape).double(), lambda x: function(cells(x))[:, None])
    assert len(found.scores) == designs * (math.prod(grid) + 2)
    # The map is flat in each cell.
    assert torch.equal(
        found.saliency.flatten(1).sort().values[0, :: 2 ** len(grid)], cells(found.saliency[None])[0].sort().values
    )
    return cells(found.saliency[None])[0].numpy()


@pytest.mark.parametrize("grid", [(2, 3), (1, 2, 3)])
def test_the_g_function(grid: tuple[int, ...]) -> None:
    """A product of functions of one cell each, whose total ids have a closed form (Saltelli and Sobol, 1995)."""
    a = np.array([0.0, 1.0, 4.5, 9.0, 99.0, 99.0])
    own = 1 / (3 * (1 + a) ** 2)
    total = np.prod(1 + own) - 1
    expected = [own[i] * np.prod(np.delete(1 + own, i)) / total for i in range(6)]
    found = indices_of(
        lambda x: (((4 * x - 2).abs() + torch.from_numpy(a)) / (1 + torch.from_numpy(a))).prod(1), grid, 1024
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_slow_loop(shape: tuple[int, ...]) -> None:
    bound: Any
    bound, scores, reference = bound_with_scores(SobolMasks(5, 2, seed=3), shape, k=2)
    count = 2 ** len(shape)
    found = map_of(SobolScoring(), bound, scores, reference)
    for k in range(2):
        of = [[float(scores[n * (count + 2) + j, k]) for j in range(count + 2)] for n in range(5)]
        both = [each[j] for each in of for j in (0, 1)]
        variance = sum((value - sum(both) / 10) ** 2 for value in both) / 9
        total = [sum((each[0] - each[2 + i]) ** 2 for each in of) / (2 * 5 * variance) for i in range(count)]
        for voxel in itertools.product(*map(range, shape)):
            assert float(found[(k, *voxel)]) == pytest.approx(total[int(bound.index[voxel]) - 1], rel=1e-10)


def test_designs_fill_the_space_and_exchange_one_cell() -> None:
    bound: Any = SobolMasks(64, (2, 2), seed=1).bind(torch.zeros(1, 4, 6))
    kept = bound.codes(range(len(bound)))["coalition"].reshape(64, 6, 4)
    for design in kept:
        for cell in range(4):
            assert np.flatnonzero(design[2 + cell] != design[0]).tolist() == [cell]
            assert design[2 + cell, cell] == design[1, cell]
    # Of 64 points of a Sobol sequence exactly one lies in each 64th of an axis.
    for column in kept[:, :2].reshape(64, 8).T:
        assert sorted((column * 64).astype(int)) == list(range(64))
    masks = bound.render(range(len(bound)))[:, 0]
    torch.testing.assert_close(masks[:, ::2, ::3].flatten(1).double().numpy(), kept.reshape(-1, 4), rtol=0, atol=1e-7)


def test_regions_of_a_label_map() -> None:
    labels = torch.tensor([[[0, 4, 4], [9, 9, 2]]])
    explain = ms.sobol(128, by_label=True, target=ms.RegressionScore(), mask_batch_size=64)
    (found,) = explain.explain(
        torch.ones(1, 1, 2, 3).double(),
        lambda x: 2 * x[:, :, 0, 1] + x[:, :, 1, 0],
        cases=[ms.Case("one", labels=labels)],
    )
    expected = torch.tensor([[0, 0.8, 0.8], [0.2, 0.2, 0]]).double()
    torch.testing.assert_close(found.saliency[0], expected, rtol=0, atol=0.02)


def test_what_is_absurd_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of 4096 cells or regions need 131136 forwards, .* smaller `grid_size`"):
        SobolMasks(32, 16).bind(torch.zeros(1, 32, 32, 32))
    bound = GridMasks(9, 3).bind(torch.zeros(1, 8, 8))
    with pytest.raises(ValueError, match="total Sobol indices need SobolMasks, got masks of GridMasks"):
        map_of(SobolScoring(), bound, torch.zeros(9, 1), torch.zeros(1))
