from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.ndimage import gaussian_filter

from monai_saliency.fills.blur import BlurFill
from monai_saliency.fills.constant import ConstantFill, MeanFill
from monai_saliency.fills.named import fill_in_unit


@pytest.mark.parametrize("fill", [ConstantFill([0.5, 2.0]), MeanFill(), BlurFill(1.5)], ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_image_alone_in_its_precision_and_untouched(
    fill: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    images = torch.randn(3, 2, 9, 11, dtype=dtype) + torch.tensor([0.0, 50.0, -50.0], dtype=dtype).reshape(3, 1, 1, 1)
    before = images.clone()
    filled = fill(images)
    torch.testing.assert_close(filled, torch.cat([fill(image[None]) for image in images]), rtol=1e-6, atol=1e-6)
    assert (filled.dtype, filled.shape) == (dtype, images.shape)
    assert torch.equal(images, before)


def test_constant_and_mean_by_hand() -> None:
    images = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    assert torch.equal(ConstantFill()(images), torch.zeros_like(images))
    assert torch.equal(ConstantFill(0.1)(images), torch.full_like(images, 0.1))
    assert ConstantFill([-1.0, 0.5, 2.0])(images)[1, :, 2, 3].tolist() == [-1.0, 0.5, 2.0]
    images = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    assert torch.equal(MeanFill()(images), torch.tensor([3.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2))


@pytest.mark.parametrize(("spatial", "sigma"), [((17, 12), 2.0), ((17, 12), (0.5, 3.0)), ((9, 8, 7), [2.5, 0.7, 1.0])])
def test_blur_fill_equals_scipy(spatial: tuple[int, ...], sigma: object) -> None:
    images = torch.randn(2, 2, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    filled = BlurFill(sigma)(images)
    for b in range(2):
        for c in range(2):
            expected = gaussian_filter(images[b, c].numpy(), sigma, mode="nearest", truncate=4)
            torch.testing.assert_close(filled[b, c], torch.from_numpy(expected), rtol=0, atol=1e-10)


def test_blur_fill_ignores_autocast() -> None:
    images = torch.randn(1, 1, 12, 12)
    expected = BlurFill(2.0)(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(BlurFill(2.0)(images), expected)


def test_words_for_fills() -> None:
    images = torch.rand(1, 2, 5, 6)
    for word, fill in {"mean": MeanFill(), "blur": BlurFill()}.items():
        assert torch.equal(fill_in_unit(word)(images), fill(images))
    with pytest.raises(
        ValueError,
        match=r"`saliency_fill` must be one of \['auto', 'blur', .*, 'inpaint', 'mean', 'mirror'\], got 'b'",
    ):
        fill_in_unit("b", id="saliency_fill")
    with pytest.raises(ValueError, match="`fill_unit` scan needs a `fill` that is a number, got a MeanFill"):
        fill_in_unit("mean", "scan")


def test_errors() -> None:
    with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
        ConstantFill([1, 2, 3])(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="`sigma` must be a number above 0, got 0"):
        BlurFill(0)
    with pytest.raises(ValueError, match=r"`sigma` must be one number or one per spatial axis \(3\), got \[1, 2\]"):
        BlurFill([1, 2])(torch.zeros(1, 1, 4, 4, 4))
