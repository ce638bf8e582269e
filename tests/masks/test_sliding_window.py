from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

from monai_saliency.masks.sliding_window import SlidingWindowMasks


def slow_windows(shape: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
    rows = []
    for size, w, step in zip(shape, window, stride, strict=True):
        starts = list(range(0, size, step))
        overhang = w - (size - starts[-1])
        rows.append([start - overhang // 2 for start in starts])
    masks = []
    for corner in itertools.product(*rows):
        mask = np.ones(shape, dtype=bool)
        for voxel in itertools.product(*map(range, shape)):
            if all(c <= v < c + w for v, c, w in zip(voxel, corner, window, strict=True)):
                mask[voxel] = False
        masks.append(mask)
    return np.stack(masks)


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
