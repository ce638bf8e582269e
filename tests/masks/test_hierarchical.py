"""Windows that are halved where they matter: by hand, and against a slow recursion over boxes."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.patches import blocks
from helpers.searches import after
from helpers.tolerances import assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.masks import BoundMasks, HierarchicalMasks, MinimalMasks
from monai_saliency.masks.hierarchical import RegionHierarchyMasks
from monai_saliency.masks.minimal import FoundRegion

LOGIT = ms.ClassScore([0], "none")


def bind(masks: HierarchicalMasks, *shape: int, spacing: tuple[float, ...] | None = None) -> BoundMasks:
    return masks.bind(torch.zeros(1, *shape), spacing=spacing)


def boxes(bound: BoundMasks, ids: Any) -> list[Any]:
    return [tuple((side.start, side.stop) for side in box) for box in bound.changed_boxes(ids) or ()]


def hidden_by(box: Any, shape: tuple[int, ...]) -> np.ndarray:
    """1 for each voxel that a window hides."""
    found = np.zeros(shape)
    found[tuple(slice(first, stop) for first, stop in box)] = 1
    return found


def slow(weight: np.ndarray, window: int, levels: int, keep: float) -> tuple[np.ndarray, set[Any]]:
    """The map and the windows by the text, for ``sum(weight * image)`` of ones."""
    sides = [[(a, min(a + window, n)) for a in range(0, n, window)] for n in weight.shape]
    level: list[Any] = list(itertools.product(*sides))
    found, windows = np.zeros(weight.shape), set()
    for number in range(levels):
        hidden = {box: hidden_by(box, weight.shape) for box in level}
        drops = {box: float((weight * hidden[box]).sum()) for box in level}
        windows |= set(level)
        for box, drop in drops.items():
            found += drop * hidden[box]
        best = sorted(level, key=lambda box: -drops[box])[: max(1, round(keep * len(level)))]
        edge = -(-window // 2 ** (number + 1))
        parts = []
        for box in best:
            if drops[box] > 0 and window > 1:
                cut = [[(a, min(a + edge, b)), (a + edge, b)] if a + edge < b else [(a, b)] for a, b in box]
                parts += list(itertools.product(*cut)) if any(len(side) > 1 for side in cut) else []
        level = sorted(parts)
        if not level:
            break
    return found, windows


@pytest.mark.parametrize("shape", [(32, 24), (17, 9), (16, 8, 12), (9, 7, 5)])
@pytest.mark.parametrize(("window", "levels", "keep"), [(8, 4, 0.1), (4, 3, 0.3), (4, 1, 0.5), (2, 6, 1.0)])
def test_the_slow_reference(shape: tuple[int, ...], window: int, levels: int, keep: float) -> None:
    if window == 8 and 5 in shape:
        pytest.skip("one window along an axis, and few others")
    """A class alone, and three side by side: each map is of the windows that its own score asks for."""
    weights = np.random.default_rng(0).normal(size=(3, *shape))
    expected, windows = zip(*(slow(weight, window, levels, keep) for weight in weights), strict=True)

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x * torch.from_numpy(each)).flatten(1).sum(1, keepdim=True) for each in weights], dim=1)

    for classes in ([0], [2, 0, 1]):
        target = ms.ClassScore(classes, "none")
        explain = ms.hierarchical_occlusion(window, levels, keep, target=target, mask_batch_size=7)
        (found,) = explain.explain(torch.ones(1, 1, *shape).double(), network)
        assert_close(found.saliency, [expected[each] for each in classes])
        count = len(set.union(*(windows[each] for each in classes)))
        assert len(found.scores) == count
        assert found.num_forwards == count + 1


def test_what_does_not_let_the_score_fall_is_not_refined() -> None:
    bound = bind(HierarchicalMasks(4, 3, keep=1), 8, 8)
    observed = after(bound, torch.tensor([5.0]), torch.tensor([[5.0], [6.0], [5.0], [9.0]]))
    assert observed.ids == bound.first_round()
    assert observed.words == "no part of level 1 was worth splitting"


@pytest.mark.parametrize(
    ("masks", "shape", "spacing", "edges"),
    [
        (HierarchicalMasks(), (64, 40), None, [(8, 8), (4, 4), (2, 2), (1, 1)]),
        (HierarchicalMasks(), (20, 13), None, [(3, 2), (2, 1), (1, 1)]),
        (HierarchicalMasks(), (64, 40, 30), None, [(16, 8, 8), (8, 4, 4), (4, 2, 2), (2, 1, 1)]),
        (HierarchicalMasks(levels=3), (64, 72, 64), None, [(16, 16, 16), (8, 8, 8), (4, 4, 4)]),
        (HierarchicalMasks(20, 3, unit="mm"), (40, 40, 8), (1.0, 1.0, 5.0), [(20, 20, 4), (10, 10, 2), (5, 5, 1)]),
        (HierarchicalMasks(inferer=SlidingWindowInferer((16, 12), overlap=0.5)), (40, 40), None, [(8, 6), (4, 3)]),
    ],
)
def test_sizes(masks: HierarchicalMasks, shape: Any, spacing: Any, edges: list[tuple[int, ...]]) -> None:
    bound: Any = bind(masks, *shape, spacing=spacing)
    firsts = [(level, *[0] * len(shape)) for level in range(bound.num_levels)]
    found = [tuple(stop - start for start, stop in box) for box in boxes(bound, firsts)]
    assert found[: len(edges)] == edges


# Regions that are split by windows where they matter: against a slow recursion over sets of voxels, and by hand.
Voxels = frozenset[tuple[int, ...]]


def windows_of(size: int, edge: int, level: int) -> list[range]:
    """The windows along an axis: of ``edge``, halved so often."""
    found = [range(a, min(a + edge, size)) for a in range(0, size, edge)]
    for _ in range(level):
        edge = -(-edge // 2)
        found = [part for each in found for part in (each[:edge], each[edge:]) if len(part)]
    return found


def slow_regions(weight: np.ndarray, labels: np.ndarray, window: int, levels: int, keep: float) -> Any:
    """The map and what masks hide for the score ``sum(weight * image)`` of ones, as the text says it."""
    everything = list(itertools.product(*map(range, labels.shape)))
    parts: list[tuple[Voxels, int]] = [
        (frozenset(at for at in everything if labels[at] == label), 0) for label in np.unique(labels) if label
    ]
    found, hidden = np.zeros(weight.shape), set()
    while parts:
        drops = {part: sum(weight[at] for at in part) for part, _ in parts}
        hidden |= set(drops)
        for part, drop in drops.items():
            for at in part:
                found[at] += drop
        best = sorted(parts, key=lambda part: -drops[part[0]])[: max(1, round(keep * len(parts)))]
        parts = []
        for part, level in best:
            if drops[part] <= 0:
                continue
            for finer in range(level + 1, levels):
                sides = [windows_of(size, window, finer - 1) for size in labels.shape]
                pieces = [part & frozenset(itertools.product(*box)) for box in itertools.product(*sides)]
                pieces = [piece for piece in pieces if piece]
                if len(pieces) > 1:
                    parts += [(piece, finer) for piece in pieces]
                    break
    return found, hidden


@pytest.mark.parametrize(("shape", "size"), [((17, 12), 4), ((9, 7, 6), 3)])
@pytest.mark.parametrize(("window", "levels", "keep"), [(5, 4, 0.3), (4, 3, 0.1), (3, 2, 1.0), (4, 1, 0.5)])
def test_the_slow_reference_of_regions(shape: Any, size: int, window: int, levels: int, keep: float) -> None:
    """Of two scores, whose maps are each of its own parts."""
    weights, labels = np.random.default_rng(0).normal(size=(2, *shape)), blocks(shape, size, 7, seed=1)
    expected, hidden = zip(
        *(slow_regions(each, labels[0].numpy(), window, levels, keep) for each in weights), strict=True
    )
    count = len(set.union(*hidden))
    target = ms.RegressionScore("all")
    explain = ms.hierarchical_occlusion(window, levels, keep, regions="label_map", target=target, mask_batch_size=7)
    by_weight = lambda x: (x * torch.from_numpy(weights)).flatten(2).sum(2)  # noqa: E731
    (found,) = explain.explain(torch.ones(1, 1, *shape).double(), by_weight, cases=[ms.Case("a", labels=labels)])
    assert_close(found.saliency, np.stack(expected))
    assert len(found.scores) == count
    assert max(map(len, hidden)) <= found.masks.at_most
    assert bool((found.saliency[:, labels[0] == 0] == 0).all())
    assert len({tuple(mask.flatten().tolist()) for mask in found.masks.render(found.ids)}) == count, "none twice"
    (made,) = explain.replace(masks=RegionHierarchyMasks(lambda image, spacing: labels, window, levels, keep)).explain(
        torch.ones(1, 1, *shape).double(), by_weight
    )
    assert torch.equal(made.saliency, found.saliency)


LABELS = torch.tensor([[[0, 0, 3, 3], [7, 7, 7, 3], [7, 7, 7, 7], [7, 7, 7, 7]]])


def bind_regions(labels: torch.Tensor = LABELS, **settings: Any) -> Any:
    masks = RegionHierarchyMasks(**{"window_size": 2, "levels": 3, "keep": 0.5, **settings})
    return masks.bind(torch.zeros(1, *labels.shape[1:]), labels)


def test_rounds_by_hand() -> None:
    bound, score = bind_regions(), torch.tensor([10.0])
    first, drops = bound.first_round(), torch.tensor([[0.0], [9.0]])
    assert first == after(bound, score) == [(0, 0, 0, 1), (0, 0, 0, 2)]
    # Region 3 lies in one window of two voxels, so single voxels are what splits it.
    pieces = after(bound, score, drops)
    assert [np.argwhere(mask[0].numpy() == 0).tolist() for mask in bound.render(pieces)] == [
        [[0, 2]],
        [[0, 3]],
        [[1, 3]],
    ]
    observed = after(bound, score, drops, torch.ones(3, 1))
    assert observed.ids == [*first, *pieces]
    assert observed.words == "level 3 was the last"
    nothing = after(bound, score, torch.tensor([[10.0], [11.0]]))
    assert nothing.ids == first
    assert nothing.words == "no part of level 1 was worth splitting"


def test_errors() -> None:
    with pytest.raises(ValueError, match="`regions` must be 'label_map' or a function of an image, got 'organs'"):
        ms.hierarchical_occlusion(regions="organs", target=ms.RegressionScore())
    with pytest.raises(ValueError, match="need the case's label map"):
        RegionHierarchyMasks().bind(torch.zeros(1, 8, 8))
    keys = {
        bind_regions().key,
        bind_regions(keep=0.2).key,
        bind_regions(levels=2).key,
        bind_regions(LABELS + 1).key,
    }
    assert len(keys) == 4
    assert bind_regions().key == bind_regions().key


# The smallest set of windows that keeps the score: by hand, against a slow search, and on remembered patches.
SUM = ms.RegressionScore()


def explain(image: torch.Tensor, network: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> Any:
    (found,) = ms.minimal_region(**{"target": SUM} | settings).explain(image, network)
    return found


def regions(found: Any) -> list[FoundRegion]:
    return [observed.finding for observed in found.observed]


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
    weight = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    score = lambda kept: (kept * weight).flatten(1).sum(1, keepdim=True).square()  # noqa: E731
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
    assert_close(region.kept_score, score(kept).squeeze())
    assert_close(region.hidden_score, score(1 - kept).squeeze())
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
    bound: Any = MinimalMasks(1.0, HierarchicalMasks(2, levels=1)).bind(torch.zeros(1, 4, 6))
    reference = torch.tensor([10.0])
    digits = torch.tensor([0.0, 0.0, -1.0, 2.0, 4.0, 0.0])[:, None] * 2**-20  # that of float32 near 10
    scores = torch.tensor(exact)[:, None]
    assert not torch.equal(scores + digits, scores)
    expected = list(after(bound, reference, scores))
    for noisy in (scores + digits, scores - digits, scores + digits.flip(0)):
        assert list(after(bound, reference, noisy)) == expected


def test_an_id_stands_for_one_set() -> None:
    bound: Any = MinimalMasks(0.5, HierarchicalMasks(2, levels=1)).bind(torch.zeros(1, 4, 6))
    reference = torch.tensor([10.0])
    scores = torch.tensor([[9.0], [4.0], [10.0], [7.0], [10.0], [8.0]])
    asked = list(after(bound, reference, scores))
    assert asked == list(after(bound, reference, scores))
    assert len(asked) == 4  # nothing, and three sizes between
    assert sorted(int(mask.sum()) // 4 for mask in bound.render(asked)) == [0, 1, 3, 4]


def test_other_masks_are_refused() -> None:
    inferer = ms.PerturbationInferer(ms.masks.SlidingWindowMasks(2), SUM, ms.estimators.MinimalRegionScoring())
    with pytest.raises(ValueError, match="a minimal region needs MinimalMasks, got masks of SlidingWindowMasks"):
        inferer.explain(torch.ones(1, 1, 4, 4), box_sum(slice(0, 2), slice(0, 2)))
