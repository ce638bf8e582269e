from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from monai_saliency.masks.grid import SubsetMasks
from monai_saliency.masks.order import OrderMasks


def slow_masks(saliency: np.ndarray, steps: int, keep: bool) -> list[np.ndarray]:
    """Voxel by voxel: each step takes its share of the highest, and all as high as the last of them; where these are
    more than its share, another mask stops before them.
    """
    ordered = sorted(saliency.ravel(), reverse=True)
    found: list[np.ndarray] = []
    for step in range(steps):
        wanted = max(1, round((step + 1) * len(ordered) / steps))
        least = ordered[wanted - 1]
        masks = [np.ones(saliency.shape), np.ones(saliency.shape)]
        for at in np.ndindex(saliency.shape):
            masks[0][at], masks[1][at] = saliency[at] <= least, saliency[at] < least
        if (masks[1] == 0).sum() == wanted or masks[0].all():
            masks = masks[1:]
        found += [mask for mask in masks if not any(np.array_equal(mask, other) for other in found)]
    return found if not keep else [1 - mask for mask in [np.ones(saliency.shape), *found[:-1]]]


def a_map(dims: int, ties: bool) -> torch.Tensor:
    values = torch.randn((5, 6, 4)[:dims], generator=torch.Generator().manual_seed(dims))
    return (values * 2).round() if ties else values


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("steps", [1, 7, 30, 1000])
def test_order_masks_equal_plain_loops(steps: int, dims: int, ties: bool, keep: bool) -> None:
    saliency = a_map(dims, ties)
    bound = OrderMasks(saliency[None], steps, keep).bind(torch.zeros(2, *saliency.shape, dtype=torch.float64))
    expected = slow_masks(saliency.double().numpy(), steps, keep)
    assert np.array_equal(bound.render(range(len(bound)))[:, 0].numpy(), np.stack(expected))
    np.testing.assert_allclose(bound.hidden_fractions, [1 - mask.mean() for mask in expected], rtol=0, atol=1e-12)
    assert bound.hidden_fractions[0 if keep else -1] == 1


def test_a_sparse_map_loses_nothing() -> None:
    saliency = torch.zeros(10, 10)
    saliency[2, 3], saliency[4, 4:6] = 2, 1
    bound = OrderMasks(saliency, 5).bind(torch.zeros(1, 10, 10))
    assert bound.hidden_fractions == [0.03, 1.0]
    assert torch.equal(bound.render([0])[0, 0] == 0, saliency > 0)


def test_regions_go_at_once_in_the_order_of_their_mean() -> None:
    saliency = torch.tensor([[9.0, 0.0, 5.0], [1.0, 5.0, 2.0]])
    regions = torch.tensor([[[3, 3, 8], [0, 8, 0]]])  # means 4.5, 5 and 1.5
    bound = OrderMasks(saliency, 100, regions=regions).bind(torch.zeros(1, 2, 3))
    hidden = (1 - bound.render(range(3)))[:, 0].int().tolist()
    again = OrderMasks(saliency[None], 100, regions=regions[0]).bind(torch.zeros(1, 2, 3))
    assert torch.equal(again.render(range(3)), bound.render(range(3)))
    assert hidden == [[[0, 0, 1], [0, 1, 0]], [[1, 1, 1], [0, 1, 0]], [[1, 1, 1], [1, 1, 1]]]


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
