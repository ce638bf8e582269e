from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.ndimage import gaussian_filter

from monai_saliency.fills import BlurFill, ConstantFill, MeanFill


def test_constant_fill_by_hand() -> None:
    images = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    assert torch.equal(ConstantFill()(images), torch.zeros_like(images))
    assert torch.equal(ConstantFill(0.1)(images), torch.full_like(images, 0.1))


@pytest.mark.parametrize("spatial", [(4, 5), (2, 3, 4)])
def test_constant_fill_one_value_a_channel(spatial: tuple[int, ...]) -> None:
    filled = ConstantFill([-1.0, 0.5, 2.0])(torch.zeros(2, 3, *spatial))
    for channel, value in enumerate((-1.0, 0.5, 2.0)):
        assert torch.equal(filled[:, channel], torch.full((2, *spatial), value))


def test_mean_fill_by_hand() -> None:
    images = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    expected = torch.tensor([3.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2)
    assert torch.equal(MeanFill()(images), expected)


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


@pytest.mark.parametrize("fill", [ConstantFill([0.5, 2.0]), MeanFill(), BlurFill(1.5)], ids=lambda f: type(f).__name__)
class TestAnyFill:
    def test_each_image_alone(self, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        images = torch.randn(3, 2, 9, 11, dtype=torch.float64) + torch.tensor([0.0, 50.0, -50.0]).reshape(3, 1, 1, 1)
        one_by_one = torch.cat([fill(image[None]) for image in images])
        torch.testing.assert_close(fill(images), one_by_one, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_law_9_precision_and_input_untouched(
        self, fill: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> None:
        images = torch.randn(2, 2, 9, 11, dtype=dtype)
        before = images.clone()
        filled = fill(images)
        assert filled.dtype == dtype
        assert filled.shape == images.shape
        assert torch.equal(images, before)


def test_errors() -> None:
    with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
        ConstantFill([1, 2, 3])(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="`sigma` must be positive, got 0"):
        BlurFill(0)
    with pytest.raises(ValueError, match=r"`sigma` must be one number or one per spatial axis \(3\), got \[1, 2\]"):
        BlurFill([1, 2])(torch.zeros(1, 1, 4, 4, 4))
