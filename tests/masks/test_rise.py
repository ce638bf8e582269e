from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.transform import resize
from xaitk_saliency.impls.perturb_image.rise import RISEGrid

from monai_saliency.masks.rise import RISEMasks


def slow_rise(shape: tuple[int, ...], n: int, grid: tuple[int, ...], p1: float, seed: int) -> np.ndarray:
    """RISE masks, section 3.2 of the paper with xaitk-saliency's draws, in float64 and any number of dimensions."""
    cells = np.random.default_rng(seed).random((n, *grid)) < p1
    shifts = np.random.default_rng(seed)
    cell = [int(np.ceil(size / s)) for size, s in zip(shape, grid, strict=True)]
    masks = []
    for i in range(n):
        corner = [int(shifts.integers(0, edge)) for edge in cell]
        size = [(s + 1) * edge for s, edge in zip(grid, cell, strict=True)]
        stretched = resize(cells[i].astype(float), size, order=1, mode="reflect", anti_aliasing=False)
        masks.append(stretched[tuple(slice(c, c + size) for c, size in zip(corner, shape, strict=True))])
    return np.stack(masks)


class TestRISEMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (40, 17), (7, 5)])
    @pytest.mark.parametrize("s", range(1, 10))
    def test_equals_xaitk(self, shape: tuple[int, int], s: int) -> None:
        for seed, p1 in ((0, 0.5), (7, 0.25), (12345, 0.9)):
            theirs = RISEGrid(n=6, s=s, p1=p1, seed=seed, threads=0).perturb(np.zeros(shape))
            np.testing.assert_allclose(everything(bind(RISEMasks(6, s, p1, seed), *shape)), theirs, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("shape", "grid"), [((12, 9, 10), (3, 3, 3)), ((11, 6, 13), (4, 1, 2)), ((5, 7, 6), (8, 7, 2))]
    )
    def test_3d_equals_slow_loop(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
        masks = everything(bind(RISEMasks(5, grid, 0.4, seed=3), *shape, dtype=torch.float64))
        np.testing.assert_allclose(masks, slow_rise(shape, 5, grid, 0.4, seed=3), rtol=0, atol=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(
        shape=st.lists(st.integers(3, 12), min_size=2, max_size=3),
        grid=st.integers(1, 5),
        seed=st.integers(0, 2**40),
        picked=st.lists(st.integers(0, 11), max_size=8),
        more=st.integers(0, 9),
    )
    def test_law_2_a_mask_depends_on_seed_index_and_shape_only(
        self, shape: list[int], grid: int, seed: int, picked: list[int], more: int
    ) -> None:
        bound = bind(RISEMasks(12, grid, 0.5, seed), *shape)
        masks = bound.render(range(12))
        assert torch.equal(bound.render(picked), masks[picked])
        assert torch.equal(bound.render(np.asarray(picked, dtype=int)), masks[picked])
        assert torch.equal(bound.render(range(3, 9)), masks[3:9])
        assert torch.equal(bound.render(range(11, -1, -2)), masks.flip(0)[::2])
        assert torch.equal(bind(RISEMasks(12 + more, grid, 0.5, seed), *shape).render(range(12)), masks)
        several_channels = RISEMasks(12, grid, 0.5, seed).bind(torch.rand(3, *shape))
        assert torch.equal(several_channels.render(range(12)), masks)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_kept_rounds_to_above_1(self, dtype: torch.dtype) -> None:
        """At p1 = 1 each voxel is two weights on each axis, which sum to 1 in every arithmetic."""
        for size, grid in itertools.product((13, 64, 97), (1, 3, 5, 7)):
            masks = bind(RISEMasks(20, grid, p1=1.0), size, size + 2, 11, dtype=dtype).render(range(20))
            assert float(masks.max()) == 1.0
            assert float(masks.min()) >= 1 - 8 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("p1", [0.2, 0.7])
    def test_keep_rate_and_range(self, p1: float) -> None:
        bound = bind(RISEMasks(400, 6, p1, seed=2), 24, 30)
        masks = everything(bound)
        assert masks.min() >= 0
        assert masks.max() <= 1
        # 400 masks of 36 cells: five standard errors of the rate of cells.
        margin = 5 * np.sqrt(p1 * (1 - p1) / (400 * 36))
        assert abs(bound.codes(range(400))["grid"].mean() - p1) < margin
        # Every voxel is kept equally often: five standard errors of a mean over masks.
        assert np.abs(masks.mean(axis=0) - p1).max() < 5 * np.sqrt(p1 * (1 - p1) / 400)
