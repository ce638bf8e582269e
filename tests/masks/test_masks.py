from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.transform import resize
from xaitk_saliency.impls.perturb_image.rise import RISEGrid
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.utils.arguments import voxels_of_mm


def bind(masks: Masks, *shape: int, dtype: torch.dtype = torch.float32) -> BoundMasks:
    return masks.bind(torch.zeros(1, *shape, dtype=dtype))


def everything(bound: BoundMasks) -> np.ndarray:
    return bound.render(range(len(bound)))[:, 0].numpy()


def slow_rise(shape: tuple[int, ...], n: int, grid: tuple[int, ...], p1: float, seed: int) -> np.ndarray:
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


def slow_windows(shape: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
    rows = []
    for size, w, step in zip(shape, window, stride, strict=True):
        starts = list(range(0, size, step))
        overhang = w - (size - starts[-1])
        rows.append([start - overhang // 2 for start in starts])
    masks = []
    for corner in itertools.product(*rows):
        mask = np.ones(shape, dtype=bool)
        for voxel in itertools.product(*map(range, shape)):
            if all(c <= v < c + w for v, c, w in zip(voxel, corner, window, strict=True)):
                mask[voxel] = False
        masks.append(mask)
    return np.stack(masks)


class TestRISEMasks:
    @pytest.mark.parametrize("shape", [(24, 24), (23, 31), (40, 17), (7, 5)])
    @pytest.mark.parametrize("s", range(1, 10))
    def test_equals_xaitk(self, shape: tuple[int, int], s: int) -> None:
        for seed, p1 in ((0, 0.5), (7, 0.25), (12345, 0.9)):
            theirs = RISEGrid(n=6, s=s, p1=p1, seed=seed, threads=0).perturb(np.zeros(shape))
            np.testing.assert_allclose(everything(bind(RISEMasks(6, s, p1, seed), *shape)), theirs, rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("shape", "grid"), [((12, 9, 10), (3, 3, 3)), ((11, 6, 13), (4, 1, 2)), ((5, 7, 6), (8, 7, 2))]
    )
    def test_3d_equals_slow_loop(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
        masks = everything(bind(RISEMasks(5, grid, 0.4, seed=3), *shape, dtype=torch.float64))
        np.testing.assert_allclose(masks, slow_rise(shape, 5, grid, 0.4, seed=3), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("grid", [(2, 5), (6, 1)])
    def test_per_axis_grid_equals_slow_loop(self, grid: tuple[int, int]) -> None:
        masks = everything(bind(RISEMasks(5, grid, 0.6, seed=1), 14, 19, dtype=torch.float64))
        np.testing.assert_allclose(masks, slow_rise((14, 19), 5, grid, 0.6, seed=1), rtol=0, atol=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(
        shape=st.lists(st.integers(3, 12), min_size=2, max_size=3),
        grid=st.integers(1, 5),
        seed=st.integers(0, 2**40),
        picked=st.lists(st.integers(0, 11), max_size=8),
        more=st.integers(0, 9),
    )
    def test_law_2_a_mask_depends_on_seed_index_and_shape_only(
        self, shape: list[int], grid: int, seed: int, picked: list[int], more: int
    ) -> None:
        bound = bind(RISEMasks(12, grid, 0.5, seed), *shape)
        masks = bound.render(range(12))
        assert torch.equal(bound.render(picked), masks[picked])
        assert torch.equal(bound.render(np.asarray(picked, dtype=int)), masks[picked])
        assert torch.equal(bound.render(range(3, 9)), masks[3:9])
        assert torch.equal(bound.render(range(11, -1, -2)), masks.flip(0)[::2])
        assert torch.equal(bind(RISEMasks(12 + more, grid, 0.5, seed), *shape).render(range(12)), masks)
        several_channels = RISEMasks(12, grid, 0.5, seed).bind(torch.rand(3, *shape))
        assert torch.equal(several_channels.render(range(12)), masks)

    def test_seeds_differ(self) -> None:
        assert not np.allclose(
            everything(bind(RISEMasks(4, seed=0), 16, 16)), everything(bind(RISEMasks(4, seed=1), 16, 16))
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_kept_rounds_to_above_1(self, dtype: torch.dtype) -> None:
        """At p1 = 1 each voxel is two weights on each axis, which sum to 1 in every arithmetic."""
        for size, grid in itertools.product((13, 64, 97), (1, 3, 5, 7)):
            masks = bind(RISEMasks(20, grid, p1=1.0), size, size + 2, 11, dtype=dtype).render(range(20))
            assert float(masks.max()) == 1.0
            assert float(masks.min()) >= 1 - 8 * torch.finfo(dtype).eps

    def test_far_masks_are_reached_directly(self) -> None:
        """Mask 40 000 of a seed's stream is what a full draw gives."""
        code = bind(RISEMasks(40_001, (3, 2), 0.5, seed=5), 9, 8).codes([40_000])
        assert np.array_equal(code["grid"][0], (np.random.default_rng(5).random((40_001, 3, 2)) < 0.5)[-1])

    def test_polarity_1_keeps(self) -> None:
        assert np.array_equal(everything(bind(RISEMasks(3, 4, p1=1.0), 13, 9, 7)), np.ones((3, 13, 9, 7)))
        assert np.array_equal(everything(bind(RISEMasks(3, 4, p1=0.0), 13, 9)), np.zeros((3, 13, 9)))

    @pytest.mark.parametrize("p1", [0.2, 0.7])
    def test_keep_rate_and_range(self, p1: float) -> None:
        bound = bind(RISEMasks(400, 6, p1, seed=2), 24, 30)
        masks = everything(bound)
        assert masks.min() >= 0
        assert masks.max() <= 1
        # 400 masks of 36 cells: five standard errors of the rate of cells.
        margin = 5 * np.sqrt(p1 * (1 - p1) / (400 * 36))
        assert abs(bound.codes(range(400))["grid"].mean() - p1) < margin
        # Every voxel is kept equally often: five standard errors of a mean over masks.
        assert np.abs(masks.mean(axis=0) - p1).max() < 5 * np.sqrt(p1 * (1 - p1) / 400)

    def test_codes_are_the_documented_draws_and_small(self) -> None:
        codes = bind(RISEMasks(50, (3, 4, 5), 0.3, seed=9), 100, 90, 80).codes(range(10, 20))
        assert np.array_equal(codes["grid"], (np.random.default_rng(9).random((50, 3, 4, 5)) < 0.3)[10:20])
        shifts = np.random.default_rng(9)
        expected = [[shifts.integers(0, cell) for cell in (34, 23, 16)] for _ in range(50)]
        assert np.array_equal(codes["shift"], expected[10:20])
        assert codes["grid"].dtype == bool
        assert sum(code.nbytes for code in codes.values()) <= 10 * (3 * 4 * 5 + 3 * 8)

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"p1": 5}, r"`p1` must be in \[0, 1\], got 5"),
            ({"p1": -0.1}, r"`p1` must be in \[0, 1\], got -0.1"),
            ({"p1": float("nan")}, r"`p1` must be in \[0, 1\], got nan"),
            ({"num_masks": 0}, "`num_masks` must be a whole number of at least 1, got 0"),
            ({"grid_size": (8, 0)}, r"`grid_size` must be a whole number of at least 1, got \(8, 0\)"),
            ({"seed": -1}, "`seed` must be a whole number of at least 0, got -1"),
            ({"seed": None}, "`seed` must be a whole number of at least 0, got None"),
        ],
    )
    def test_errors(self, settings: dict, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            RISEMasks(**({"num_masks": 4} | settings))

    def test_wrong_number_of_sizes(self) -> None:
        with pytest.raises(ValueError, match=r"`grid_size` must be one number or one per spatial axis, got \(4, 4\)"):
            bind(RISEMasks(4, (4, 4)), 8, 8, 8)


class TestSlidingWindowMasks:
    @pytest.mark.parametrize("shape", [(20, 20), (17, 23), (9, 31)])
    @pytest.mark.parametrize(
        ("window", "stride"),
        [((5, 5), (5, 5)), ((6, 4), (3, 2)), ((3, 2), (7, 5)), ((9, 9), (1, 4)), ((1, 7), (2, 9))],
    )
    def test_equals_xaitk(self, shape: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> None:
        theirs = SlidingWindow(window, stride).perturb(np.zeros(shape))
        assert np.array_equal(everything(bind(SlidingWindowMasks(window, stride), *shape)), theirs)

    @pytest.mark.parametrize(
        ("shape", "window", "stride"),
        [((7, 5, 6), (3, 2, 4), (2, 2, 3)), ((6, 6, 4), (2, 2, 2), (2, 2, 2)), ((5, 8, 3), (1, 3, 3), (3, 4, 2))],
    )
    def test_3d_equals_slow_loop(
        self, shape: tuple[int, ...], window: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        assert np.array_equal(
            everything(bind(SlidingWindowMasks(window, stride), *shape)), slow_windows(shape, window, stride)
        )

    @pytest.mark.parametrize(
        ("window", "stride", "same_as"), [(4, None, 2), (5, None, 2), (1, None, 1), ((4, 6), None, (2, 3)), ([3], 2, 2)]
    )
    def test_one_number_and_default_stride(self, window: object, stride: object, same_as: object) -> None:
        """One number stands for all axes, and the default stride is half of the window."""
        ours = everything(bind(SlidingWindowMasks(window, stride), 12, 13))
        w, s = (tuple(np.broadcast_to(v, 2).tolist()) for v in (window, same_as))
        assert np.array_equal(ours, slow_windows((12, 13), w, s))

    @settings(max_examples=20, deadline=None)
    @given(
        shape=st.lists(st.integers(4, 10), min_size=2, max_size=3),
        window=st.integers(1, 4),
        stride=st.integers(1, 5),
        data=st.data(),
    )
    def test_law_2_a_mask_depends_on_index_and_shape_only(
        self, shape: list[int], window: int, stride: int, data: st.DataObject
    ) -> None:
        bound = bind(SlidingWindowMasks(window, stride), *shape)
        masks = bound.render(range(len(bound)))
        picked = data.draw(st.lists(st.integers(0, len(bound) - 1), max_size=6))
        assert torch.equal(bound.render(picked), masks[picked])
        assert torch.equal(bound.render(range(1, len(bound))), masks[1:])
        # Windows no further apart than they are long leave no voxel unseen.
        if stride <= window:
            assert bool((masks.min(dim=0).values == 0).all())

    def test_codes_are_corners(self) -> None:
        bound = bind(SlidingWindowMasks((5, 3), (4, 3)), 10, 9)
        # The last of three windows of 5 starts at 8 of 10 and hangs over by 3, so all move up by 1.
        expected = [[y, x] for y in (-1, 3, 7) for x in (0, 3, 6)]
        corners = bound.codes(range(len(bound)))["corner"]
        assert np.array_equal(corners, expected)
        assert np.issubdtype(corners.dtype, np.integer)

    @pytest.mark.parametrize(
        ("window", "stride", "match"),
        [
            (0, 1, "`window_size` must be a whole number of at least 1, got 0"),
            ((3, 3), (1, 0), r"`stride` must be a whole number of at least 1, got \(1, 0\)"),
        ],
    )
    def test_errors(self, window: object, stride: object, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            SlidingWindowMasks(window, stride)

    def test_window_larger_than_the_image(self) -> None:
        with pytest.raises(ValueError, match=r"`window_size` \(9, 9\) is larger than.*\(8, 12\).*use a smaller one"):
            bind(SlidingWindowMasks(9), 8, 12)

    @pytest.mark.parametrize(
        ("window", "stride", "spacing", "same_window", "same_stride"),
        [
            (20, 10, (1.0, 2.0, 5.0), (20, 10, 4), (10, 5, 2)),
            ((6, 5, 4.9), (6, 5, 4.9), (4.0, 2.0, 10.0), (2, 3, 1), (2, 3, 1)),  # 1.5, 2.5 and 0.49 voxels
            (10, None, (2.5, 4.0, 9.0), (4, 3, 1), (2, 1, 1)),
        ],
    )
    def test_sizes_in_mm(
        self, window: object, stride: object, spacing: tuple, same_window: tuple, same_stride: tuple
    ) -> None:
        image = torch.zeros(1, 21, 12, 5)
        in_mm = SlidingWindowMasks(window, stride, unit="mm").bind(image, spacing=spacing)
        in_voxels = SlidingWindowMasks(same_window, same_stride).bind(image, spacing=spacing)
        assert in_mm.key == in_voxels.key
        assert torch.equal(in_mm.render(range(len(in_mm))), in_voxels.render(range(len(in_voxels))))

    def test_errors_of_sizes_in_mm(self) -> None:
        with pytest.raises(ValueError, match="need the image's voxel sizes, which are unknown"):
            bind(SlidingWindowMasks(5.5, unit="mm"), 8, 8)
        with pytest.raises(ValueError, match=r"`unit` must be one of \['mm', 'voxel'\], got 'cm'"):
            SlidingWindowMasks(5, unit="cm")
        with pytest.raises(ValueError, match=r"`window_size` must be a number above 0, got \[3, -1\]"):
            SlidingWindowMasks([3, -1], unit="mm")
        with pytest.raises(ValueError, match="`stride` must be a number above 0, got nan"):
            SlidingWindowMasks(3, float("nan"), unit="mm")
        with pytest.raises(ValueError, match=r"`window_size` must be a whole number of at least 1, got 2\.5"):
            SlidingWindowMasks(2.5)
        with pytest.raises(ValueError, match=r"`window_size` \(10, 5\) is larger than .* \(8, 8\)"):
            SlidingWindowMasks(10, unit="mm").bind(torch.zeros(1, 8, 8), spacing=(1.0, 2.0))

    @pytest.mark.parametrize(("window", "stride", "name"), [((3, 3, 3), 1, "window_size"), (3, (1, 1, 1), "stride")])
    def test_wrong_number_of_sizes(self, window: object, stride: object, name: str) -> None:
        with pytest.raises(ValueError, match=f"`{name}` must be one number or one per spatial axis"):
            bind(SlidingWindowMasks(window, stride), 8, 8)


@pytest.mark.parametrize("masks", [RISEMasks(9, 3, seed=4), SlidingWindowMasks(4, 3)], ids=lambda m: type(m).__name__)
class TestAnyMasks:
    def test_law_9_precision_follows_the_image(self, masks: Masks) -> None:
        double = bind(masks, 9, 8, dtype=torch.float64).render(range(3))
        single = bind(masks, 9, 8).render(range(3))
        half = bind(masks, 9, 8, dtype=torch.float16).render(range(3))
        assert (double.dtype, single.dtype, half.dtype) == (torch.float64, torch.float32, torch.float32)
        torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-6)
        assert torch.equal(half, single)

    def test_rendering_ignores_autocast(self, masks: Masks) -> None:
        bound = bind(masks, 15, 11, 6)
        expected = bound.render(range(5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(bound.render(range(5)), expected)

    def test_stream_is_render_in_pieces(self, masks: Masks) -> None:
        bound = bind(masks, 10, 7)
        indices = [4, 0, 8, 3, 3]
        pieces = list(bound.stream(indices, max_elements=2 * 70))
        assert [len(piece) for _, piece in pieces] == [2, 2, 1]
        assert [indices[chunk] for chunk, _ in pieces] == [[4, 0], [8, 3], [3]]
        assert torch.equal(torch.cat([piece for _, piece in pieces]), bound.render(indices))
        assert len(next(iter(bound.stream(indices, max_elements=1)))[1]) == 1

    @pytest.mark.parametrize("num_weights", [1, 3, 7])
    def test_weighted_sum_is_the_sum_of_rendered_masks(self, masks: Masks, num_weights: int) -> None:
        for shape, dtype, tolerance in (((10, 7), torch.float64, 1e-14), ((9, 8, 7), torch.float32, 1e-6)):
            bound = bind(masks, *shape, dtype=dtype)
            indices = [5, 0, 3, 3, 8]
            weights = torch.randn(5, num_weights, dtype=dtype, generator=torch.Generator().manual_seed(0))
            expected = torch.zeros(num_weights, 1, *shape, dtype=torch.float64)
            for row, mask in zip(weights, bound.render(indices), strict=True):
                for k, weight in enumerate(row):
                    expected[k] += weight.double() * mask.double()
            torch.testing.assert_close(bound.weighted_sum(indices, weights), expected, rtol=0, atol=tolerance * 10)

    @pytest.mark.parametrize("indices", [[-1], [0, 9999], range(3, 10_000), range(-1, 2)])
    def test_index_out_of_range(self, masks: Masks, indices: object) -> None:
        bound = bind(masks, 10, 7)
        with pytest.raises(IndexError, match=rf"mask indices must be in \[0, {len(bound)}\), got (-1|9999)"):
            bound.render(indices)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("tf32", [False, True])
    def test_law_2_devices_agree(self, masks: Masks, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
        bound = bind(masks, 33, 20, 17)
        on_gpu = bound.render(range(6), device="cuda")
        assert on_gpu.is_cuda
        torch.testing.assert_close(on_gpu.cpu(), bound.render(range(6)), rtol=0, atol=1e-6)
        assert torch.backends.cuda.matmul.allow_tf32 is tf32


def test_mm_do_not_depend_on_an_affines_rounding() -> None:
    for edge in (2.0, 2.00000002, 1.99999998):
        assert voxels_of_mm((15.0, 20.0), (edge, edge)) == (8, 10)


class TestRegionMasks:
    LABELS = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
    IMAGE = torch.zeros(3, 2, 3)

    def test_each_region_hidden_in_turn(self) -> None:
        bound = RegionMasks().bind(self.IMAGE, labels=self.LABELS)
        assert bound.values == [2, 5, 9]
        expected = [[[1, 1, 1], [0, 0, 1]], [[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 1, 0]]]
        assert bound.render(range(3))[:, 0].tolist() == expected

    def test_random_coalitions_by_a_slow_loop(self) -> None:
        bound = RegionMasks(num_masks=50, p1=0.3, seed=4).bind(self.IMAGE, labels=self.LABELS.float())
        draws = np.random.default_rng(4).random((50, 3)) < 0.3
        for i, kept in enumerate(draws):
            expected = [[1.0 if v == 0 else float(kept[[2, 5, 9].index(v)]) for v in row] for row in self.LABELS[0]]
            assert bound.render([i])[0, 0].tolist() == expected
        assert np.array_equal(bound.codes([7, 3, 49])["coalition"], draws[[7, 3, 49]])

    def test_made_of_the_image(self) -> None:
        image = torch.tensor([[[0.0, 3.0, 0.0, 3.0]]])
        bound = RegionMasks(regions=lambda image, spacing: (image > 1).long()).bind(image)
        assert bound.render([0]).tolist() == [[[[1.0, 0.0, 1.0, 0.0]]]]

    def test_other_regions_are_other_masks(self) -> None:
        moved = self.LABELS.flip(-1)
        keys = [
            RegionMasks(9).bind(self.IMAGE, labels=labels).key for labels in (self.LABELS, self.LABELS.int(), moved)
        ]
        assert keys[0] == keys[1] != keys[2]

    @pytest.mark.parametrize(
        ("labels", "match"),
        [
            (None, "need the case's label map"),
            (torch.zeros(1, 2, 3), "no label but 0"),
            (torch.full((1, 2, 3), 0.5), "no whole numbers"),
            (torch.full((1, 2, 3), float("nan")), "no whole numbers"),
            (torch.ones(1, 3, 2), r"shape \(1, 3, 2\), the image needs one of \(1, 2, 3\)"),
        ],
    )
    def test_errors(self, labels: torch.Tensor | None, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            RegionMasks().bind(self.IMAGE, labels=labels)


class TestBoxes:
    """What masks tell of a part of an image, against their full-size form."""

    LABELS = torch.arange(12).reshape(3, 4).repeat_interleave(3, 0).repeat_interleave(4, 1)[None]
    MASKS = (SlidingWindowMasks((3, 5), (2, 4)), SlidingWindowMasks(9, 2), RegionMasks(40, 0.7), RegionMasks())

    @pytest.mark.parametrize("masks", [*MASKS, RISEMasks(6, 3)])
    @pytest.mark.parametrize("box", [(0, 9, 0, 16), (2, 5, 3, 9), (8, 9, 0, 1)])
    def test_rendered(self, masks: Masks, box: tuple[int, int, int, int]) -> None:
        bound = masks.bind(torch.zeros(1, 9, 16), labels=self.LABELS)
        indices, sides = [3, 0, 5], (slice(*box[:2]), slice(*box[2:]))
        assert torch.equal(bound.render(indices, box=sides), bound.render(indices)[:, :, sides[0], sides[1]])
        assert bound.render([], box=sides).shape == (0, 1, box[1] - box[0], box[3] - box[2])

    @pytest.mark.parametrize("masks", MASKS)
    @pytest.mark.parametrize("box", [(0, 9, 0, 16), (2, 5, 3, 9), (8, 9, 0, 1), (4, 6, 4, 8)])
    def test_restrictions_are_equal_where_masks_are(self, masks: Masks, box: tuple[int, int, int, int]) -> None:
        bound = masks.bind(torch.zeros(1, 9, 16), labels=self.LABELS)
        sides = (slice(*box[:2]), slice(*box[2:]))
        restricted = bound.restrict(range(len(bound)), sides)
        assert restricted is not None
        hides, keys = restricted
        inside = bound.render(range(len(bound)), box=sides).flatten(1)
        assert hides.tolist() == (inside == 0).any(dim=1).tolist()
        hiding = hides.nonzero()[0].tolist()
        for a, b in itertools.combinations(hiding, 2):
            assert np.array_equal(keys[a], keys[b]) == torch.equal(inside[a], inside[b]), (a, b)

    def test_random_smooth_masks_tell_nothing(self) -> None:
        bound = bind(RISEMasks(6, 3), 9, 16)
        assert bound.restrict(range(6), (slice(0, 2), slice(0, 2))) is None
        assert bound.hidden_boxes(range(6)) is None

    def test_boxes_of_windows(self) -> None:
        bound = bind(SlidingWindowMasks((3, 5), (2, 4)), 9, 16)
        boxes = bound.hidden_boxes(range(len(bound)))
        assert boxes is not None
        for box, mask in zip(boxes, everything(bound), strict=True):
            expected = np.ones_like(mask)
            expected[box] = 0
            assert np.array_equal(mask, expected)
