"""Windows that are halved where they matter: by hand, and against a slow recursion over boxes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.masks import BoundMasks, HierarchicalMasks

LOGIT = ms.ClassScore([0], "none")


def bind(masks: HierarchicalMasks, *shape: int, spacing: tuple[float, ...] | None = None) -> BoundMasks:
    return masks.bind(torch.zeros(1, *shape), spacing=spacing)


def boxes(bound: BoundMasks, ids: Any) -> list[Any]:
    return [tuple((side.start, side.stop) for side in box) for box in bound.changed_boxes(ids) or ()]


def weighted(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x[:, 0] * weight).flatten(1).sum(1, keepdim=True)


def hidden_by(box: Any, shape: tuple[int, ...], width: float) -> np.ndarray:
    """How far a window hides each voxel: the part of a line of ``width`` around the voxel that lies in it, along each
    axis, where a side at the image's border reaches on beyond it.
    """
    found = np.ones(shape)
    for axis, ((first, stop), size) in enumerate(zip(box, shape, strict=True)):
        low, high = first if first > 0 else -np.inf, stop if stop < size else np.inf
        along = []
        for voxel in range(size):
            left, right = voxel + 0.5 - width / 2, voxel + 0.5 + width / 2
            along.append(max(0.0, min(right, high) - max(left, low)) / width)
        found *= np.reshape(along, [-1 if a == axis else 1 for a in range(len(shape))])
    return found


def slow(weight: np.ndarray, window: int, levels: int, keep: float, width: float = 1) -> tuple[np.ndarray, set[Any]]:
    """The map and the windows, written as the text says it, for the score ``sum(weight * image)`` of ones.
    An edge rises over ``width`` voxels.
    """
    sides = [[(a, min(a + window, n)) for a in range(0, n, window)] for n in weight.shape]
    level: list[Any] = list(itertools.product(*sides))
    found, windows = np.zeros(weight.shape), set()
    for number in range(levels):
        hidden = {box: hidden_by(box, weight.shape, width) for box in level}
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
        return torch.cat([weighted(torch.from_numpy(weight))(x) for weight in weights], dim=1)

    for classes in ([0], [2, 0, 1]):
        target = ms.ClassScore(classes, "none")
        explain = ms.hierarchical_occlusion(window, levels, keep, target=target, mask_batch_size=7)
        (found,) = explain.explain(torch.ones(1, 1, *shape).double(), network)
        np.testing.assert_allclose(found.saliency, [expected[each] for each in classes], rtol=1e-9, atol=1e-9)
        count = len(set.union(*(windows[each] for each in classes)))
        assert len(found.scores) == count
        assert found.num_forwards == count + 1


@pytest.mark.parametrize("shape", [(17, 9), (9, 7, 5)])
@pytest.mark.parametrize("width", [2, 2.5, 5])
def test_smooth_edges_and_the_slow_reference(shape: tuple[int, ...], width: float) -> None:
    weight = np.random.default_rng(1).normal(size=shape)
    expected, windows = slow(weight, 4, 3, 0.3, width)
    explain = ms.hierarchical_occlusion(4, 3, 0.3, smooth=width, target=LOGIT, mask_batch_size=7)
    (found,) = explain.explain(torch.ones(1, 1, *shape).double(), weighted(torch.from_numpy(weight)))
    np.testing.assert_allclose(found.saliency[0].numpy(), expected, rtol=1e-9, atol=1e-9)
    assert len(found.scores) == len(windows)


def test_levels_by_hand() -> None:
    """Edges 4, 2 and 1; the last window of the second axis is cut."""
    bound: Any = bind(HierarchicalMasks(4, 4), 8, 6)
    first = bound.first_round()
    assert first == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert boxes(bound, first[1:3]) == [((0, 4), (4, 6)), ((4, 8), (0, 4))]
    assert bound.grids == [[2, 2], [4, 3], [8, 6]]  # a fourth level would be the third
    assert boxes(bound, [(1, 0, 2), (1, 1, 0)]) == [((0, 2), (4, 6)), ((2, 4), (0, 2))]
    score = torch.tensor([10.0])
    scores = torch.tensor([[9.0], [3.0], [10.0], [11.0]])
    second = bound.next_round(first, scores, score)
    assert second == [(1, 0, 2), (1, 1, 2)]
    third = bound.next_round([*first, *second], torch.cat([scores, scores[:2]]), score)
    assert boxes(bound, third) == [((y, y + 1), (x, x + 1)) for y in (2, 3) for x in (4, 5)]
    assert bound.next_round([*first, *second, *third], torch.zeros(10, 1), score) is None


def test_what_does_not_let_the_score_fall_is_not_refined() -> None:
    bound = bind(HierarchicalMasks(4, 3, keep=1), 8, 8)
    given = bound.first_round(), torch.tensor([[5.0], [6.0], [5.0], [9.0]]), torch.tensor([5.0])
    assert bound.next_round(*given) is None
    assert bound.stopped(*given) == "no part of level 1 was worth splitting"


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
