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


def test_one_mask_says_nothing() -> None:
    """A covariance needs two."""
    maps = map_of(RISEScoring(), *bound_with_scores(RISEMasks(1, 3), (5, 6)))
    assert torch.equal(maps, torch.zeros(3, 5, 6, dtype=torch.float64))


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

    def test_scores_between_95_and_99_hundredths(self) -> None:
        """A small change of a large score: what is planted is found, and was not."""
        planted = torch.zeros(48, 48, dtype=torch.bool)
        planted[30:33, 12:15] = True
        hits = {"centred": 0, "debiased": 0}
        for seed in range(1, 6):
            bound = RISEMasks(1000, 8, seed=seed).bind(torch.zeros(1, 48, 48))
            scores = 0.95 + 0.04 * bound.render(range(1000))[..., planted].mean(dim=2)
            for form in hits:
                peak = int(map_of(RISEScoring(form=form), bound, scores, torch.tensor([0.99])).argmax())
                hits[form] += bool(planted.flatten()[peak])
        assert hits == {"centred": 5, "debiased": 0}

    def test_float32_keeps_what_is_small_beside_a_constant(self) -> None:
        bound, small, reference = bound_with_scores(RISEMasks(50, 3, seed=1), (9, 7), dtype=torch.float32)
        scores = 1000 + small / 1024  # to the bit, but for the last digits of `small`
        expected = map_of(RISEScoring(), bound, scores.double(), reference.double())
        ours = map_of(RISEScoring(), bound, scores, reference)
        torch.testing.assert_close(ours, expected.float(), rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_the_expectation_is_that_of_the_debiased_form() -> None:
    """Over 600 seeds, of a score that is not linear in the mask; the error left is that of their mean."""
    maps: dict[str, list[torch.Tensor]] = {"centred": [], "debiased": []}
    for seed in range(600):
        bound = RISEMasks(10, 2, 0.4, seed=seed).bind(torch.zeros(1, 4, 4, dtype=torch.float64))
        kept = bound.render(range(10))[:, 0]
        scores = (1 + kept[:, 1, 1] * kept[:, 2, 3])[:, None]
        for form, found in maps.items():
            found.append(map_of(RISEScoring(0.4, form), bound, scores, scores[0]))
    centred, debiased = (torch.stack(found) for found in maps.values())
    error = (centred - debiased).std(dim=0) / 600**0.5
    assert bool(((centred - debiased).mean(dim=0).abs() < 4.5 * error).all())
    assert float(centred.mean(dim=0).max()) > 10 * float(error.max())
    assert float(centred.std(dim=0).mean()) < 0.5 * float(debiased.std(dim=0).mean())


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

    def test_tells_chance_from_what_is_there(self) -> None:
        """Rounding of a network that ignores the image, and a score that one voxel decides."""
        bound = RISEMasks(400, 8).bind(torch.zeros(1, 24, 24, 24))
        chance = 70 + 1e-5 * torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
        decided = 70 + bound.render(range(400))[:, :, 12, 12, 12]
        scores = torch.cat([chance, decided], dim=1)
        maps = map_of(RISEScoring(), bound, scores, scores[0])
        noise = RISEScoring().noise(bound, range(400), scores, scores[0])
        assert noise is not None
        ratios = (maps.flatten(1).amax(dim=1) / noise).tolist()
        assert ratios[0] < 5
        assert ratios[1] > 12

    def test_rounding_that_follows_the_masks_is_noise(self) -> None:
        bound = RISEMasks(400, 4).bind(torch.zeros(1, 12, 12))
        scores = 70 + 2e-5 * bound.render(range(400))[:, :, 6, 6]
        assert len(scores.unique()) > 1
        noise = RISEScoring().noise(bound, range(400), scores, scores[0])
        assert noise is not None
        assert float(map_of(RISEScoring(), bound, scores, scores[0]).max()) < 2 * float(noise)

    def test_of_the_plain_form_is_not_known(self) -> None:
        assert RISEScoring(form="plain").noise(*_of(bound_with_scores(RISEMasks(5), (5, 6)))) is None


def _of(found: tuple[BoundMasks, torch.Tensor, torch.Tensor]) -> tuple[BoundMasks, range, torch.Tensor, torch.Tensor]:
    bound, scores, reference = found
    return bound, range(len(bound)), scores, reference


@pytest.mark.parametrize("p1", [-0.1, 1.5])
def test_p1_out_of_range(p1: float) -> None:
    with pytest.raises(ValueError, match=rf"`p1` must be in \[0, 1\], got {p1}"):
        RISEScoring(p1)


def test_the_plain_form_has_its_own_name() -> None:
    with pytest.raises(ValueError, match=r"`p1` must be above 0, got 0: .*RISEScoring\(form='plain'\)"):
        RISEScoring(0.0)
    with pytest.raises(ValueError, match=r"`form` must be one of .*'centred', 'debiased', 'plain'.*, got 'best'"):
        RISEScoring(form="best")
