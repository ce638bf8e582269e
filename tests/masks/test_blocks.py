"""Blocks of windows: by hand, and in plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency.masks.blocks import BoundBlockMasks


def blocks(shape: tuple[int, ...], window: int = 4, levels: int = 3, keep: float = 0.3) -> BoundBlockMasks:
    image = torch.zeros(1, *shape)
    return BoundBlockMasks(ms.HierarchicalMasks(window, levels, keep).bind(image), image)


@pytest.mark.parametrize("shape", [(20, 16), (11, 22), (9, 16, 13)])
def test_each_hides_two_windows_along_each_axis(shape: tuple[int, ...]) -> None:
    """In plain loops, and every voxel is hidden once; the windows inside are those that hide a part of it."""
    bound = blocks(shape)
    masks = bound.render(range(len(bound)))[:, 0]
    corners = itertools.product(*(range(0, n, 8) for n in shape))
    for mask, corner in zip(masks, corners, strict=True):
        expected = torch.ones(shape)
        expected[tuple(slice(at, at + 8) for at in corner)] = 0
        assert torch.equal(mask, expected)
    assert torch.equal((1 - masks).sum(dim=0), torch.ones(shape))
    windows = bound.windows.render(bound.windows.levels[0])[:, 0]
    for number, mask in enumerate(masks):
        inside = [i for i, window in enumerate(windows) if bool(((window == 0) & (mask == 0)).any())]
        assert bound.inside(number) == inside


def test_what_is_refined_holds_most_of_what_was_taken() -> None:
    """By hand: windows of 4 on 16 x 24 are 4 x 6, blocks 2 x 3; a window has 4 parts of 2 x 2."""
    bound = blocks((16, 24))
    none = torch.zeros(0)
    assert bound.finer(torch.tensor([0.0, 0, 0, 0, 9, 0]), [], none) == [14, 15, 20, 21]
    assert bound.finer(torch.tensor([0.0, 0, 0, 0, 9, 2]), [], none) == [14, 15, 20, 21]  # 9 of 11 are enough
    assert bound.finer(torch.tensor([0.0, 0, 0, 0, 9, 3]), [], none) == [14, 15, 16, 17, 20, 21, 22, 23]
    assert len(bound.finer(torch.ones(6), [], none)) == 16  # four blocks meet at a corner
    assert bound.finer(torch.tensor([0.0, -1, -1, 0, 0, 0]), [], none) == []
    windows, taken = [14, 15, 20, 21], torch.tensor([0.0, 8, 1, 0])
    parts = bound.finer(torch.zeros(6), windows, taken)
    assert [bound.windows.hidden_boxes([part])[0] for part in parts] == [
        (slice(y, y + 2), slice(x, x + 2)) for y in (8, 10) for x in (12, 14)
    ]
    last = bound.finer(torch.zeros(6), [*windows, *parts], torch.cat([taken, torch.tensor([0.0, 5, 0, 0])]))
    assert [bound.windows.hidden_boxes([part])[0] for part in last] == [
        (slice(y, y + 1), slice(x, x + 1)) for y in (8, 9) for x in (14, 15)
    ]
    assert bound.finer(torch.zeros(6), [*windows, *parts, *last], torch.ones(12)) == []


def test_what_is_divided_adds_up() -> None:
    """By hand: block 4's 8 go to its second and third window, 3 to 1; the other blocks keep theirs, evenly."""
    bound = blocks((16, 24), levels=2)
    drops = torch.tensor([1.6, 0, -0.8, 0, 8, 0], dtype=torch.float64)
    found = bound.spread(drops, [14, 15, 20, 21], torch.tensor([-1.0, 6, 2, 0], dtype=torch.float64))
    expected = np.zeros((8, 12))  # windows of 2 x 2 voxels
    expected[:4, :4], expected[:4, 8:] = 0.1, -0.05
    expected[4:6, 6:8], expected[6:, 4:6] = 1.5, 0.5
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert found.sum() == pytest.approx(float(drops.sum()))


@pytest.mark.parametrize("shape", [(16, 24), (30, 17), (12, 16, 24)])
def test_at_most(shape: tuple[int, ...]) -> None:
    bound, generator = blocks(shape), np.random.default_rng(0)
    for _ in range(20):
        drops = torch.from_numpy(generator.uniform(0.9, 1, len(bound)))
        seen: list[int] = []
        while more := bound.finer(drops, seen, torch.from_numpy(generator.uniform(0.9, 1, len(seen)))):
            assert not set(more) & set(seen)
            seen += more
        assert len(bound) + len(seen) <= bound.at_most
