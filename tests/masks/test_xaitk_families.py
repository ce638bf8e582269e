"""Random grids, discs, windows and crisp grids: the masks of xaitk-saliency in 2D, plain loops in 3D."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything
from helpers.slow_masks import slow_balls, slow_grids, slow_windows
from xaitk_saliency.impls.perturb_image.random_grid import RandomGrid
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

from monai_saliency import GridMasks, MultiScaleWindowMasks, RandomGridMasks, SlidingRadialMasks, SlidingWindowMasks


class TestRandomGridMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (40, 17), (7, 5)])
    @pytest.mark.parametrize("cell", [(4, 4), (3, 5), (1, 6), (1, 1), (9, 2)])
    def test_equals_xaitk(self, shape: tuple[int, int], cell: tuple[int, int]) -> None:
        for seed, p1 in ((0, 0.5), (7, 0.25), (12345, 0.9)):
            theirs = RandomGrid(n=6, s=cell, p1=p1, seed=seed, threads=0).perturb(np.zeros((*shape, 3)))
            ours = everything(bind(RandomGridMasks(6, cell, p1, seed), *shape))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("shape", "cell"), [((12, 9, 10), (3, 3, 3)), ((11, 6, 13), (4, 1, 2)), ((5, 7, 6), (8, 7, 2))]
    )
    def test_3d_equals_slow_loop(self, shape: tuple[int, ...], cell: tuple[int, ...]) -> None:
        masks = everything(bind(RandomGridMasks(5, cell, 0.4, seed=3), *shape, dtype=torch.float64))
        np.testing.assert_allclose(masks, slow_grids(shape, 5, cell, 0.4, 3), rtol=0, atol=1e-12)

    def test_a_cell_has_its_size_in_every_scan(self) -> None:
        masks = RandomGridMasks(3, (10, 4), unit="mm")
        bound = masks.bind(torch.zeros(1, 40, 40), spacing=(2.0, 1.0))
        assert (bound.cell_shape, bound.grid_shape) == ((5, 4), (9, 11))
        assert RandomGridMasks(3).bind(torch.zeros(1, 33, 16)).cell_shape == (5, 2)


RADIAL = [
    ((5, 5), (4, 4), None),
    ((3.5, 6), (4, 7), None),
    ((10, 3), (5, 2), (2.0, 2.0)),
    ((2, 2), (3, 3), (0.4, 3.0)),
    ((4, 4), (6, 5), (9.0, 0.0)),
    ((40, 0.5), (9, 4), None),
]


class TestSlidingRadialMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (9, 40)])
    @pytest.mark.parametrize(("radius", "stride", "sigma"), RADIAL)
    def test_equals_xaitk(self, shape: tuple[int, int], radius: Any, stride: Any, sigma: Any) -> None:
        theirs = SlidingRadial(radius, stride, sigma).perturb(np.zeros((*shape, 3))).astype(np.float64)
        ours = everything(bind(SlidingRadialMasks(radius, stride, sigma), *shape))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        if sigma is None:
            np.testing.assert_array_equal(ours, theirs)

    @pytest.mark.parametrize(
        ("radius", "stride", "sigma"),
        [
            ((3, 3, 3), (4, 4, 4), None),
            ((2.5, 4, 1), (3, 5, 2), None),
            ((3, 2, 4), (4, 3, 4), (1.0, 0.5, 2.0)),
            ((2, 2, 2), (5, 5, 5), (0.0, 0.0, 1.5)),
        ],
    )
    def test_3d_equals_slow_loop(self, radius: Any, stride: Any, sigma: Any) -> None:
        shape = (11, 9, 8)
        masks = everything(bind(SlidingRadialMasks(radius, stride, sigma), *shape, dtype=torch.float64))
        np.testing.assert_allclose(masks, slow_balls(shape, radius, stride, sigma), rtol=0, atol=1e-13)

    def test_sizes_in_mm_make_a_ball(self) -> None:
        masks = SlidingRadialMasks(6, 4, 2, unit="mm")
        bound = masks.bind(torch.zeros(1, 20, 20, 8), spacing=(1.0, 2.0, 4.0))
        assert (*bound.radii, *bound.sigmas) == (6.0, 3.0, 1.5, 2.0, 1.0, 0.5)
        assert [len(each) for each in bound.centres] == [5, 10, 8]
        voxels = SlidingRadialMasks((6.0, 3.0, 1.5), (4, 2, 1), (2.0, 1.0, 0.5)).bind(torch.zeros(1, 20, 20, 8))
        assert torch.equal(bound.render([33]), voxels.render([33]))


class TestSlidingWindowMasks:
    @pytest.mark.parametrize("shape", [(20, 20), (17, 23), (9, 31)])
    @pytest.mark.parametrize(
        ("window", "stride"),
        [((5, 5), (5, 5)), ((6, 4), (3, 2)), ((3, 2), (7, 5)), ((9, 9), (1, 4)), ((1, 7), (2, 9))],
    )
    def test_equals_xaitk(self, shape: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> None:
        theirs = SlidingWindow(window, stride).perturb(np.zeros(shape))
        assert np.array_equal(everything(bind(SlidingWindowMasks(window, stride), *shape)), theirs)

    @pytest.mark.parametrize(
        ("shape", "window", "stride"),
        [((7, 5, 6), (3, 2, 4), (2, 2, 3)), ((6, 6, 4), (2, 2, 2), (2, 2, 2)), ((5, 8, 3), (1, 3, 3), (3, 4, 2))],
    )
    def test_3d_equals_slow_loop(
        self, shape: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        assert np.array_equal(
            everything(bind(SlidingWindowMasks(window, stride), *shape)), slow_windows(shape, window, stride)
        )

    @pytest.mark.parametrize(
        ("window", "stride", "same_as"), [(4, None, 2), (5, None, 2), (1, None, 1), ((4, 6), None, (2, 3)), ([3], 2, 2)]
    )
    def test_one_number_and_default_stride(self, window: object, stride: object, same_as: object) -> None:
        """One number stands for all axes, and the default stride is half of the window."""
        ours = everything(bind(SlidingWindowMasks(window, stride), 12, 13))
        w, s = (tuple(np.broadcast_to(v, 2).tolist()) for v in (window, same_as))
        assert np.array_equal(ours, slow_windows((12, 13), w, s))

    @pytest.mark.parametrize(
        ("window", "stride", "spacing", "same_window", "same_stride"),
        [
            (20, 10, (1.0, 2.0, 5.0), (20, 10, 4), (10, 5, 2)),
            ((6, 5, 4.9), (6, 5, 4.9), (4.0, 2.0, 10.0), (2, 3, 1), (2, 3, 1)),  # 1.5, 2.5 and 0.49 voxels
            (10, None, (2.5, 4.0, 9.0), (4, 3, 1), (2, 1, 1)),
        ],
    )
    def test_sizes_in_mm(
        self, window: object, stride: object, spacing: tuple, same_window: tuple, same_stride: tuple
    ) -> None:
        image = torch.zeros(1, 21, 12, 5)
        in_mm = SlidingWindowMasks(window, stride, unit="mm").bind(image, spacing=spacing)
        in_voxels = SlidingWindowMasks(same_window, same_stride).bind(image, spacing=spacing)
        assert in_mm.key == in_voxels.key
        assert torch.equal(in_mm.render(range(len(in_mm))), in_voxels.render(range(len(in_voxels))))


class TestMultiScaleWindowMasks:
    @pytest.mark.parametrize("shape", [(16, 13), (7, 6, 5)])
    @pytest.mark.parametrize(("window", "stride"), [(4, None), (5, 3)])
    def test_equals_slow_loop(self, shape: tuple[int, ...], window: int, stride: int | None) -> None:
        expected = []
        for level in range(3):
            edge = max(1, window // 2**level)
            expected.append(slow_windows(shape, edge, max(1, edge // 2 if stride is None else stride // 2**level)))
        ours = everything(bind(MultiScaleWindowMasks(window, 3, stride), *shape))
        np.testing.assert_array_equal(ours, np.concatenate(expected))

    def test_one_level_is_sliding_windows(self) -> None:
        one = bind(MultiScaleWindowMasks((5, 3), 1, (2, 2), smooth=2), 12, 11)
        other = bind(SlidingWindowMasks((5, 3), (2, 2), smooth=2), 12, 11)
        assert torch.equal(one.render(range(len(one))), other.render(range(len(other))))

    def test_a_level_that_brings_nothing_new_is_left_out(self) -> None:
        assert bind(MultiScaleWindowMasks(2, 5), 8, 8).window_shapes == [(2, 2), (1, 1)]

    def test_sizes_in_mm(self) -> None:
        bound = MultiScaleWindowMasks(12, 2, unit="mm").bind(torch.zeros(1, 20, 20), spacing=(1.0, 3.0))
        assert bound.window_shapes == [(12, 4), (6, 2)]


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
