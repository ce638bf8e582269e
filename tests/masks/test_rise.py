import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from helpers.estimators import map_of, slow_rise
from helpers.masks import bind, everything, slow_balls, slow_grids, slow_mc_rise, slow_windows
from helpers.tolerances import MASKS, assert_close, assert_same_bits
from skimage.transform import resize
from xaitk_saliency.impls.perturb_image.mc_rise import MCRISEGrid
from xaitk_saliency.impls.perturb_image.random_grid import RandomGrid
from xaitk_saliency.impls.perturb_image.rise import RISEGrid
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

import monai_saliency as ms
from monai_saliency.inferers.perturbation import Perturbation
from monai_saliency.masks import (
    GridMasks,
    MultiScaleWindowMasks,
    RandomGridMasks,
    SlidingRadialMasks,
    SlidingWindowMasks,
)
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.rise import RISEMasks


def slow_masks(shape: tuple[int, ...], n: int, grid: tuple[int, ...], p1: float, seed: int) -> np.ndarray:
    """RISE masks, section 3.2 of the paper with xaitk-saliency's draws, in float64 and any number of dimensions."""
    cells = np.random.default_rng(seed).random((n, *grid)) < p1
    shifts = np.random.default_rng(seed)
    cell = [int(np.ceil(size / s)) for size, s in zip(shape, grid, strict=True)]
    masks = []
    for i in range(n):
        corner = [int(shifts.integers(0, edge)) for edge in cell]
        size = [(s + 1) * edge for s, edge in zip(grid, cell, strict=True)]
        stretched = resize(cells[i].astype(float), size, order=1, mode="reflect", anti_aliasing=False)
        masks.append(stretched[tuple(slice(c, c + size) for c, size in zip(corner, shape, strict=True))])
    return np.stack(masks)


class TestRISEMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (40, 17), (7, 5)])
    @pytest.mark.parametrize("s", range(1, 10))
    def test_equals_xaitk(self, shape: tuple[int, int], s: int) -> None:
        for seed, p1 in ((0, 0.5), (7, 0.25), (12345, 0.9)):
            theirs = RISEGrid(n=6, s=s, p1=p1, seed=seed, threads=0).perturb(np.zeros(shape))
            assert_close(everything(bind(RISEMasks(6, s, p1, seed), *shape)), theirs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_kept_rounds_to_above_1(self, dtype: torch.dtype) -> None:
        """At p1 = 1 each voxel is two weights on each axis, which sum to 1 in every arithmetic."""
        for size, grid in itertools.product((13, 64, 97), (1, 3, 5, 7)):
            masks = bind(RISEMasks(20, grid, p1=1.0), size, size + 2, 11, dtype=dtype).render(range(20))
            assert float(masks.max()) == 1.0
            assert float(masks.min()) >= 1 - 8 * torch.finfo(dtype).eps


# MC-RISE: the masks of xaitk-saliency in 2D, plain loops in 3D, and images with several fills.
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
            bound = bind(ms.masks.MCRISEMasks(n, fills(k), s, p1, seed), *shape)
            assert_close(bound.render(range(n)), theirs.swapaxes(0, 1))


def perturbed(masks: ms.masks.MCRISEMasks, image: torch.Tensor, fill: torch.Tensor, fill_of: Any = None) -> Any:
    """All perturbed images of a case, as the loop makes them."""
    bound = masks.bind(image)
    images = Perturbation(image, image[:0], fill, fill_of, bound)
    out = image.new_empty(len(bound), *image.shape)
    images.write(range(len(bound)), 0, len(bound), out)
    return out, bound


class TestPerturbedImages:
    @pytest.mark.parametrize("shape", [(3, 9, 8), (1, 6, 7, 5)])
    def test_each_voxel_is_the_sum_of_image_and_fills(self, shape: tuple[int, ...]) -> None:
        image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        masks = ms.masks.MCRISEMasks(7, [ms.ConstantFill(2.0), ms.BlurFill(1.0)], 3, 0.4, seed=1)
        found, bound = perturbed(masks, image, torch.full_like(image, -5.0))
        # A fill that depends on the mask sees what all fills together leave of the image.
        seen, _ = perturbed(masks, image, torch.full_like(image, -5.0), lambda x, kept: kept * 2 - 5 + 0 * x)
        fills = [torch.full_like(image, -5.0), torch.full_like(image, 2.0), ms.BlurFill(1.0)(image[None])[0]]
        rendered = bound.render(range(7))
        expected = torch.empty_like(found)
        expected_seen = torch.empty_like(found)
        for i, place in itertools.product(range(7), itertools.product(*map(range, shape))):
            hidden = [1 - float(rendered[(i, k, *place[1:])]) for k in range(3)]
            value = (1 - sum(hidden)) * float(image[place])
            for share, fill in zip(hidden, fills, strict=True):
                value += share * float(fill[place])
            expected[(i, *place)] = value
            expected_seen[(i, *place)] = value + hidden[0] * 2 * (1 - sum(hidden))
        assert_close(found, expected)
        assert_close(seen, expected_seen)

    def test_a_fill_that_is_not_finite_counts_where_it_replaces_something(self) -> None:
        image = torch.ones(1, 12, 12)
        masks = ms.masks.MCRISEMasks(20, [lambda images: torch.full_like(images, float("nan"))], 3)
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
                kept, by_this_fill, score = 1 - sum(hidden), k * hidden[fill], float(scores[i, label])
                if form == "centred":
                    mean = scores[:, label].mean()
                    part = (score - mean) * (kept / p1 - by_this_fill / (1 - p1)) / (n - 1)
                else:
                    part = score * (by_this_fill / (1 - p1) - kept / p1) / n
                maps[(label, fill, *voxel)] += part
        return maps.reshape(-1, *shape)

    @pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3)])
    @pytest.mark.parametrize("form", ["centred", "debiased"])
    @pytest.mark.parametrize(("k", "p1"), [(1, 0.5), (3, 0.3)])
    def test_equals_slow_loop(self, shape: tuple[int, ...], form: str, k: int, p1: float) -> None:
        bound = bind(ms.masks.MCRISEMasks(11, fills(k), 2, p1, seed=2), *shape, dtype=torch.float64)
        scores = torch.randn(11, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ours = map_of(ms.estimators.MCRISEScoring(p1, form), bound, scores, torch.zeros(2, dtype=torch.float64))
        expected = self.slow(bound.render(range(11)).numpy(), scores.numpy(), p1, form)
        assert_close(ours, expected)

    def test_the_signs_say_which_fill_lowers_the_score(self) -> None:
        """A network that sums a square: fill 0 lowers the sum, fill 1 raises it, and the published sign is opposite."""
        image = torch.full((1, 1, 16, 16), 3.0)
        settings: dict[str, Any] = {"more_fills": [9.0], "target": ms.ClassScore([0], "none")}

        def network(images: torch.Tensor) -> torch.Tensor:
            return images[:, :, 4:8, 8:12].sum(dim=(2, 3))

        of_0, of_9 = ms.mc_rise(600, 4, **settings)(image, network)[0]
        assert float(of_0[5, 9]) > 0 > float(of_9[5, 9])
        for of_fill in (of_0, of_9):
            row, column = divmod(int(of_fill.abs().argmax()), 16)
            assert (row // 4, column // 4) == (1, 2)
        of_0, of_9 = ms.mc_rise(600, 4, form="debiased", **settings)(image, network)[0]
        assert float(of_0[5, 9]) < 0 < float(of_9[5, 9])

    def test_other_estimators_and_what_is_refused(self) -> None:
        image = torch.full((1, 1, 8, 8), 3.0)
        masks = ms.masks.MCRISEMasks(100, [ms.ConstantFill(9.0)], 2)
        target = ms.ClassScore([0], "none")
        explain = ms.PerturbationInferer(masks, target, ms.estimators.OcclusionScoring())
        found = explain.explain(image, lambda x: x[:, :, 0, 0])[0]
        assert found.saliency[0, 0, 0] > 0 > found.saliency[1, 0, 0]
        assert [(label, fill) for label, fill, _ in found.explained] == [(0, 0), (0, 1)]
        with pytest.raises(ValueError, match="`estimator` is RISEScoring, which knows one fill"):
            ms.PerturbationInferer(masks, target, ms.estimators.RISEScoring())
        with pytest.raises(ValueError, match=r"`p1` 0\.5: write MCRISEScoring\(0\.5\)"):
            ms.PerturbationInferer(masks, target, ms.estimators.MCRISEScoring(0.3))
        with pytest.raises(ValueError, match="MC-RISE compares several fills, got masks of RISEMasks"):
            map_of(ms.estimators.MCRISEScoring(), bind(ms.masks.RISEMasks(5), 8, 8), torch.rand(5, 1), torch.rand(1))
        for p1 in (0.0, 1.0):
            with pytest.raises(ValueError, match="`p1` must be above 0 and below 1"):
                ms.estimators.MCRISEScoring(p1)


TARGET = ms.ClassScore([0], "none")


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
        assert_close(bound.render(range(5)), flat.reshape(5, 3, 9, 8), within=MASKS)
        assert bound.codes(range(2))["grid"].shape == (2, 3, 3, 3)


class TestMapsOfChannels:
    @pytest.mark.parametrize("shape", [(7, 6), (5, 4, 6)])
    def test_occlusion_equals_captum(self, shape: tuple[int, ...]) -> None:
        """Captum hides windows of one channel when their first edge is 1, sums drops and divides by the windows."""
        image, weight = images(1, 3, *shape), weights(3, *shape)
        network = lambda x: torch.tanh(x * weight / 9).flatten(1).sum(1, keepdim=True) ** 3  # noqa: E731
        window, stride = (2,) * len(shape), (1,) * len(shape)
        ours = ms.sliding_window(window, stride, per_channel=True, target=TARGET)(image, network)[0]
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

        explain = ms.rise(9, 3, 0.4, 5, True, form, target=ms.ClassScore([0, 1], "none"))
        maps = explain(image, network)[0]
        rendered = masks.render(range(9))
        scores = network(rendered * image)
        for k, c in itertools.product(range(2), range(2)):
            expected = slow_rise(rendered[:, c].numpy(), scores[:, k : k + 1].numpy(), 0.4, form)
            assert_close(maps[2 * k + c], expected[0])

    def test_which_modality_by_hand(self) -> None:
        """A product of two channels' means: hiding either takes all of it; a third adds its own."""

        def network(x: torch.Tensor) -> torch.Tensor:
            means = x.flatten(2).mean(2)
            return (means[:, 0] * means[:, 1] + means[:, 2])[:, None]

        image = torch.stack([torch.full((4, 4), v) for v in (2.0, 3.0, 5.0)])[None]
        explain = ms.channel_occlusion(target=TARGET, fill=ms.ConstantFill([0.0, 1.0, 4.0]))
        (explanation,) = explain.explain(image, network)
        assert explanation.num_forwards == 4
        assert explanation.saliency.flatten(1).unique(dim=1).flatten().tolist() == [6.0, 4.0, 1.0]
        assert [(label, channel) for label, channel, _ in explanation.explained] == [(0, 0), (0, 1), (0, 2)]


# Random grids, discs, windows and crisp grids: the masks of xaitk-saliency in 2D, plain loops in 3D.
class TestRandomGridMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (40, 17), (7, 5)])
    @pytest.mark.parametrize("cell", [(4, 4), (3, 5), (1, 6), (1, 1), (9, 2)])
    def test_equals_xaitk(self, shape: tuple[int, int], cell: tuple[int, int]) -> None:
        for seed, p1 in ((0, 0.5), (7, 0.25), (12345, 0.9)):
            theirs = RandomGrid(n=6, s=cell, p1=p1, seed=seed, threads=0).perturb(np.zeros((*shape, 3)))
            ours = everything(bind(RandomGridMasks(6, cell, p1, seed), *shape))
            assert_close(ours, theirs)

    def test_a_cell_has_its_size_in_every_scan(self) -> None:
        masks = RandomGridMasks(3, (10, 4), unit="mm")
        bound = masks.bind(torch.zeros(1, 40, 40), spacing=(2.0, 1.0))
        assert (bound.cell_shape, bound.grid_shape) == ((5, 4), (9, 11))
        assert RandomGridMasks(3).bind(torch.zeros(1, 33, 16)).cell_shape == (5, 2)


