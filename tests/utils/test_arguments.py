from __future__ import annotations

import torch
from monai.data import MetaTensor

from monai_saliency.utils.arguments import voxels_of_mm
from monai_saliency.utils.tensors import plain


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


def test_mm_do_not_depend_on_an_affines_rounding() -> None:
    for edge in (2.0, 2.00000002, 1.99999998):
        assert voxels_of_mm((15.0, 20.0), (edge, edge)) == (8, 10)
