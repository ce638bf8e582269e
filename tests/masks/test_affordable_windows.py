"""How fine windows on the patch grid are where nobody says it: as fine as 50 predictions allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.inferers import SlidingWindowInferer

from monai_saliency.inferers.patch_plan import plan
from monai_saliency.masks.patch_window import PatchWindowMasks


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(1, *shape, device="meta")


def test_a_ct_under_the_patches_of_a_spleen_model() -> None:
    """Counted, not estimated: patches of 96^3 with half overlap on 270 x 270 x 225 voxels."""
    inferer = SlidingWindowInferer((96, 96, 96), overlap=0.5)
    counts = plan(PatchWindowMasks(inferer), inferer, empty(270, 270, 225))
    assert counts.patches == 100
    assert 5 < counts.forwards / counts.patches <= 50
    assert counts.plain / counts.patches > 150  # predictions without remembered patches


def test_one_patch_is_divided() -> None:
    """Windows of one step would hide the whole image."""
    bound = PatchWindowMasks(SlidingWindowInferer((96, 96, 96), overlap=0.5)).bind(empty(60, 60, 60))
    assert len(bound) == 27
    assert bound.window_shape == (20, 20, 20)


def test_where_patches_overlap_much_windows_are_longer_than_a_step() -> None:
    inferer = SlidingWindowInferer((64, 64, 64), overlap=0.875)
    step = PatchWindowMasks(inferer, 1).bind(empty(200, 200, 200)).window_shape[0]
    bound = PatchWindowMasks(inferer).bind(empty(200, 200, 200))
    assert bound.window_shape[0] == 3 * step
    counts = plan(PatchWindowMasks(inferer), inferer, empty(200, 200, 200))
    assert counts.forwards / counts.patches <= 50


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 60), st.integers(8, 24)), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]),
)
def test_never_more_than_50_predictions(axes: list[tuple[int, int]], overlap: float) -> None:
    """By the patches that each window touches, which :func:`plan` counts one by one."""
    shape, roi = zip(*axes, strict=True)
    inferer = SlidingWindowInferer(roi, overlap=overlap)
    masks = PatchWindowMasks(inferer)
    counts = plan(masks, inferer, empty(*shape))
    assert counts.forwards <= 50 * counts.patches
    assert len(masks.bind(empty(*shape))) > 1


@pytest.mark.parametrize("divide", [1, 2, 3])
def test_a_number_is_taken_as_it_is(divide: int) -> None:
    inferer = SlidingWindowInferer((48, 48), overlap=0.5)
    assert PatchWindowMasks(inferer, divide).bind(empty(144, 144)).window_shape == (24 // divide,) * 2