RADIAL: list[Any] = [((5, 5), (4, 4), None), ((3.5, 6), (4, 7), None), ((40, 0.5), (9, 4), None)]
RADIAL += [((10, 3), (5, 2), (2.0, 2.0)), ((2, 2), (3, 3), (0.4, 3.0)), ((4, 4), (6, 5), (9.0, 0.0))]


class TestSlidingRadialMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (9, 40)])
    @pytest.mark.parametrize(("radius", "stride", "sigma"), RADIAL)
    def test_equals_xaitk(self, shape: tuple[int, int], radius: Any, stride: Any, sigma: Any) -> None:
        theirs = SlidingRadial(radius, stride, sigma).perturb(np.zeros((*shape, 3))).astype(np.float64)
        ours = everything(bind(SlidingRadialMasks(radius, stride, sigma), *shape))
        assert_close(ours, theirs, within=MASKS)
        if sigma is None:
            np.testing.assert_array_equal(ours, theirs)

    def test_sizes_in_mm_make_a_ball(self) -> None:
        masks = SlidingRadialMasks(6, 4, 2, unit="mm")
        bound = masks.bind(torch.zeros(1, 20, 20, 8), spacing=(1.0, 2.0, 4.0))
        assert (*bound.radii, *bound.sigmas) == (6.0, 3.0, 1.5, 2.0, 1.0, 0.5)
        assert [len(each) for each in bound.centres] == [5, 10, 8]
        voxels = SlidingRadialMasks((6.0, 3.0, 1.5), (4, 2, 1), (2.0, 1.0, 0.5)).bind(torch.zeros(1, 20, 20, 8))
        assert torch.equal(bound.render([33]), voxels.render([33]))


