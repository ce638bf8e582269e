"""What holds for every estimator, and for the scores that a map is made of."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from helpers.estimators import SHAPES, bound_with_scores, map_of
from helpers.numpy_boxes import CLASSES, BlackBox
from helpers.searches import asks_of, observed_of
from helpers.tolerances import SINGLE, assert_close

import monai_saliency as ms
from monai_saliency import ClassScore, ConstantFill, sliding_window
from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.inferers.scores import Scores
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import IndependentChannelMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks

ESTIMATORS = [
    (RISEScoring(), RISEMasks(10, 3, seed=1)),
    (RISEScoring(form="debiased"), RISEMasks(10, 3, seed=1)),
    (RISEScoring(form="plain"), RISEMasks(10, 3, seed=1)),
    (OcclusionScoring(), SlidingWindowMasks(3, 2)),
]


@pytest.mark.parametrize(("estimator", "masks"), ESTIMATORS)
class TestStates:
    def test_law_2_any_division_gives_one_map_bit_for_bit(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = bound_with_scores(masks, (9, 7), dtype=torch.float32)
        expected = map_of(estimator, bound, scores, reference)
        rng = np.random.default_rng(0)
        for _ in range(8):
            order = rng.permutation(len(bound))
            parts = np.split(order, np.sort(rng.integers(0, len(bound) + 1, size=rng.integers(1, 4))))
            known = Scores("case")
            asks = asks_of(bound, reference, known)
            next(asks)
            for part in parts:
                known.add(part.tolist(), scores[part.tolist()])
            (observed,) = next(asks).observed
            assert torch.equal(estimator.compute(observed), expected)

    def test_law_5_a_map_scales_with_the_score(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = bound_with_scores(masks, (9, 7))
        maps = map_of(estimator, bound, scores, reference)
        assert_close(map_of(estimator, bound, 8 * scores, 8 * reference), 8 * maps)

    def test_law_9_precision(self, estimator: Estimator, masks: RISEMasks) -> None:
        single = map_of(estimator, *bound_with_scores(masks, (9, 7), dtype=torch.float32))
        _, scores, reference = bound_with_scores(masks, (9, 7), dtype=torch.float32)
        double_bound = masks.bind(torch.zeros(1, 9, 7, dtype=torch.float64))
        double = map_of(estimator, double_bound, scores.double(), reference.double())
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        assert_close(single.double(), double, within=SINGLE)


@pytest.mark.parametrize("p1", [0.0, 1.0])
def test_rise_of_masks_that_all_agree_is_finite(p1: float) -> None:
    """Masks that keep nothing say nothing; masks that keep all say one thing of every voxel."""
    bound, scores, reference = bound_with_scores(RISEMasks(6, 3, p1), (5, 6))
    plain = map_of(RISEScoring(p1, "plain"), bound, scores, reference)
    assert_close(plain, (scores.mean(dim=0) * p1)[:, None, None].expand(3, 5, 6))
    for form in ("centred", "debiased"):
        zeros = map_of(RISEScoring(1.0, form), *bound_with_scores(RISEMasks(6, 3, 1.0), (5, 6)))
        assert_close(zeros, torch.zeros_like(plain), scale=scores.abs().max())


NOISY: list[tuple[Callable[[int], Masks], float]] = [
    (lambda seed: RISEMasks(200, 4, 0.5, seed), 0.5),
    (lambda seed: RISEMasks(200, 4, 0.2, seed), 0.2),
    (lambda seed: IndependentChannelMasks(RISEMasks(200, 4, 0.5, seed)), 0.5),
    (lambda seed: RegionMasks(200, 0.3, seed), 0.3),
]


class TestNoise:
    @pytest.mark.parametrize(("masks", "p1"), NOISY)
    @pytest.mark.parametrize("form", ["centred", "debiased"])
    def test_is_the_spread_of_maps_of_scores_by_chance(self, masks: Any, p1: float, form: str) -> None:
        labels = torch.arange(40).reshape(1, 5, 8).repeat_interleave(4, 1).repeat_interleave(4, 2)
        squares, noise = [], []
        for seed in range(20):
            bound = masks(seed).bind(torch.zeros(2, 20, 32), labels)
            scores = 3 + torch.randn(200, 5, generator=torch.Generator().manual_seed(seed))
            found = RISEScoring(p1, form).noise(observed_of(bound, scores, scores[0]))
            noise.append(float(found.mean()))
            maps = map_of(RISEScoring(p1, form), bound, scores, scores[0])
            maps = maps if bound.regions is None else maps[:, bound.regions.index > 0]
            squares.append(float(maps.square().mean()))
        assert np.mean(noise) == pytest.approx(np.mean(squares) ** 0.5, rel=0.12)

    def test_of_the_plain_form_is_not_known(self) -> None:
        assert RISEScoring(form="plain").noise(observed_of(*bound_with_scores(RISEMasks(5), (5, 6)))) is None


# Occlusion, squared differences, similarity and D-RISE: plain loops in 2D and 3D, and what is known of chance.
FAMILIES: list[Masks] = [
    ms.masks.RISEMasks(12, 3, 0.4, seed=1),
    ms.masks.RandomGridMasks(12, 3, 0.4, seed=1),
    ms.masks.SlidingWindowMasks(3, 2),
    ms.masks.SlidingWindowMasks(2, 4),
    ms.masks.SlidingRadialMasks(2, 2),
    ms.masks.SlidingRadialMasks(1.5, 2, 1.0),
    ms.masks.MultiScaleWindowMasks(3, 2),
]
SCORINGS: dict[str, Estimator] = {
    "occlusion": ms.estimators.OcclusionScoring(),
    "squared": ms.estimators.SquaredDifferenceScoring(),
    "similarity": ms.estimators.SimilarityScoring(),
    "centred": ms.estimators.DRISEScoring(),
    "plain": ms.estimators.DRISEScoring("plain"),
}


def slow(kind: str, masks: np.ndarray, scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """One voxel and one mask at a time, as the docstrings say."""
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        total = weight = 0.0
        for i in range(n):
            mask, f, f0 = float(masks[(i, *voxel)]), float(scores[i, j]), float(reference[j])
            if kind == "occlusion":
                value, share = f0 - f, 1 - mask
            elif kind == "squared":
                value, share = 0.5 * (f0 - f) ** 2, 1 - mask
            elif kind == "similarity":
                value, share = max(f0 - f, 0.0), 1 - mask
            else:
                value, share = f - (scores[:, j].mean() if kind == "centred" else 0.0), mask
            total += value * share
            weight += share
        maps[(j, *voxel)] = total / weight if weight else 0.0
    return maps


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SCORINGS)
@pytest.mark.parametrize("masks", FAMILIES, ids=lambda masks: type(masks).__name__)
def test_equals_slow_loop(masks: Masks, kind: str, shape: tuple[int, ...]) -> None:
    bound, scores, reference = bound_with_scores(masks, shape)
    rendered = bound.render(range(len(bound)))[:, 0].numpy()
    ours = map_of(SCORINGS[kind], bound, scores, reference)
    assert_close(ours, slow(kind, rendered, scores.numpy(), reference.numpy()))


def test_what_is_known_of_chance() -> None:
    """Windows leave nothing to chance but rounding; random masks have a standard error, except the plain form's."""
    windows, scores, reference = bound_with_scores(ms.masks.SlidingWindowMasks(3, 2), (9, 7), dtype=torch.float32)
    observed = observed_of(windows, scores, reference)
    rounding = torch.cat([reference[None], scores]).abs().amax(dim=0) * 2**-20
    known = {"occlusion": rounding, "similarity": rounding, "centred": rounding, "squared": 0.5 * rounding**2}
    for kind, expected in known.items():
        assert_close(SCORINGS[kind].noise(observed), expected)
        assert SCORINGS[kind].standard_error(observed) is None
    assert SCORINGS["plain"].noise(observed) is None
    drawn, scores, reference = bound_with_scores(ms.masks.RISEMasks(9, 3), (9, 7))
    observed, two = observed_of(drawn, scores, reference), observed_of(drawn, scores[:2], reference)
    for kind, estimator in SCORINGS.items():
        assert estimator.noise(observed) is None
        error = estimator.standard_error(observed)
        assert (error is None) == (kind == "plain")
        assert estimator.standard_error(two) is None
        if error is not None:
            assert error.shape == (3, 9, 7)


