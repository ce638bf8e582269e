from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.estimators import SHAPES, bound_with_scores, map_of, slow_rise

from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.masks.rise import RISEMasks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("p1", "debias"), [(0.5, None), (0.3, None), (0.5, 0.5), (0.3, 0.3)])
def test_rise_equals_slow_loop(shape: tuple[int, ...], p1: float, debias: float | None) -> None:
    bound, scores, reference = bound_with_scores(RISEMasks(11, 3, p1, seed=1), shape)
    masks = bound.render(range(11))[:, 0].numpy()
    ours = map_of(RISEScoring(debias or 0.0), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_rise(masks, scores.numpy(), debias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("p1", [0.0, 1.0])
def test_rise_of_masks_that_all_agree_is_finite(p1: float) -> None:
    """Masks that keep nothing say nothing; masks that keep all say one thing of every voxel."""
    bound, scores, reference = bound_with_scores(RISEMasks(6, 3, p1), (5, 6))
    plain = map_of(RISEScoring(), bound, scores, reference)
    expected = scores.mean(dim=0) * p1
    torch.testing.assert_close(plain, expected[:, None, None].expand(3, 5, 6))
    debiased = map_of(RISEScoring(1.0), *bound_with_scores(RISEMasks(6, 3, 1.0), (5, 6)))
    torch.testing.assert_close(debiased, torch.zeros_like(plain), rtol=0, atol=1e-15)


@pytest.mark.parametrize("p1", [-0.1, 1.5])
def test_p1_out_of_range(p1: float) -> None:
    with pytest.raises(ValueError, match=rf"`p1` must be in \[0, 1\], got {p1}"):
        RISEScoring(p1)
