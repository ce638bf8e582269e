from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.estimators import SHAPES, bound_with_scores, map_of, slow_rise

from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.channel import IndependentChannelMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks

FORMS = ["centred", "debiased", "plain"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p1", [0.5, 0.3])
@pytest.mark.parametrize("form", FORMS)
def test_rise_equals_slow_loop(shape: tuple[int, ...], p1: float, form: str) -> None:
    bound, scores, reference = bound_with_scores(RISEMasks(11, 3, p1, seed=1), shape)
    masks = bound.render(range(11))[:, 0].numpy()
    ours = map_of(RISEScoring(p1, form), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_rise(masks, scores.numpy(), p1, form), rtol=0, atol=1e-12)


@pytest.mark.parametrize("p1", [0.0, 1.0])
def test_rise_of_masks_that_all_agree_is_finite(p1: float) -> None:
    """Masks that keep nothing say nothing; masks that keep all say one thing of every voxel."""
    bound, scores, reference = bound_with_scores(RISEMasks(6, 3, p1), (5, 6))
    plain = map_of(RISEScoring(p1, "plain"), bound, scores, reference)
    expected = scores.mean(dim=0) * p1
    torch.testing.assert_close(plain, expected[:, None, None].expand(3, 5, 6))
    for form in ("centred", "debiased"):
        zeros = map_of(RISEScoring(1.0, form), *bound_with_scores(RISEMasks(6, 3, 1.0), (5, 6)))
        torch.testing.assert_close(zeros, torch.zeros_like(plain), rtol=0, atol=1e-15)


class TestConstantScores:
    """What every mask scores alike is no evidence: the default has none of it, where the published forms have."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_network_that_always_says_70(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        bound, scores, reference = bound_with_scores(RISEMasks(50, 3, seed=1), shape, dtype=dtype)
        constant = torch.full_like(scores, 70.1), torch.full_like(reference, 70.1)
        assert torch.equal(map_of(RISEScoring(), bound, *constant), torch.zeros(3, *shape, dtype=dtype))
        # Mask coverage, times 70.
        assert float(map_of(RISEScoring(form="debiased"), bound, *constant).abs().max()) > 4
        noise = RISEScoring(form="debiased").noise(bound, range(50), *constant)
        assert noise is not None
        assert float(noise.min()) > 4


NOISY: list[tuple[Callable[[int], Masks], float]] = [
    (lambda seed: RISEMasks(200, 4, 0.5, seed), 0.5),
    (lambda seed: RISEMasks(200, 4, 0.2, seed), 0.2),
    (lambda seed: IndependentChannelMasks(RISEMasks(200, 4, 0.5, seed)), 0.5),
    (lambda seed: RegionMasks(200, 0.3, seed), 0.3),
]


class TestNoise:
    @pytest.mark.parametrize(("masks", "p1"), NOISY)
    @pytest.mark.parametrize("form", ["centred", "debiased"])
    def test_is_the_spread_of_maps_of_scores_by_chance(
        self, masks: Callable[[int], Masks], p1: float, form: str
    ) -> None:
        labels = torch.arange(40).reshape(1, 5, 8).repeat_interleave(4, 1).repeat_interleave(4, 2)
        squares, noise = [], []
        for seed in range(20):
            bound = masks(seed).bind(torch.zeros(2, 20, 32), labels)
            scores = 3 + torch.randn(200, 5, generator=torch.Generator().manual_seed(seed))
            found = RISEScoring(p1, form).noise(bound, range(200), scores, scores[0])
            assert found is not None
            noise.append(float(found.mean()))
            maps = map_of(RISEScoring(p1, form), bound, scores, scores[0])
            maps = maps if bound.regions is None else maps[:, bound.regions.index > 0]
            squares.append(float(maps.square().mean()))
        assert np.mean(noise) == pytest.approx(np.mean(squares) ** 0.5, rel=0.12)

    def test_of_the_plain_form_is_not_known(self) -> None:
        assert RISEScoring(form="plain").noise(*_of(bound_with_scores(RISEMasks(5), (5, 6)))) is None


def _of(found: tuple[BoundMasks, torch.Tensor, torch.Tensor]) -> tuple[BoundMasks, range, torch.Tensor, torch.Tensor]:
    bound, scores, reference = found
    return bound, range(len(bound)), scores, reference