class TestSlidingWindowMasks:
    @pytest.mark.parametrize("shape", [(20, 20), (17, 23), (9, 31)])
    @pytest.mark.parametrize(
        ("window", "stride"), [((5, 5), (5, 5)), ((6, 4), (3, 2)), ((3, 2), (7, 5)), ((9, 9), (1, 4)), ((1, 7), (2, 9))]
    )
    def test_equals_xaitk(self, shape: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> None:
        theirs = SlidingWindow(window, stride).perturb(np.zeros(shape))
        assert np.array_equal(everything(bind(SlidingWindowMasks(window, stride), *shape)), theirs)

    @pytest.mark.parametrize(
        ("window", "stride", "same_as"), [(4, None, 2), (5, None, 2), (1, None, 1), ((4, 6), None, (2, 3)), ([3], 2, 2)]
    )
    def test_one_number_and_default_stride(self, window: object, stride: object, same_as: object) -> None:
        """One number stands for all axes, and the default stride is half of the window."""
        ours = everything(bind(SlidingWindowMasks(window, stride), 12, 13))
        w, s = (tuple(np.broadcast_to(v, 2).tolist()) for v in (window, same_as))
        assert np.array_equal(ours, slow_windows((12, 13), w, s))

    @pytest.mark.parametrize(
        ("window", "stride", "spacing", "same_window", "same_stride"),
        [
            (20, 10, (1.0, 2.0, 5.0), (20, 10, 4), (10, 5, 2)),
            ((6, 5, 4.9), (6, 5, 4.9), (4.0, 2.0, 10.0), (2, 3, 1), (2, 3, 1)),  # 1.5, 2.5 and 0.49 voxels
            (10, None, (2.5, 4.0, 9.0), (4, 3, 1), (2, 1, 1)),
        ],
    )
    def test_sizes_in_mm(self, window: Any, stride: Any, spacing: Any, same_window: tuple, same_stride: tuple) -> None:
        image = torch.zeros(1, 21, 12, 5)
        in_mm = SlidingWindowMasks(window, stride, unit="mm").bind(image, spacing=spacing)
        in_voxels = SlidingWindowMasks(same_window, same_stride).bind(image, spacing=spacing)
        assert in_mm.key == in_voxels.key
        assert torch.equal(in_mm.render(range(len(in_mm))), in_voxels.render(range(len(in_voxels))))


GRIDS_3D: list[Any] = [((12, 9, 10), (3, 3, 3)), ((11, 6, 13), (4, 1, 2)), ((5, 7, 6), (8, 7, 2))]
BALLS_3D: list[Any] = [((3, 3, 3), (4, 4, 4), None), ((2.5, 4, 1), (3, 5, 2), None)]
BALLS_3D += [((3, 2, 4), (4, 3, 4), (1.0, 0.5, 2.0)), ((2, 2, 2), (5, 5, 5), (0.0, 0.0, 1.5))]
WINDOWS_3D: list[Any] = [
    ((7, 5, 6), (3, 2, 4), (2, 2, 3)),
    ((6, 6, 4), (2,) * 3, (2,) * 3),
    ((5, 8, 3), (1, 3, 3), (3, 4, 2)),
]
#: masks, an image's shape, the slow loop and its settings, and whether it has no fractions, so that all bits are equal
SLOW_3D = [
    *((RISEMasks(5, grid, 0.4, 3), shape, slow_masks, (5, grid, 0.4, 3), False) for shape, grid in GRIDS_3D),
    *((RandomGridMasks(5, cell, 0.4, 3), shape, slow_grids, (5, cell, 0.4, 3), False) for shape, cell in GRIDS_3D),
    *(
        (ms.masks.MCRISEMasks(5, fills(k), grid, 0.4, 3), shape, slow_mc_rise, (5, k, grid, 0.4, 3), False)
        for (shape, grid), k in zip(GRIDS_3D, (2, 3, 4), strict=True)
    ),
    *((SlidingRadialMasks(*each), (11, 9, 8), slow_balls, each, False) for each in BALLS_3D),
    *((SlidingWindowMasks(*each), shape, slow_windows, each, True) for shape, *each in WINDOWS_3D),
]


@pytest.mark.parametrize(("masks", "shape", "slow", "given", "exact"), SLOW_3D)
def test_3d_equals_slow_loop(masks: Any, shape: Any, slow: Any, given: Any, exact: bool) -> None:
    bound, expected = bind(masks, *shape, dtype=torch.float64), slow(shape, *given)
    found = bound.render(range(len(bound))).numpy().reshape(expected.shape)
    if exact:
        assert_same_bits(found, expected)
    else:
        assert_close(found, expected)


class TestMultiScaleWindowMasks:
    @pytest.mark.parametrize("shape", [(16, 13), (7, 6, 5)])
    @pytest.mark.parametrize(("window", "stride"), [(4, None), (5, 3)])
    def test_equals_slow_loop(self, shape: tuple[int, ...], window: int, stride: int | None) -> None:
        expected = []
        for level in range(3):
            edge = max(1, window // 2**level)
            expected.append(slow_windows(shape, edge, max(1, edge // 2 if stride is None else stride // 2**level)))
        ours = everything(bind(MultiScaleWindowMasks(window, 3, stride), *shape))
        np.testing.assert_array_equal(ours, np.concatenate(expected))

    def test_a_level_that_brings_nothing_new_is_left_out(self) -> None:
        assert bind(MultiScaleWindowMasks(2, 5), 8, 8).window_shapes == [(2, 2), (1, 1)]

    def test_sizes_in_mm(self) -> None:
        bound = MultiScaleWindowMasks(12, 2, unit="mm").bind(torch.zeros(1, 20, 20), spacing=(1.0, 3.0))
        assert bound.window_shapes == [(12, 4), (6, 2)]


@pytest.mark.parametrize(
    ("shape", "grid", "cells"), [((9, 7), 3, (3, 3)), ((5, 6, 4), (2, 4, 3), (2, 4, 3)), ((12, 3), 5, (5, 3))]
)
def test_the_slow_loop(shape: tuple[int, ...], grid: Any, cells: tuple[int, ...]) -> None:
    found = everything(bind(GridMasks(13, grid, seed=3), *shape))
    kept = (np.random.default_rng(3).random((13, int(np.prod(cells)))) < 0.5).reshape(13, *cells)
    for voxel in itertools.product(*map(range, shape)):
        cell = tuple(v * c // n for v, c, n in zip(voxel, cells, shape, strict=True))
        assert np.array_equal(found[(slice(None), *voxel)], kept[(slice(None), *cell)])


@pytest.mark.parametrize("shape", [(9, 11), (8, 7, 10)])
@pytest.mark.parametrize("masks", [RISEMasks(60, 3, seed=1), RandomGridMasks(60, 3), RISEMasks(60, 1)])
def test_moments_equal_those_of_rendered_masks(masks: Any, shape: tuple[int, ...]) -> None:
    bound = masks.bind(torch.zeros(1, *shape, dtype=torch.float64))
    first, second = torch.rand(60, 3, dtype=torch.float64) - 0.5, torch.rand(60, 2, dtype=torch.float64)
    rendered = bound.render(range(60)) - 0.4
    sums, squares = bound.moments(range(60), first, second, 0.4)
    assert_close(sums, torch.einsum("nk,n...->k...", first, rendered))
    assert_close(squares, torch.einsum("nk,n...->k...", second, rendered.square()))
