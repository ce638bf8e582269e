from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.estimators import SHAPES, bound_with_scores, map_of, slow_occlusion

from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (2, 4)])
def test_occlusion_equals_slow_loop(shape: tuple[int, ...], window: int, stride: int) -> None:
    bound, scores, reference = bound_with_scores(SlidingWindowMasks(window, stride), shape)
    masks = bound.render(range(len(bound)))[:, 0].numpy()
    ours = map_of(OcclusionScoring(), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_occlusion(masks, scores.numpy(), reference.numpy()), rtol=0, atol=1e-12)


def test_occlusion_equals_slow_loop_with_smooth_masks() -> None:
    bound, scores, reference = bound_with_scores(RISEMasks(12, 3, seed=1), (9, 7))
    masks = bound.render(range(12))[:, 0].numpy()
    ours = map_of(OcclusionScoring(), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_occlusion(masks, scores.numpy(), reference.numpy()), rtol=0, atol=1e-11)


def test_occlusion_is_0_where_no_window_comes() -> None:
    bound, scores, reference = bound_with_scores(SlidingWindowMasks(2, 4), (8, 8))
    unseen = bound.render(range(len(bound)))[:, 0].min(dim=0).values == 1
    assert int(unseen.sum()) == 64 - 4 * 4
    maps = map_of(OcclusionScoring(), bound, scores, reference)
    assert bool((maps[:, unseen] == 0).all())
    assert bool((maps[:, ~unseen] != 0).all())


def test_occlusion_of_a_linear_score_by_hand() -> None:
    """The score sums columns 2 to 4 of a line of ones; a window of 2 every 2 hides 0, 1, 2 of them."""
    bound = SlidingWindowMasks((1, 2), (1, 2)).bind(torch.zeros(1, 1, 8, dtype=torch.float64))
    masks = bound.render(range(4))[:, 0]
    scores = masks[:, 0, 2:5].sum(dim=1, keepdim=True)
    maps = map_of(OcclusionScoring(), bound, scores, torch.tensor([3.0], dtype=torch.float64))
    assert maps[0, 0].tolist() == [0, 0, 2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, -1e6])
@pytest.mark.parametrize("masks", [SlidingWindowMasks(3, 2), SlidingWindowMasks(2, 5), RISEMasks(20, 4)])
def test_a_constant_network_gives_a_zero_occlusion_map(value: float, masks: RISEMasks | SlidingWindowMasks) -> None:
    bound, scores, reference = bound_with_scores(masks, (9, 7), dtype=torch.float32)
    maps = map_of(OcclusionScoring(), bound, torch.full_like(scores, value), torch.full_like(reference, value))
    assert torch.equal(maps, torch.zeros(3, 9, 7))


def test_noise_is_rounding_where_nothing_is_left_to_chance() -> None:
    for windows in (SlidingWindowMasks(3, 2), ChannelMasks(SlidingWindowMasks(3, 2))):
        bound, scores, reference = bound_with_scores(windows, (9, 7), dtype=torch.float32)
        noise = OcclusionScoring().noise(bound, range(len(bound)), 70 + scores, reference)
        assert noise is not None
        torch.testing.assert_close(noise, (70 + scores).abs().amax(dim=0) * 2**-20)
    for masks in (RISEMasks(9, 3), IndependentChannelMasks(RISEMasks(9, 3))):
        bound, scores, reference = bound_with_scores(masks, (9, 7))
        assert OcclusionScoring().noise(bound, range(9), scores, reference) is None