def test_voxels_in_no_region_are_0() -> None:
    """All masks keep them, so nothing is known of them."""
    labels = torch.zeros(1, 6, 6, dtype=torch.long)
    labels[0, :3], labels[0, 3:5] = 1, 2
    bound = ms.masks.RegionMasks(num_masks=20).bind(torch.zeros(1, 6, 6), labels=labels)
    scores = torch.rand(20, 1, generator=torch.Generator().manual_seed(0))
    maps = map_of(ms.estimators.DRISEScoring(), bound, scores, torch.zeros(1))
    assert bool((maps[0, 5] == 0).all())
    assert bool((maps[0, :5] != 0).all())
    error = ms.estimators.DRISEScoring().standard_error(observed_of(bound, scores, torch.zeros(1)))
    assert bool((error[0, 5] == 0).all())


@pytest.mark.parametrize(
    ("shape", "window"),
    [((1, 12, 12), (3, 3)), ((3, 12, 20), (4, 5)), ((2, 8, 6, 9), (2, 3, 3)), ((1, 6, 6, 6), (6, 2, 3))],
)
@pytest.mark.parametrize("fill", [0.0, 0.7])
def test_occlusion_equals_captum_with_magnitudes(shape: tuple[int, ...], window: tuple[int, ...], fill: float) -> None:
    """Windows of captum start at the corner and ours are centred: both lie alike where nothing hangs over, that is
    with a stride of one window where windows divide the image. It hides channels apart unless told otherwise.
    """
    image, network = torch.from_numpy(np.random.default_rng(2).normal(size=(1, *shape))), BlackBox(shape).classify
    maps = sliding_window(window, window, target=ClassScore("all", "none"), fill=ConstantFill(fill))(image, network)
    whole = (shape[0], *window)
    for k in range(CLASSES):
        theirs = Occlusion(network).attribute(image, whole, strides=whole, baselines=fill, target=k)
        # One value for all channels of a window; float32, of which 4e-8 is reached.
        assert torch.equal(theirs, theirs[:, :1].expand_as(theirs))
        assert float((maps[0, k] - theirs[0, 0]).abs().max() / theirs.abs().max()) < 1e-6
