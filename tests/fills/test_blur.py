from __future__ import annotations

import pytest
import torch
from scipy.ndimage import gaussian_filter

from monai_saliency.fills.blur import BlurFill


@pytest.mark.parametrize(
    ("spatial", "sigma"), [((17, 12), 2.0), ((17, 12), (0.5, 3.0)), ((9, 8, 7), 1.3), ((9, 8, 7), [2.5, 0.7, 1.0])]
)
def test_blur_fill_equals_scipy(spatial: tuple[int, ...], sigma: object) -> None:
    images = torch.randn(2, 2, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    filled = BlurFill(sigma)(images)
    for b in range(2):
        for c in range(2):
            expected = gaussian_filter(images[b, c].numpy(), sigma, mode="nearest", truncate=4)
            torch.testing.assert_close(filled[b, c], torch.from_numpy(expected), rtol=0, atol=1e-10)


def test_blur_fill_keeps_a_flat_image_and_its_borders() -> None:
    flat = torch.full((1, 1, 12, 12), 7.0, dtype=torch.float64)
    torch.testing.assert_close(BlurFill(3.0)(flat), flat, rtol=0, atol=1e-12)


def test_blur_fill_ignores_autocast() -> None:
    images = torch.randn(1, 1, 12, 12)
    expected = BlurFill(2.0)(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(BlurFill(2.0)(images), expected)


def test_errors() -> None:
    with pytest.raises(ValueError, match="`sigma` must be a number above 0, got 0"):
        BlurFill(0)
    with pytest.raises(ValueError, match=r"`sigma` must be one number or one per spatial axis \(3\), got \[1, 2\]"):
        BlurFill([1, 2])(torch.zeros(1, 1, 4, 4, 4))
