from __future__ import annotations

import pytest
import torch

from monai_saliency.fills.constant import ConstantFill, MeanFill


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


def test_wrong_number_of_values() -> None:
    with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
        ConstantFill([1, 2, 3])(torch.zeros(1, 2, 4, 4))
