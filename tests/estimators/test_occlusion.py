from __future__ import annotations

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from helpers.estimators import bound_with_scores, map_of
from helpers.numpy_boxes import CLASSES, BlackBox

from monai_saliency import ClassScore, ConstantFill, sliding_window
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.masks.sliding_window import SlidingWindowMasks


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


@pytest.mark.parametrize(
    ("shape", "window"),
    [((1, 12, 12), (3, 3)), ((3, 12, 20), (4, 5)), ((2, 8, 6, 9), (2, 3, 3)), ((1, 6, 6, 6), (6, 2, 3))],
)
@pytest.mark.parametrize("fill", [0.0, 0.7])
def test_occlusion_equals_captum_with_magnitudes(shape: tuple[int, ...], window: tuple[int, ...], fill: float) -> None:
    """Windows of captum start at the corner and ours are centred: both lie alike where nothing hangs over, that is
    with a stride of one window where windows divide the image. It hides channels apart unless told otherwise.
    """
    image, network = torch.from_numpy(np.random.default_rng(2).normal(size=(1, *shape))), BlackBox(shape).classify
    maps = sliding_window(window, window, target=ClassScore("all", "none"), fill=ConstantFill(fill))(image, network)
    whole = (shape[0], *window)
    for k in range(CLASSES):
        theirs = Occlusion(network).attribute(image, whole, strides=whole, baselines=fill, target=k)
        # One value for all channels of a window; float32, of which 4e-8 is reached.
        assert torch.equal(theirs, theirs[:, :1].expand_as(theirs))
        assert float((maps[0, k] - theirs[0, 0]).abs().max() / theirs.abs().max()) < 1e-6
