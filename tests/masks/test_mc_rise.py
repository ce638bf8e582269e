"""MC-RISE: the masks of xaitk-saliency in 2D, plain loops in 3D, and images with several fills."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.estimators import map_of
from helpers.masks import bind
from helpers.slow_masks import slow_mc_rise
from xaitk_saliency.impls.perturb_image.mc_rise import MCRISEGrid

import monai_saliency as ms
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.masks.base import BoundMasks

ONES: list[Callable[[torch.Tensor], torch.Tensor]] = [ms.ConstantFill(1.0)]


def fills(count: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Fills beside the first one."""
    return [ms.ConstantFill(float(value)) for value in range(1, count)]


class TestMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (7, 5)])
    @pytest.mark.parametrize("k", [1, 2, 3, 5])
    @pytest.mark.parametrize(("n", "s"), [(6, 4), (150, 3), (3, 7)])
    def test_equals_xaitk(self, shape: tuple[int, int], k: int, n: int, s: int) -> None:
        for seed, p1 in ((0, 0.5), (12345, 0.2)):
            theirs = MCRISEGrid(n=n, s=s, p1=p1, k=k, seed=seed, threads=0).perturb(np.zeros((*shape, 3)))
            bound = bind(ms.MCRISEMasks(n, fills(k), s, p1, seed), *shape)
            np.testing.assert_allclose(bound.render(range(n)), theirs.swapaxes(0, 1), rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("shape", "grid", "k"), [((12, 9, 10), (3, 3, 3), 2), ((11, 6, 13), (4, 1, 2), 3), ((5, 7, 6), (8, 7, 2), 4)]
    )
    def test_3d_equals_slow_loop(self, shape: tuple[int, ...], grid: tuple[int, ...], k: int) -> None:
        bound = bind(ms.MCRISEMasks(5, fills(k), grid, 0.4, seed=3), *shape, dtype=torch.float64)
        expected = slow_mc_rise(shape, 5, k, grid, 0.4, 3)
        np.testing.assert_allclose(bound.render(range(5)), expected, rtol=0, atol=1e-12)

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"`more_fills` must be a list of fills such as \[ConstantFill"):
            ms.MCRISEMasks(5, ms.ConstantFill(1.0))
        with pytest.raises(ValueError, match=r"`more_fills` must be functions of images .*, got 1\.0"):
            ms.MCRISEMasks(5, [1.0])
        with pytest.raises(ValueError, match=r"one of `more_fills` gave shape \(1, 4\) for an image of \(1, 8, 8\)"):
            bind(ms.MCRISEMasks(5, [lambda images: images[..., 0, :4]]), 8, 8)
        with pytest.raises(ValueError, match="have masks for each channel or fill already: leave out `per_channel`"):
            ms.IndependentChannelMasks(ms.MCRISEMasks(5, ONES)).bind(torch.zeros(2, 8, 8))


def perturbed(
    masks: ms.MCRISEMasks, image: torch.Tensor, fill: torch.Tensor, fill_of: Any = None
) -> tuple[torch.Tensor, BoundMasks]:
    """All perturbed images of a case, as the loop makes them."""
    bound = masks.bind(image)
    case = ms.Case("ct_7", image)
    state = CaseState(
        case, bound, fill, image[:0], ms.ClassScore([0], "none"), ms.MCRISEScoring(masks.p1), None, fill_of
    )
    out = image.new_empty(len(bound), *image.shape)
    state.perturb(1, len(bound) + 1, out)
    return out, bound


class TestPerturbedImages:
    @pytest.mark.parametrize("shape", [(3, 9, 8), (1, 6, 7, 5)])
    def test_each_voxel_is_the_sum_of_image_and_fills(self, shape: tuple[int, ...]) -> None:
        image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        masks = ms.MCRISEMasks(7, [ms.ConstantFill(2.0), ms.BlurFill(1.0)], 3, 0.4, seed=1)
        found, bound = perturbed(masks, image, torch.full_like(image, -5.0))
        # A fill that depends on the mask sees what all fills together leave of the image.
        seen, _ = perturbed(masks, image, torch.full_like(image, -5.0), lambda x, kept: kept * 2 - 5 + 0 * x)
        each = [torch.full_like(image, -5.0), torch.full_like(image, 2.0), ms.BlurFill(1.0)(image[None])[0]]
        rendered = bound.render(range(7))
        for i, place in itertools.product(range(7), itertools.product(*map(range, shape))):
            hidden = [1 - float(rendered[(i, k, *place[1:])]) for k in range(3)]
            expected = (1 - sum(hidden)) * float(image[place])
            expected += sum(h * float(fill[place]) for h, fill in zip(hidden, each, strict=True))
            assert float(found[(i, *place)]) == pytest.approx(expected, abs=1e-12)
            expected += hidden[0] * 2 * (1 - sum(hidden))
            assert float(seen[(i, *place)]) == pytest.approx(expected, abs=1e-12)

    def test_a_fill_that_is_not_finite_counts_where_it_replaces_something(self) -> None:
        image = torch.ones(1, 12, 12)
        masks = ms.MCRISEMasks(20, [lambda images: torch.full_like(images, float("nan"))], 3)
        found, bound = perturbed(masks, image, torch.zeros_like(image))
        assert torch.equal(found[:, 0].isnan(), bound.render(range(20))[:, 1] < 1)


