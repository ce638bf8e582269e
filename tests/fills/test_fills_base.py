"""What holds for every fill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from monai_saliency.fills.blur import BlurFill
from monai_saliency.fills.constant import ConstantFill, MeanFill


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
