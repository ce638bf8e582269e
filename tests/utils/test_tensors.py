from __future__ import annotations

import torch
from monai.data import MetaTensor

from monai_saliency.utils.tensors import blend, finite_between, plain


class TestPlain:
    def test_a_meta_tensors_own_memory(self) -> None:
        image = MetaTensor(torch.zeros(2, 3))
        tensor = plain(image)
        assert type(tensor) is torch.Tensor
        tensor[1, 2] = 7
        assert image[1, 2] == 7

    def test_anything_else_as_it_is(self) -> None:
        for value in (torch.ones(3), [MetaTensor(torch.ones(1))], None):
            assert plain(value) is value


class TestBlend:
    def test_finite_values_as_lerp_gives_them(self) -> None:
        fill, image = torch.randn(2, 3, 5, 4)
        share = torch.rand(6, 1, 5, 4).round(decimals=1)
        assert finite_between(fill, image)
        expected = torch.lerp(fill, image, share)
        for is_finite in (True, False):  # to the bit
            assert torch.equal(blend(fill, image, share, is_finite), expected)

    def test_what_is_not_finite_counts_where_it_is_kept(self) -> None:
        nan, inf = float("nan"), float("inf")
        image = torch.tensor([[nan, inf, -inf, 5.0]])
        fill, share = torch.ones(1, 4), torch.tensor([0.0, 0.25, 0.75, 1.0])[:, None, None]
        assert not finite_between(fill, image)
        out = torch.zeros(4, 2, 4)[:, :1]
        blend(fill, image, share, False, out=out)
        expected = torch.tensor([[1.0, 1, 1, 1], [nan, inf, -inf, 2], [nan, inf, -inf, 4], [nan, inf, -inf, 5]])
        assert torch.equal(out[:, 0].nan_to_num(77), expected.nan_to_num(77))

    def test_what_overflows_on_the_way_is_exact(self) -> None:
        fill, image = torch.tensor([[-3e38]]), torch.tensor([[3e38]])
        share = torch.tensor([0.0, 1.0])[:, None, None]
        assert blend(fill, image, share, finite_between(fill, image)).flatten().tolist() == [*fill[0], *image[0]]
