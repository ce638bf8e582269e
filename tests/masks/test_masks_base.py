"""What holds for masks of every family."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.masks import bind

from monai_saliency.masks.base import Masks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks


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
        ids = [4, 0, 8, 3, 3]
        pieces = list(bound.stream(ids, max_elements=2 * 70))
        assert [len(piece) for _, piece in pieces] == [2, 2, 1]
        assert [ids[chunk] for chunk, _ in pieces] == [[4, 0], [8, 3], [3]]
        assert torch.equal(torch.cat([piece for _, piece in pieces]), bound.render(ids))
        assert len(next(iter(bound.stream(ids, max_elements=1)))[1]) == 1

    @pytest.mark.parametrize("num_weights", [1, 3, 7])
    def test_weighted_sum_is_the_sum_of_rendered_masks(self, masks: Masks, num_weights: int) -> None:
        for shape, dtype, tolerance in (((10, 7), torch.float64, 1e-14), ((9, 8, 7), torch.float32, 1e-6)):
            bound = bind(masks, *shape, dtype=dtype)
            ids = [5, 0, 3, 3, 8]
            weights = torch.randn(5, num_weights, dtype=dtype, generator=torch.Generator().manual_seed(0))
            expected = torch.zeros(num_weights, 1, *shape, dtype=torch.float64)
            for row, mask in zip(weights, bound.render(ids), strict=True):
                for k, weight in enumerate(row):
                    expected[k] += weight.double() * mask.double()
            torch.testing.assert_close(bound.weighted_sum(ids, weights), expected, rtol=0, atol=tolerance * 10)

    @pytest.mark.parametrize("ids", [[5, 0, 3, 3, 8], range(2, 7), []])
    def test_along_axes_is_the_product_with_rendered_masks(self, masks: Masks, ids: Sequence[int]) -> None:
        bound = bind(masks, 9, 8, 7)
        rows, columns, slices = (
            torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            for shape in ((9, 4), (8, 1), (7, 12))
        )
        expected = torch.einsum("ncxyz,xa,yb,zd->ncabd", bound.render(ids).double(), rows, columns, slices)
        found = bound.along_axes(ids, [rows, columns, slices])
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("ids", [[-1], [0, 9999], range(3, 10_000), range(-1, 2)])
    def test_index_out_of_range(self, masks: Masks, ids: object) -> None:
        bound = bind(masks, 10, 7)
        with pytest.raises(IndexError, match=rf"mask ids must be in \[0, {len(bound)}\), got (-1|9999)"):
            bound.render(ids)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("tf32", [False, True])
    def test_law_2_devices_agree(self, masks: Masks, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
        bound = bind(masks, 33, 20, 17)
        on_gpu = bound.render(range(6), device="cuda")
        assert on_gpu.is_cuda
        torch.testing.assert_close(on_gpu.cpu(), bound.render(range(6)), rtol=0, atol=1e-6)
        assert torch.backends.cuda.matmul.allow_tf32 is tf32


class TestBoxes:
    """What masks tell of a part of an image, against their full-size form."""

    LABELS = torch.arange(12).reshape(3, 4).repeat_interleave(3, 0).repeat_interleave(4, 1)[None]
    MASKS = (SlidingWindowMasks((3, 5), (2, 4)), SlidingWindowMasks(9, 2), RegionMasks(40, 0.7), RegionMasks())

    @pytest.mark.parametrize("masks", [*MASKS, RISEMasks(6, 3)])
    @pytest.mark.parametrize("box", [(0, 9, 0, 16), (2, 5, 3, 9), (8, 9, 0, 1)])
    def test_rendered(self, masks: Masks, box: tuple[int, int, int, int]) -> None:
        bound = masks.bind(torch.zeros(1, 9, 16), labels=self.LABELS)
        ids, sides = [3, 0, 5], (slice(*box[:2]), slice(*box[2:]))
        assert torch.equal(bound.render(ids, box=sides), bound.render(ids)[:, :, sides[0], sides[1]])
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
