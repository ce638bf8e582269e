"""Patches of many masks are exchanged at once, to the same scores as mask by mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.patches import WHOLE, Network, blocks, images
from monai.inferers import SlidingWindowInferer

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.fills.constant import MeanFill
from monai_saliency.inferers import patch_exchange
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.patch_exchange import Exchange, layers_of
from monai_saliency.masks.base import Masks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.targets import DiceScore, RegionScore, Target
from monai_saliency.targets.members import MemberTarget
from monai_saliency.utils.patch_grid import PatchGrid


def corner(shape: tuple[int, ...]) -> torch.Tensor:
    region = torch.zeros(shape)
    region[tuple(slice(2, 6) for _ in shape)] = 1
    return region


TARGETS: dict[str, Any] = {
    "softmax": lambda shape: WHOLE,
    "three, in another order": lambda shape: RegionScore([2, 0, 1], "softmax", "all"),
    "sigmoid of two that are apart": lambda shape: RegionScore([0, 2], "sigmoid", corner(shape)),
    "components": lambda shape: RegionScore(1, "none", components=3),
    "dice": lambda shape: DiceScore([1, 2], "softmax"),
}


def scored(masks: Masks, target: Target, shape: tuple[int, ...], network: Any, **settings: Any) -> torch.Tensor:
    inferer = SlidingWindowInferer([6] * len(shape), 4, settings.pop("overlap", 0.5), mode="gaussian")
    explain = PerturbationInferer(
        masks, target, OcclusionScoring(), MeanFill(), inferer, settings.pop("batch", 8), **settings
    )
    cases = [Case(str(i), labels=blocks(shape, 4, 5, seed=i)) for i in range(2)]
    results = explain.explain(images(2, 1, *shape, dtype=torch.float64), network, cases=cases)
    return torch.cat([each.scores for each in results])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many masks each exchange took."""
    seen: list[int] = []
    scores = Exchange.scores

    def watched(exchange: Any, swaps: Any, outputs: Any) -> Any:
        seen.append(len(swaps))
        return scores(exchange, swaps, outputs)

    monkeypatch.setattr(Exchange, "scores", watched)
    return seen


@pytest.mark.parametrize("shape", [(17, 14), (9, 12, 7)])
@pytest.mark.parametrize("target", TARGETS)
def test_many_masks_at_once_score_as_whole_images(target: str, shape: tuple[int, ...], taken: list[int]) -> None:
    wanted, network = TARGETS[target](shape), Network(len(shape)).double()
    for masks in (SlidingWindowMasks(3, 3), RegionMasks(20, 0.7), RegionMasks()):
        taken.clear()
        found = scored(masks, wanted, shape, network)
        assert max(taken) > 1
        whole = scored(masks, wanted, shape, network, patch_memory=False)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("inner", [RegionScore([0, 2], "sigmoid", "all"), DiceScore([2, 0], "softmax")])
def test_networks_side_by_side(inner: Target, taken: list[int]) -> None:
    target, network = MemberTarget(inner, 2), Network(2, 6).double()
    found = scored(SlidingWindowMasks(3, 3), target, (17, 14), network)
    assert max(taken) > 1
    whole = scored(SlidingWindowMasks(3, 3), target, (17, 14), network, patch_memory=False)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", [WHOLE, DiceScore([1, 2], "softmax"), DiceScore([0, 2], "none")])
@pytest.mark.parametrize("most", [0, 10_000, 25_000])
def test_what_an_exchange_may_hold_cuts_runs(
    most: int, target: Target, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, shape, network = SlidingWindowMasks(3, 3), (17, 14), Network(2).double()
    expected = scored(masks, target, shape, network)
    largest = max(taken)
    taken.clear()
    monkeypatch.setattr(patch_exchange, "MOST", most)
    torch.testing.assert_close(scored(masks, target, shape, network), expected, rtol=0, atol=1e-12)
    assert max(taken, default=0) < largest
    assert bool(taken) == (most > 0)


def test_masks_that_change_nothing_that_is_read(taken: list[int]) -> None:
    shape, network = (24, 18), Network(2).double()
    target = RegionScore(1, "softmax", corner(shape))
    found = scored(SlidingWindowMasks(3, 3), target, shape, network, overlap=0)
    whole = scored(SlidingWindowMasks(3, 3), target, shape, network, overlap=0, patch_memory=False)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    assert sum(taken) < len(found) / 2


@pytest.mark.parametrize("overlap", [0, 0.25, 0.5, 0.7])
@pytest.mark.parametrize("shape", [(23, 9), (11, 14, 5)])
def test_patches_of_a_layer_do_not_overlap(shape: tuple[int, ...], overlap: float) -> None:
    grid = PatchGrid(SlidingWindowInferer([6] * len(shape), overlap=overlap), shape)
    layers = layers_of(grid)
    covered = [np.zeros(shape, dtype=int) for _ in range(layers.max() + 1)]
    for box, layer in zip(grid.boxes, layers, strict=True):
        covered[layer][box] += 1
    assert max(each.max() for each in covered) == 1
    total = sum(covered)
    assert len(np.unique(layers)) <= 2 ** len(shape) * total.max()
