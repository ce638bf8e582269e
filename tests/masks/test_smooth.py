"""Smooth edges: by hand, against a slow average, and on remembered patches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything

from monai_saliency.masks import RegionMasks, SlidingWindowMasks

WIDTHS = [2, 3, 4.5, (1, 5)]


def boxes_of_regions(image: torch.Tensor, _: Any) -> torch.Tensor:
    labels = torch.zeros(1, *image.shape[1:], dtype=torch.long)
    labels[:, 2:6, :5], labels[:, 4:, 6:], labels[:, 6:, :2] = 1, 2, 3
    return labels


def slow_average(hidden: np.ndarray, widths: tuple[float, ...]) -> np.ndarray:
    """A voxel's box of ``widths`` is filled with 180 points an axis, of which each lies in one voxel."""
    found = np.zeros(hidden.shape)
    for voxel in itertools.product(*map(range, hidden.shape)):
        axes = []
        for at, width, size in zip(voxel, widths, hidden.shape, strict=True):
            points = at + 0.5 + (np.arange(180) + 0.5) / 180 * width - width / 2
            axes.append(np.clip(np.floor(points).astype(int), 0, size - 1))
        found[voxel] = hidden[np.ix_(*axes)].mean()
    return found


def line(masks: Any, size: int = 10, **kwargs: Any) -> Any:
    return masks.bind(torch.zeros(1, 1, size, dtype=torch.float64), **kwargs)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (0, [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
        (1, [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
        (2, [1, 1, 1, 3 / 4, 1 / 4, 0, 0, 1 / 4, 3 / 4, 1]),
        (3, [1, 1, 1, 2 / 3, 1 / 3, 0, 0, 1 / 3, 2 / 3, 1]),
        (4, [1, 1, 7 / 8, 5 / 8, 3 / 8, 1 / 8, 1 / 8, 3 / 8, 5 / 8, 7 / 8]),
    ],
)
def test_a_window_by_hand(width: float, expected: list[float]) -> None:
    windows = line(SlidingWindowMasks((1, 4), (1, 4), smooth=(0, width)))
    (index,) = [i for i, first in enumerate(windows.codes(range(3))["first"][:, 1]) if first == 3]
    # Windows begin at -1, 3 and 7: the one at 3 is moved by a voxel to where it is written above.
    rolled = windows.render([index])[0, 0, 0].roll(1)
    assert rolled[1:].tolist() == pytest.approx(expected[1:], abs=1e-12)
    labels = torch.tensor([[[0, 0, 0, 0, 1, 1, 1, 1, 0, 0]]])
    regions = line(RegionMasks(smooth=(0, width)), labels=labels)
    assert regions.render([0])[0, 0, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_nothing_rises_at_the_border() -> None:
    """The window that is cut at the border hides the voxels there completely."""
    bound = line(SlidingWindowMasks((1, 4), (1, 4), smooth=(0, 2)))
    assert bound.render([0])[0, 0, 0].tolist() == [0, 0, 0.25, 0.75, 1, 1, 1, 1, 1, 1]
    labels = torch.tensor([[[1, 1, 1, 0, 0, 0, 0, 0, 2, 2]]])
    bound = line(RegionMasks(smooth=2), labels=labels)
    found = bound.render([0, 1])[:, 0, 0]
    torch.testing.assert_close(
        found,
        torch.tensor([[0, 0, 0.25, 0.75, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0.75, 0.25, 0]]).double(),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["windows", "regions"])
def test_the_slow_average(kind: str, width: Any) -> None:
    args: Any = {"window_size": (4, 3), "stride": 3} if kind == "windows" else {"regions": boxes_of_regions}
    masks: Any = SlidingWindowMasks if kind == "windows" else RegionMasks
    crisp, smooth = everything(bind(masks(**args), 9, 8)), everything(bind(masks(**args, smooth=width), 9, 8))
    widths = tuple(np.broadcast_to(width, 2).tolist())
    for hard, soft in zip(crisp, smooth, strict=True):
        expected = 1 - slow_average(1 - hard, widths)
        np.testing.assert_allclose(soft, expected, rtol=0, atol=1e-6)  # shares are multiples of 2^-24


def test_windows_side_by_side_hide_everything_once() -> None:
    """Where crisp windows tile the image, so do smooth ones: what one keeps at its edge its neighbours hide."""
    bound = bind(SlidingWindowMasks((4, 3), (4, 3), smooth=2.5), 12, 9, dtype=torch.float64)
    total = (1 - bound.render(range(len(bound)))).sum(dim=0)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