class TestScoring:
    @staticmethod
    def slow(masks: np.ndarray, scores: np.ndarray, p1: float, form: str) -> np.ndarray:
        """Voxel by voxel, as the docstring says."""
        n, k, *shape = masks.shape
        maps = np.zeros((scores.shape[1], k, *shape))
        for label, fill, voxel in itertools.product(
            range(scores.shape[1]), range(k), itertools.product(*map(range, shape))
        ):
            for i in range(n):
                hidden = [1 - float(masks[(i, j, *voxel)]) for j in range(k)]
                kept, own, f = 1 - sum(hidden), hidden[fill], float(scores[i, label])
                if form == "centred":
                    part = (f - scores[:, label].mean()) * (kept / p1 - k * own / (1 - p1)) / (n - 1)
                elif form == "debiased":
                    part = f * (k * own / (1 - p1) - kept / p1) / n
                else:
                    part = f * (k * own * (1 - p1) - kept * p1) / n
                maps[(label, fill, *voxel)] += part
        return maps.reshape(-1, *shape)

    @pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3)])
    @pytest.mark.parametrize("form", ["centred", "debiased", "xaitk"])
    @pytest.mark.parametrize(("k", "p1"), [(1, 0.5), (3, 0.3)])
    def test_equals_slow_loop(self, shape: tuple[int, ...], form: str, k: int, p1: float) -> None:
        bound = bind(ms.MCRISEMasks(11, fills(k), 2, p1, seed=2), *shape, dtype=torch.float64)
        scores = torch.randn(11, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ours = map_of(ms.MCRISEScoring(p1, form), bound, scores, torch.zeros(2, dtype=torch.float64))
        expected = self.slow(bound.render(range(11)).numpy(), scores.numpy(), p1, form)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)

    def test_the_signs_say_which_fill_lowers_the_score(self) -> None:
        """A network that sums a square: fill 0 lowers the sum, fill 1 raises it, and the published sign is opposite."""
        image = torch.full((1, 1, 16, 16), 3.0)
        settings: dict[str, Any] = {"more_fills": [9.0], "target": ms.ClassScore([0], "none")}

        def network(x: torch.Tensor) -> torch.Tensor:
            return x[:, :, 4:8, 8:12].sum(dim=(2, 3))

        maps = ms.mc_rise(600, 4, **settings)(image, network)[0]
        assert float(maps[0, 5, 9]) > 0 > float(maps[1, 5, 9])
        assert [divmod(int(each.abs().argmax()), 16)[0] // 4 for each in maps] == [1, 1]
        published = ms.mc_rise(600, 4, form="debiased", **settings)(image, network)[0]
        assert float(published[0, 5, 9]) < 0 < float(published[1, 5, 9])

    def test_other_estimators_and_what_is_refused(self) -> None:
        image = torch.full((1, 1, 8, 8), 3.0)
        masks = ms.MCRISEMasks(100, [ms.ConstantFill(9.0)], 2)
        target = ms.ClassScore([0], "none")
        explain = ms.PerturbationInferer(masks, target, ms.OcclusionScoring())
        found = explain.explain(image, lambda x: x[:, :, 0, 0])[0]
        assert found.saliency[0, 0, 0] > 0 > found.saliency[1, 0, 0]
        assert [(label, fill) for label, fill, _ in found.explained] == [(0, 0), (0, 1)]
        with pytest.raises(ValueError, match="`estimator` is RISEScoring, which knows one fill"):
            ms.PerturbationInferer(masks, target, ms.RISEScoring())
        with pytest.raises(ValueError, match=r"`p1` 0\.5: write MCRISEScoring\(0\.5\)"):
            ms.PerturbationInferer(masks, target, ms.MCRISEScoring(0.3))
        with pytest.raises(ValueError, match="MC-RISE compares several fills, got masks of RISEMasks"):
            map_of(ms.MCRISEScoring(), bind(ms.RISEMasks(5), 8, 8), torch.rand(5, 1), torch.rand(1))
        for p1 in (0.0, 1.0):
            with pytest.raises(ValueError, match="`p1` must be above 0 and below 1"):
                ms.MCRISEScoring(p1)
