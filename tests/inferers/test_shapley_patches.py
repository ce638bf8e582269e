"""Shapley values of sliding-window models: equal to whole images, from the patches that there are, and no more."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.patches import WHOLE, Network, blocks, images
from helpers.shapley import by_coalitions
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.utils.patch_grid import PatchGrid

# Shape, patch, edge of the cubes, and players with the background.
CASES: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [
    ((24, 20), (12, 12), 5, 10),
    ((14, 12, 10), (8, 8, 8), 5, 8),
]

# Ten players side by side, few of which meet in patches of eight voxels.
STRIPES = (torch.arange(40) // 4)[None, :, None].expand(1, 40, 8)


class Wide(Network):
    """Each voxel's output depends on all voxels of its patch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 4 * x.flatten(1).mean(dim=1).reshape(-1, *[1] * (x.ndim - 1)))


def players_of(labels: torch.Tensor, background: bool = True) -> list[int]:
    found: list[int] = labels.unique().tolist()
    return [label for label in found if label or background]


def patches_at_most(labels: torch.Tensor, inferer: SlidingWindowInferer, read: Sequence[int] | None = None) -> int:
    """The sum over patches (those that are read) of 2^(players in the patch); one of each set is unperturbed."""
    boxes = PatchGrid(inferer, labels.shape[1:]).boxes
    sets = [2 ** len(labels[0][box].unique()) for box in boxes]
    chosen = range(len(boxes)) if read is None else read
    return sum(sets[patch] for patch in chosen) + len(boxes) - len(chosen)


def distinct(shape: tuple[int, ...], size: int, players: int) -> torch.Tensor:
    """A label map with so many players, some of them of several cubes."""
    drawn = (blocks(shape, size, 2 * players, seed) for seed in range(500))
    return next(found for found in drawn if len(found.unique()) == players and bool((found == 0).any()))


@pytest.mark.parametrize(("shape", "roi", "size", "players"), CASES)
def test_as_whole_images_from_no_more_patches_than_there_are(
    shape: tuple[int, ...], roi: tuple[int, ...], size: int, players: int
) -> None:
    regions, network = distinct(shape, size, players), Wide(len(shape)).double()
    image, inferer = images(1, 1, *shape, dtype=torch.float64), SlidingWindowInferer(roi, 4, 0.5)
    case = Case("a", labels=regions)
    explain = ms.shapley(target=WHOLE, inferer=inferer)
    network.rows = 0
    (found,) = explain.explain(image, network, cases=[case])
    values = ms.shapley_values(found)
    assert values.players == players_of(regions)
    assert values.standard_error is None
    most = patches_at_most(regions, inferer)
    assert found.num_forwards <= most
    # Beside them go rows that fill a batch, and looks at rows alone.
    assert network.rows <= most + 20 * inferer.sw_batch_size
    every = explain.replace(masks=ms.CoalitionMasks())
    (enumerated,) = every.explain(image, network, cases=[case])
    assert len(enumerated.scores) == 2 ** len(values.players) - 1 >= len(found.scores)
    assert enumerated.num_forwards <= most
    (whole,) = every.replace(patch_memory=False).explain(image, network, cases=[case])
    assert whole.num_forwards == 2 ** len(values.players)
    for other in (enumerated, whole):
        torch.testing.assert_close(ms.shapley_values(other).values, values.values, rtol=0, atol=1e-12)
        torch.testing.assert_close(other.saliency, found.saliency, rtol=0, atol=1e-12)
    fill = torch.zeros_like(image)
    bound = found.target
    lost = bound(inferer(image, network)) - bound(inferer(fill, network))
    assert float(values.values.sum()) == pytest.approx(float(lost), abs=1e-12)
    assert float(values.values.abs().max()) > 1e-4


