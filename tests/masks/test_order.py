from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from monai_saliency.masks.grid import SubsetMasks
from monai_saliency.masks.order import OrderMasks


def test_a_sparse_map_loses_nothing() -> None:
    saliency = torch.zeros(10, 10)
    saliency[2, 3], saliency[4, 4:6] = 2, 1
    bound = OrderMasks(saliency, 5).bind(torch.zeros(1, 10, 10))
    assert bound.hidden_fractions == [0.03, 1.0]
    assert torch.equal(bound.render([0])[0, 0] == 0, saliency > 0)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("box", [(0, 9, 0, 16), (2, 5, 3, 9), (8, 9, 0, 1), (4, 6, 4, 8)])
def test_parts_are_parts_of_the_whole(keep: bool, box: tuple[int, int, int, int]) -> None:
    saliency = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    bound = OrderMasks(saliency, 15, keep).bind(torch.zeros(1, 9, 16))
    every, sides = range(len(bound)), (slice(*box[:2]), slice(*box[2:]))
    inside = bound.render(every, box=sides)
    assert torch.equal(inside, bound.render(every)[:, :, sides[0], sides[1]])
    hides, keys = bound.restrict(every, sides)
    assert hides.tolist() == (inside.flatten(1) == 0).any(1).tolist()
    for a, b in itertools.combinations(np.flatnonzero(hides), 2):
        assert np.array_equal(keys[a], keys[b]) == torch.equal(inside[a], inside[b])


def test_subsets_have_as_many_cells_each_alike_often() -> None:
    bound = SubsetMasks(3000, 3, 4, seed=1).bind(
        torch.zeros(1, 6, 4)
    )  # cells of one or two voxels along the first axis
    kept = bound.codes(range(3000))["coalition"].reshape(3000, 4, 4)
    assert set((~kept).sum((1, 2)).tolist()) == {3}
    share = (~kept).mean(0)
    assert abs(share - 3 / 16).max() < 0.03


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"must be one finite map \(\*spatial\), 2D or 3D, got \(2, 3, 4, 5\)"):
        OrderMasks(torch.ones(2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"the label map has shape \(1, 9, 15\)"):
        OrderMasks(torch.ones(9, 16), regions=torch.ones(1, 9, 15))
