"""The smallest set of windows that keeps the score: by hand, against a slow search, and on remembered patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency.masks import MinimalMasks
from monai_saliency.masks.minimal import FoundRegion

SUM = ms.RegressionScore()


def explain(image: torch.Tensor, network: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> Any:
    (found,) = ms.minimal_region(**{"target": SUM} | settings).explain(image, network)
    return found


def regions(found: Any) -> list[FoundRegion]:
    return found.masks.found(found.ids, found.scores, found.reference_scores)


def box_sum(*sides: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x[(slice(None), 0, *sides)].flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize(("shape", "dims"), [((32, 24), 2), ((16, 16, 24), 3)])
@pytest.mark.parametrize(("share", "windows"), [(1.0, 4), (0.9, 4), (0.75, 3), (0.5, 2), (0.1, 1)])
def test_the_sum_of_a_box(shape: tuple[int, ...], dims: int, share: float, windows: int) -> None:
    """Four windows of 2 voxels an axis hold the box: a share of the score needs that share of them."""
    box = (slice(8, 12), slice(4, 8), slice(6, 8))[:dims]
    found = explain(
        torch.ones(1, 1, *shape), box_sum(*box), share=share, window_size=8, levels=3, keep=0.2, mask_batch_size=16
    )
    (region,) = regions(found)
    size = 2**dims
    assert region.voxels == windows * size == int(found.saliency.sum())
    assert len(region.boxes) == windows
    assert region.kept_score == windows * size
    assert region.hidden_score == (4 - windows) * size
    assert region.fill_score == 0
    assert region.kept_share == windows / 4
    inside = torch.zeros(shape)
    inside[box] = 1
    assert bool((found.saliency[0] <= inside).all())
    assert set(found.saliency.unique().tolist()) == {0, 1}


def test_the_fill_counts() -> None:
    """The score of an image of twos on ones: 0.5 of its rise over the fill, not of its value."""
    found = explain(
        torch.full((1, 1, 8, 8), 2.0), box_sum(slice(0, 4), slice(0, 2)), share=0.5, window_size=2, levels=1,
        fill=ms.ConstantFill(1.0),
    )  # fmt: skip
    (region,) = regions(found)
    assert (region.fill_score, region.kept_score, region.hidden_score, region.score) == (8, 12, 12, 16)
    assert region.voxels == 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(8, 6), (6, 4, 4)])
def test_the_slow_search(seed: int, shape: tuple[int, ...]) -> None:
    """Windows of one size and a monotone score: all sizes tried one after another, in the order of the drops."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(shape, dtype=torch.float64, generator=generator)

    def score(kept: torch.Tensor) -> torch.Tensor:
        return (kept * weight).flatten(1).sum(1, keepdim=True).square()

    image = torch.ones(1, 1, *shape).double()
    found = explain(image, lambda x: score(x[:, 0]), share=0.7, window_size=2, levels=1)
    grids = np.stack(np.meshgrid(*[range(0, n, 2) for n in shape], indexing="ij"), -1).reshape(-1, len(shape))
    boxes = [tuple(slice(a, a + 2) for a in corner) for corner in grids.tolist()]

    def hidden(box: Any) -> float:
        kept = torch.ones(1, *shape).double()
        kept[(0, *box)] = 0
        return float(score(kept))

    ordered = sorted(boxes, key=hidden)
    kept = torch.zeros(1, *shape).double()
    for box in ordered:
        kept[(0, *box)] = 1
        if float(score(kept)) >= 0.7 * float(score(torch.ones_like(kept))):
            break
    assert torch.equal(found.saliency, kept)
    (region,) = regions(found)
    assert region.kept_score == pytest.approx(float(score(kept)))
    assert region.hidden_score == pytest.approx(float(score(1 - kept)))
    # Log steps, not one forward a size.
    assert len(found.scores) <= len(boxes) + 3 * 3 + 2


def test_each_score_has_its_own_region() -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([box_sum(slice(0, 4), slice(0, 4))(x), box_sum(slice(6, 8), slice(4, 8))(x)], 1)

    found = explain(
        torch.ones(1, 1, 8, 8), network, share=1.0, window_size=4, levels=2, keep=0.5, target=ms.RegressionScore("all")
    )
    assert [region.voxels for region in regions(found)] == [16, 8]
    expected = torch.zeros(2, 8, 8)
    expected[0, :4, :4] = 1
    expected[1, 6:, 4:] = 1
    assert torch.equal(found.saliency, expected)


@pytest.mark.parametrize("sign", [0.0, -1.0])
def test_where_the_image_is_not_above_the_fill_the_region_is_empty(sign: float) -> None:
    found = explain(torch.ones(1, 1, 8, 8), lambda x: 3 + sign * box_sum(slice(2, 4), slice(2, 4))(x), window_size=2)
    (region,) = regions(found)
    assert (region.boxes, region.voxels, region.kept_share) == ([], 0, 0)
    assert region.kept_score == region.fill_score == 3
    assert region.hidden_score == region.score
    assert float(found.saliency.abs().max()) == 0


@pytest.mark.parametrize("exact", [[9.0, 4.0, 10.0, 10.0, 10.0, 8.0], [10.0] * 6])
def test_rounding_orders_nothing(exact: list[float]) -> None:
    """Windows that take nothing from the score are taken by their place, whatever the last digits of their scores."""
    bound: Any = MinimalMasks(1.0, 2, levels=1).bind(torch.zeros(1, 4, 6))
    first, reference = list(bound.first_round()), torch.tensor([10.0])
    digits = torch.tensor([0.0, 0.0, -1.0, 2.0, 4.0, 0.0])[:, None] * 2**-20  # that of float32 near 10
    scores = torch.tensor(exact)[:, None]
    assert not torch.equal(scores + digits, scores)
    expected = list(bound.next_round(first, scores, reference))
    for noisy in (scores + digits, scores - digits, scores + digits.flip(0)):
        assert list(bound.next_round(first, noisy, reference)) == expected


def test_an_id_stands_for_one_set() -> None:
    bound: Any = MinimalMasks(0.5, 2, levels=1).bind(torch.zeros(1, 4, 6))
    reference = torch.tensor([10.0])
    scores = torch.tensor([[9.0], [4.0], [10.0], [7.0], [10.0], [8.0]])
    first = list(bound.first_round())
    asked = list(bound.next_round(first, scores, reference))
    assert asked == list(bound.next_round(first, scores, reference))
    assert len(asked) == 4  # nothing, and three sizes between
    sizes = sorted(int(mask.sum()) // 4 for mask in bound.render(asked))
    assert sizes == [0, 1, 3, 4]
    with pytest.raises(ValueError, match="the search is not done"):
        bound.found(first, scores, reference)


def test_other_masks_are_refused() -> None:
    inferer = ms.PerturbationInferer(ms.SlidingWindowMasks(2), SUM, ms.MinimalRegionScoring())
    with pytest.raises(ValueError, match="a minimal region needs MinimalMasks, got masks of SlidingWindowMasks"):
        inferer.explain(torch.ones(1, 1, 4, 4), box_sum(slice(0, 2), slice(0, 2)))