def by_cells(
    regions: torch.Tensor, inferer: SlidingWindowInferer, network: Any, image: torch.Tensor, target: Any
) -> dict[int, float]:
    """The definition, once for each cell: the game of what its voxels add to the score, run as whole images."""
    shape = regions.shape[1:]
    boxes = PatchGrid(inferer, shape).boxes
    cells: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for voxel in itertools.product(*map(range, shape)):
        over = tuple(
            number
            for number, box in enumerate(boxes)
            if all(side.start <= at < side.stop for side, at in zip(box, voxel, strict=True))
        )
        cells.setdefault(over, []).append(voxel)
    values = dict.fromkeys(players_of(regions), 0.0)
    probabilities: dict[frozenset[int], torch.Tensor] = {}
    for over, voxels in cells.items():
        players = sorted(set().union(*(regions[0][boxes[number]].unique().tolist() for number in over)))
        places = tuple(np.array(voxels).T)

        @functools.cache
        def game(kept: frozenset[int], players: Any = players, places: Any = places) -> float:
            hidden = frozenset(players) - kept
            if hidden not in probabilities:
                gone = torch.from_numpy(np.isin(regions.numpy(), list(hidden)))
                output = inferer(torch.where(gone, torch.zeros_like(image), image), network)
                probabilities[hidden] = output.softmax(dim=1)[0, 1] / regions.numel()
            return float(probabilities[hidden][places].sum())

        for player, value in by_coalitions(game, players).items():
            values[player] += value
    return values


@pytest.mark.parametrize(("shape", "roi", "size", "labels"), [((16, 20), (8, 8), 6, 60)])
def test_more_players_than_can_be_enumerated(
    shape: tuple[int, ...], roi: tuple[int, ...], size: int, labels: int
) -> None:
    regions, network = blocks(shape, size, labels, seed=5), Wide(len(shape)).double()
    image, inferer = images(1, 1, *shape, dtype=torch.float64), SlidingWindowInferer(roi, 8, 0.5)
    assert len(players_of(regions)) > 8
    (found,) = ms.shapley(target=WHOLE, inferer=inferer).explain(image, network, cases=[Case("a", labels=regions)])
    with torch.no_grad():
        expected = by_cells(regions, inferer, network, image, found.target)
    assert ms.shapley_values(found).table() == pytest.approx(expected, abs=1e-12)
    assert found.num_forwards <= patches_at_most(regions, inferer)


def test_a_score_that_is_linear_is_a_sum_over_patches() -> None:
    """Fewer coalitions, and the same values; a softmax of what is blended is not linear."""
    inferer, network = SlidingWindowInferer((8, 8), 8, 0.5), Wide(2).double()
    image, case = images(1, 1, 40, 8, dtype=torch.float64), Case("a", labels=STRIPES)
    logits, probabilities = ms.RegionScore(1, "none", "all"), ms.RegionScore(1, "softmax", "all")
    explain, other = (ms.shapley(target=target, inferer=inferer) for target in (logits, probabilities))
    (few,) = explain.explain(image, network, cases=[case])
    (enumerated,) = explain.replace(masks=ms.CoalitionMasks(), patch_memory=False).explain(image, network, cases=[case])
    torch.testing.assert_close(few.saliency, enumerated.saliency, rtol=0, atol=1e-12)
    (more,) = other.explain(image, network, cases=[case])
    assert max(len(meeting.players) for meeting in few.masks.meetings) == 2
    assert max(len(meeting.players) for meeting in more.masks.meetings) == 3
    assert few.num_forwards <= patches_at_most(STRIPES, inferer)
    with pytest.raises(ValueError, match="it is not a sum over voxels"):
        other.replace(masks=explain.masks).explain(image, network, cases=[case])


