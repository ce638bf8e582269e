"""HSIC against its definition by full matrices, answers by hand, and what chance gives."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.estimators import SHAPES, bound_with_scores, map_of
from helpers.searches import observed_of
from helpers.tolerances import assert_close

import monai_saliency as ms
from monai_saliency.estimators import dependence as module
from monai_saliency.estimators.dependence import HSICScoring, SobolScoring
from monai_saliency.masks import GridMasks, RegionMasks, RISEMasks, SobolMasks


def slow_hsic(bits: np.ndarray, scores: np.ndarray) -> float:
    """tr(K H L H) / (n - 1)^2 with its four matrices."""
    n = len(bits)
    width = np.sqrt(sum((a - np.mean(scores)) ** 2 for a in scores) / n)
    same = np.array([[1.0 if a == b else 0.0 for b in bits] for a in bits])
    close = np.array([[np.exp(-((a - b) ** 2) / (2 * width**2)) for b in scores] for a in scores])
    centre = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(same @ centre @ close @ centre) / (n - 1) ** 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1024, 7])
def test_equals_the_four_matrices(shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    bound: Any
    bound, scores, reference = bound_with_scores(GridMasks(30, 3, seed=1), shape, k=2)
    bits = bound.codes(range(30))["coalition"]
    found = map_of(HSICScoring(), bound, scores, reference)
    expected = torch.empty(2, *shape, dtype=torch.float64)
    for k in range(2):
        for voxel in itertools.product(*map(range, shape)):
            cell = int(bound.index[voxel]) - 1
            expected[(k, *voxel)] = slow_hsic(bits[:, cell], scores[:, k].numpy())
    assert_close(found, expected)


@pytest.mark.parametrize("shape", [(8, 8), (4, 4, 4)])
def test_a_network_that_reads_one_cell(shape: tuple[int, ...]) -> None:
    """The score is the cell's bit, which has the variance v: 4 n^2 v^2 (1 - exp(-1 / (2 v))) / (n - 1)^2."""
    corner = tuple(slice(2, 4) for _ in shape)
    explain = ms.hsic(400, grid_size=shape[0] // 2, seed=5, target=ms.RegressionScore(), mask_batch_size=100)
    (found,) = explain.explain(
        torch.ones(1, 1, *shape, dtype=torch.float64), lambda x: x[(slice(None), 0, *corner)].flatten(1).sum(1)[:, None]
    )
    share = float((found.scores > 0).double().mean())
    variance = share * (1 - share)
    expected = 4 * 400**2 * variance**2 * (1 - np.exp(-1 / (2 * variance))) / 399**2
    inside = found.saliency[(0, *corner)]
    assert_close(inside, expected)
    outside = found.saliency[0].clone()
    outside[corner] = 0
    assert float(outside.max()) < 0.05 * expected
    assert float(outside.min()) >= 0
    assert float(outside.max()) < 5 * float(found.noise) < expected


def test_what_differs_by_rounding_is_nothing() -> None:
    bound = GridMasks(60, 3).bind(torch.zeros(1, 9, 7))
    scores = 70 + 1e-5 * torch.rand(60, 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(map_of(HSICScoring(), bound, scores, torch.tensor([70.0])), torch.zeros(1, 9, 7))
    assert float(HSICScoring().noise(observed_of(bound, scores, torch.tensor([70.0])))) == 0


def test_noise_is_the_mean_over_shuffled_scores() -> None:
    bound, scores, reference = bound_with_scores(GridMasks(40, 3, seed=2), (9, 9), k=1)
    noise = HSICScoring().noise(observed_of(bound, scores, reference))
    generator = torch.Generator().manual_seed(1)
    values = torch.cat(
        [
            map_of(HSICScoring(), bound, scores[torch.randperm(40, generator=generator)], reference)[0, ::3, ::3]
            for _ in range(400)
        ]
    ).flatten()
    assert float(noise) / (1 + 2**0.5) == pytest.approx(float(values.mean()), rel=0.05)
    assert float(values.mean() + values.std()) <= 1.02 * float(noise)
    assert float((values > 5 * noise).double().mean()) < 1e-3


@pytest.mark.parametrize("masks", [RISEMasks(9, 3), RegionMasks(regions=lambda x, _: x * 0 + 1), SobolMasks(2, 2)])
def test_other_masks_are_refused(masks: Any) -> None:
    bound = masks.bind(torch.zeros(1, 8, 8))
    with pytest.raises(ValueError, match="HSIC needs random masks that keep or hide whole cells or regions, got"):
        map_of(HSICScoring(), bound, torch.zeros(len(bound), 1), torch.zeros(1))


# Total Sobol indices against functions whose indices are known, and a slow loop.
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
    cells = 2 ** len(shape)
    found = map_of(SobolScoring(), bound, scores, reference)
    for k in range(2):
        # Of each design: two independent draws, and the first with one cell of the second.
        designs = scores[:, k].reshape(5, 2 + cells).tolist()
        independent = [score for design in designs for score in design[:2]]
        mean = sum(independent) / 10
        variance = sum((score - mean) ** 2 for score in independent) / 9
        expected = torch.empty(shape, dtype=torch.float64)
        for voxel in itertools.product(*map(range, shape)):
            cell = int(bound.index[voxel]) - 1
            squares = sum((design[0] - design[2 + cell]) ** 2 for design in designs)
            expected[voxel] = squares / (2 * 5 * variance)
        assert_close(found[k], expected)


def test_sobol_refuses_other_masks() -> None:
    bound = GridMasks(9, 3).bind(torch.zeros(1, 8, 8))
    with pytest.raises(ValueError, match="total Sobol indices need SobolMasks, got masks of GridMasks"):
        map_of(SobolScoring(), bound, torch.zeros(9, 1), torch.zeros(1))
