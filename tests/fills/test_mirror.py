from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError

TARGET = ms.ClassScore([0], "none")
# Rows: image axes run to the scanner's y, -x and z, oblique by 20 degrees about z.
TURNED = np.eye(4)
TURNED[:2, :2] = 2 * np.array([[np.sin(0.35), -np.cos(0.35)], [np.cos(0.35), np.sin(0.35)]])


def symmetric(size: int, total: int) -> torch.Tensor:
    """An image ``(1, 5, size, 3)`` that is symmetric where voxel ``total - i`` mirrors voxel i of axis 1."""
    rng = torch.Generator().manual_seed(size)
    half = torch.rand(1, 5, 2 * size, 3, generator=rng)
    return half[:, :, (2 * torch.arange(size) - total).abs()]


@pytest.mark.parametrize(("size", "total"), [(20, 19), (20, 22), (21, 20), (21, 17)])
def test_the_most_symmetric_plane_of_the_affines_left_right_axis(size: int, total: int) -> None:
    image = symmetric(size, total)
    fill = ms.MirrorFill().bind(Case("a", image, affine=TURNED))
    i = torch.arange(max(0, total - size + 1), min(size, total + 1))
    assert torch.equal(fill(image[None])[0, :, :, i], image[:, :, total - i])
    torch.testing.assert_close(fill(image[None])[0, :, :, i], image[:, :, i])  # so a map of it is zero
    inside = ms.MirrorFill(plane=total / 2).bind(Case("a", image, affine=TURNED))
    assert torch.equal(inside(image[None]), fill(image[None]))
    maps = ms.sliding_window(2, target=TARGET, fill=ms.MirrorFill())(
        MetaTensor(image[None, :, :, i], affine=torch.from_numpy(TURNED)), lambda x: x.flatten(1)[:, :1]
    )
    assert float(maps.abs().max()) == 0


def test_what_differs_between_the_sides_is_what_shows() -> None:
    image = symmetric(20, 19)
    image[0, 2, 4, 1] += 3
    network: Any = lambda x: x.flatten(1).sum(dim=1, keepdim=True)  # noqa: E731
    maps = ms.sliding_window(1, target=TARGET, fill=ms.MirrorFill(axis=1))(image[None], network)
    expected = torch.zeros(5, 20, 3)
    expected[2, 4, 1], expected[2, 15, 1] = 3, -3
    torch.testing.assert_close(maps[0, 0], expected, rtol=0, atol=1e-4)


def test_errors() -> None:
    image = torch.rand(1, 1, 6, 6)
    for axis, affine, words in [
        (None, None, "MirrorFill needs the image's affine to know left and right"),
        (None, np.eye(4)[[2, 0, 1, 3]], "no axis of the image goes from left to right"),
        (2, None, "`axis` must be below 2, the number of spatial axes, got 2"),
    ]:
        explain = ms.rise(4, 2, target=TARGET, fill=ms.MirrorFill(axis))
        with pytest.raises(CaseError, match=f"case a: .*{words}"):
            explain.explain(image, torch.nn.Flatten(), cases=[Case("a", affine=affine)])
