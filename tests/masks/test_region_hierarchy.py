"""Regions that are split by windows where they matter: against a slow recursion over sets of voxels, and by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.patches import blocks

import monai_saliency as ms
from monai_saliency.masks.hierarchical import RegionHierarchyMasks

Voxels = frozenset[tuple[int, ...]]


def windows_of(size: int, edge: int, level: int) -> list[range]:
    """The windows along an axis: of ``edge``, halved so often."""
    found = [range(a, min(a + edge, size)) for a in range(0, size, edge)]
    for _ in range(level):
        edge = -(-edge // 2)
        found = [part for each in found for part in (each[:edge], each[edge:]) if len(part)]
    return found


def slow(
    weight: np.ndarray, labels: np.ndarray, window: int, levels: int, keep: float
) -> tuple[np.ndarray, set[Voxels]]:
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
def test_the_slow_reference(shape: tuple[int, ...], size: int, window: int, levels: int, keep: float) -> None:
    """Of two scores, whose maps are each of its own parts."""
    weights, labels = np.random.default_rng(0).normal(size=(2, *shape)), blocks(shape, size, 7, seed=1)
    expected, hidden = zip(*(slow(each, labels[0].numpy(), window, levels, keep) for each in weights), strict=True)
    count = len(set.union(*hidden))
    target = ms.RegressionScore("all")
    explain = ms.hierarchical_occlusion(window, levels, keep, regions="label_map", target=target, mask_batch_size=7)
    by_weight = lambda x: (x * torch.from_numpy(weights)).flatten(2).sum(2)  # noqa: E731
    (found,) = explain.explain(torch.ones(1, 1, *shape).double(), by_weight, cases=[ms.Case("a", labels=labels)])
    np.testing.assert_allclose(found.saliency, np.stack(expected), rtol=1e-9, atol=1e-9)
    assert len(found.scores) == count
    assert max(map(len, hidden)) <= found.masks.at_most
    assert bool((found.saliency[:, labels[0] == 0] == 0).all())
    assert len({tuple(mask.flatten().tolist()) for mask in found.masks.render(found.ids)}) == count, "none twice"
    (made,) = explain.replace(masks=RegionHierarchyMasks(lambda image, spacing: labels, window, levels, keep)).explain(
        torch.ones(1, 1, *shape).double(), by_weight
    )
    assert torch.equal(made.saliency, found.saliency)


LABELS = torch.tensor([[[0, 0, 3, 3], [7, 7, 7, 3], [7, 7, 7, 7], [7, 7, 7, 7]]])


def bind(labels: torch.Tensor = LABELS, **settings: Any) -> Any:
    masks = RegionHierarchyMasks(**{"window_size": 2, "levels": 3, "keep": 0.5, **settings})
    return masks.bind(torch.zeros(1, *labels.shape[1:]), labels)


def test_rounds_by_hand() -> None:
    bound, score = bind(), torch.tensor([10.0])
    first = bound.first_round()
    assert first == [(0, 0, 0, 1), (0, 0, 0, 2)]
    # Region 3 lies in one window of two voxels, so single voxels are what splits it.
    pieces = bound.next_round(first, torch.tensor([[0.0], [9.0]]), score)
    assert [np.argwhere(mask[0].numpy() == 0).tolist() for mask in bound.render(pieces)] == [
        [[0, 2]],
        [[0, 3]],
        [[1, 3]],
    ]
    given = [*first, *pieces], torch.tensor([[0.0], [9.0], [1.0], [1.0], [1.0]]), score
    assert bound.next_round(*given) is None
    assert bound.stopped(*given) == "level 3 was the last"
    nothing = first, torch.tensor([[10.0], [11.0]]), score
    assert bound.next_round(*nothing) is None
    assert bound.stopped(*nothing) == "no part of level 1 was worth splitting"


def test_errors() -> None:
    with pytest.raises(ValueError, match="`regions` must be 'label_map' or a function of an image, got 'organs'"):
        ms.hierarchical_occlusion(regions="organs", target=ms.RegressionScore())
    with pytest.raises(ValueError, match="need the case's label map"):
        RegionHierarchyMasks().bind(torch.zeros(1, 8, 8))
    keys = {bind().key, bind(keep=0.2).key, bind(levels=2).key, bind(LABELS + 1).key, bind(smooth=2).key}
    assert len(keys) == 5
    assert bind().key == bind().key