@pytest.mark.slow
def test_random_coalitions_share_patches() -> None:
    """More coalitions cost no further patches once each set of the players in a patch was met."""
    shape, inferer = (24, 20), SlidingWindowInferer((8, 8), 8, 0.5)
    regions, network = blocks(shape, 5, 60, seed=5), Wide(2).double()
    image, case = images(1, 1, *shape, dtype=torch.float64), Case("a", labels=regions)
    explain = ms.shapley(401, target=WHOLE, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    assert found.num_forwards <= patches_at_most(regions, inferer)
    (whole,) = explain.replace(patch_memory=False).explain(image, network, cases=[case])
    torch.testing.assert_close(found.saliency, whole.saliency, rtol=0, atol=1e-12)
    exact = ms.shapley_values(ms.shapley(target=WHOLE, inferer=inferer).explain(image, network, cases=[case])[0]).values
    drawn = ms.shapley_values(found)
    assert drawn.standard_error is not None
    assert bool(((drawn.values - exact).abs() < 5 * drawn.standard_error + 1e-12).all())


@pytest.mark.slow
def test_too_many_players_in_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are estimated from random coalitions of all players, which the explanation reports."""
    shape, players = (24, 20), 12
    regions, network = distinct(shape, 5, players), Wide(2).double()
    image, inferer = images(1, 1, *shape, dtype=torch.float64), SlidingWindowInferer((12, 12), 16, 0.5)
    case = Case("a", labels=regions)
    explain = ms.shapley(target=WHOLE, inferer=inferer)
    (exact,) = explain.explain(image, network, cases=[case])
    monkeypatch.setattr("monai_saliency.masks.coalition._MOST_ON_PATCHES", len(exact.scores) - 1)
    (found,) = explain.explain(image, network, cases=[case])
    values, known = ms.shapley_values(found), ms.shapley_values(exact)
    assert "12 players were estimated from 120 random coalitions" in found.stopped
    assert values.standard_error is not None
    torch.testing.assert_close(values.values.sum(dim=0), known.values.sum(dim=0), rtol=0, atol=1e-12)
    assert bool(((values.values - known.values).abs() <= 5 * values.standard_error + 1e-12).all())


@pytest.mark.parametrize("region", ["label", "false_positive"])
def test_true_and_false_positives(region: str) -> None:
    """Means over voxels that a label has or has not, so that few coalitions decide them."""
    inferer, network = SlidingWindowInferer((8, 8), 8, 0.5), Wide(2).double()
    image, case = images(1, 1, 40, 8, dtype=torch.float64), Case("a", labels=STRIPES)
    target = ms.RegionScore(1, "softmax", region, label_values=[[2, 3, 4]])
    explain = ms.shapley(target=target, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    (whole,) = explain.replace(masks=ms.CoalitionMasks(), patch_memory=False).explain(image, network, cases=[case])
    torch.testing.assert_close(found.saliency, whole.saliency, rtol=0, atol=1e-12)
    assert len(found.scores) < len(whole.scores)
    assert float(found.saliency.abs().max()) > 1e-4


def test_channels_and_a_float32_network() -> None:
    shape, inferer = (16, 14), SlidingWindowInferer((8, 8), 4, 0.5)
    regions, network = blocks(shape, 6, 4, seed=2), Wide(2, channels=2)
    image, case = images(1, 2, *shape), Case("a", labels=regions)
    explain = ms.shapley(per_channel=True, background=False, target=WHOLE, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    (whole,) = explain.replace(masks=ms.CoalitionMasks(background=False, per_channel=True), patch_memory=False).explain(
        image, network, cases=[case]
    )
    assert found.saliency.shape == (2, *shape)
    torch.testing.assert_close(found.saliency, whole.saliency, rtol=0, atol=1e-6)
    assert float(found.saliency.abs().max()) > 1e-3
    assert bool((found.saliency[:, regions[0] == 0] == 0).all())


@pytest.mark.slow
def test_a_score_that_is_not_a_sum_is_enumerated() -> None:
    """The Dice score divides by what all voxels sum to."""
    inferer, network = SlidingWindowInferer((8, 8), 8, 0.5), Wide(2).double()
    image = images(1, 1, 40, 8, dtype=torch.float64)
    target, case = ms.DiceScore(1, "softmax"), Case("a", labels=STRIPES)
    explain = ms.shapley(target=target, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    assert len(found.scores) == 2**10 - 1
    (whole,) = explain.replace(patch_memory=False).explain(image, network, cases=[case])
    torch.testing.assert_close(found.saliency, whole.saliency, rtol=0, atol=1e-12)
