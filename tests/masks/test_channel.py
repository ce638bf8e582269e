from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from helpers.estimators import slow_rise

from monai_saliency import (
    ClassScore,
    ConstantFill,
    channel_occlusion,
    rise,
    sliding_window,
)
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks

TARGET = ClassScore([0], "none")


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class TestChannelMasks:
    def test_one_channel_at_a_time_by_hand(self) -> None:
        bound = ChannelMasks(SlidingWindowMasks((1, 2), (1, 2))).bind(torch.zeros(2, 1, 4))
        kept, first, second = [[1, 1, 1, 1]], [[0, 0, 1, 1]], [[1, 1, 0, 0]]
        expected = [[first, kept], [kept, first], [second, kept], [kept, second]]
        assert bound.render(range(4)).tolist() == expected
        assert bound.codes([2, 1])["channel"].tolist() == [0, 1]
        assert bound.codes([2, 1])["first"].tolist() == [[0, 2], [0, 0]]

    def test_independent_channels_take_the_others_draws_in_order(self) -> None:
        image = torch.zeros(3, 9, 8)
        bound = IndependentChannelMasks(RISEMasks(5, 3, 0.4, seed=7)).bind(image)
        flat = RISEMasks(15, 3, 0.4, seed=7).bind(image).render(range(15))
        assert torch.equal(bound.render(range(5)), flat.reshape(5, 3, 9, 8))
        assert bound.codes(range(2))["grid"].shape == (2, 3, 3, 3)

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="SlidingWindowMasks has no `num_masks`: use ChannelMasks"):
            IndependentChannelMasks(SlidingWindowMasks(3))
        with pytest.raises(ValueError, match="RegionMasks has no `num_masks`: use ChannelMasks"):
            IndependentChannelMasks(RegionMasks())
        with pytest.raises(ValueError, match="have masks for each channel or fill already"):
            ChannelMasks(ChannelMasks(SlidingWindowMasks(3))).bind(torch.zeros(2, 8, 8))


class TestMapsOfChannels:
    @pytest.mark.parametrize("shape", [(7, 6), (5, 4, 6)])
    def test_occlusion_equals_captum(self, shape: tuple[int, ...]) -> None:
        """Captum hides windows of one channel when their first edge is 1, sums drops and divides by the windows."""
        image, weight = images(1, 3, *shape), weights(3, *shape)

        def network(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * weight / 9).flatten(1).sum(1, keepdim=True) ** 3

        window, stride = (2,) * len(shape), (1,) * len(shape)
        ours = sliding_window(window, stride, per_channel=True, target=TARGET)(image, network)[0]
        theirs = Occlusion(lambda x: network(x)[:, 0]).attribute(image, (1, *window), strides=(1, *stride))[0]
        # Ours also slide over the border by half a window; the voxels that only whole windows cover are the same.
        inside = (slice(None), *[slice(1, -1)] * len(shape))
        torch.testing.assert_close(ours[inside].float(), theirs[inside].float(), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("form", ["centred", "debiased", "plain"])
    def test_rise_equals_a_slow_loop_for_each_channel_alone(self, form: str) -> None:
        image, weight = images(1, 2, 6, 5), weights(2, 6, 5)
        masks = IndependentChannelMasks(RISEMasks(9, 3, 0.4, seed=5)).bind(image[0])

        def network(x: torch.Tensor) -> torch.Tensor:
            score = (x * weight).flatten(1).sum(1, keepdim=True)
            return torch.cat([score, score**2], dim=1)

        explain = rise(9, 3, 0.4, 5, True, form, target=ClassScore([0, 1], "none"))
        maps = explain(image, network)[0]
        rendered = masks.render(range(9))
        scores = network(rendered * image)
        for k, c in itertools.product(range(2), range(2)):
            expected = slow_rise(rendered[:, c].numpy(), scores[:, k : k + 1].numpy(), 0.4, form)
            np.testing.assert_allclose(maps[2 * k + c], expected[0], rtol=0, atol=1e-12)

    def test_which_modality_by_hand(self) -> None:
        """A product of two channels' means: hiding either takes all of it; a third adds its own."""

        def network(x: torch.Tensor) -> torch.Tensor:
            means = x.flatten(2).mean(2)
            return (means[:, 0] * means[:, 1] + means[:, 2])[:, None]

        image = torch.stack([torch.full((4, 4), v) for v in (2.0, 3.0, 5.0)])[None]
        explain = channel_occlusion(target=TARGET, fill=ConstantFill([0.0, 1.0, 4.0]))
        (explanation,) = explain.explain(image, network)
        assert explanation.num_forwards == 4
        assert explanation.saliency.flatten(1).unique(dim=1).flatten().tolist() == [6.0, 4.0, 1.0]
        assert [(label, channel) for label, channel, _ in explanation.explained] == [(0, 0), (0, 1), (0, 2)]
