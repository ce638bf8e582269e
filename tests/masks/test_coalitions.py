"""Coalitions: by hand, and what every order of the work must give alike."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.patches import blocks
from monai.inferers import SlidingWindowInferer

from monai_saliency import CoalitionMasks
from monai_saliency.masks.coalition import draw_pairs, inclusion, meetings, players_that_meet
from monai_saliency.utils.patch_grid import PatchGrid

LABELS = torch.tensor([[[0, 5, 5], [2, 2, 9]]])


def bind(labels: torch.Tensor, channels: int = 1, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return CoalitionMasks(**settings).bind(torch.zeros(channels, *labels.shape[1:], dtype=dtype), labels)


def in_a_row(players: int) -> torch.Tensor:
    return torch.arange(1, players + 1)[None, None]


# All of them. ---------------------------------------------------------------------------------------------------------


def test_the_bits_of_a_mask_are_its_players() -> None:
    bound = bind(LABELS)
    assert bound.players == bound.regions.values == [0, 2, 5, 9]
    assert len(bound) == 15
    for index, mask in enumerate(bound.render(range(15))):
        hidden = {label for bit, label in enumerate([0, 2, 5, 9]) if index >> bit & 1 or not index}
        assert mask[0].tolist() == [[float(label not in hidden) for label in row] for row in LABELS[0].tolist()]


def test_a_background_that_is_not_a_player_is_kept() -> None:
    bound = bind(LABELS, background=False)
    assert bound.players == [2, 5, 9]
    assert len(bound) == 7
    assert bound.render([0])[0, 0].tolist() == [[1, 0, 0], [0, 0, 0]]
    without = bind(LABELS + 1)
    assert without.players == [1, 3, 6, 10], "where no voxel is 0, there is no background"


@pytest.mark.parametrize("shape", [(7, 6), (5, 6, 4)])
def test_channels_as_players(shape: tuple[int, ...]) -> None:
    labels = blocks(shape, 3, 2, seed=3)
    assert labels.unique().tolist() == [0, 1, 2]
    bound = bind(labels, 2, per_channel=True)
    assert bound.channels == 2
    assert bound.players == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for index in (0, 1, 6, 40, 62):
        expected = torch.ones(2, *shape)
        for bit, (label, channel) in enumerate(bound.players):
            if index >> bit & 1 or not index:
                expected[channel][labels[0] == label] = 0
        assert torch.equal(bound.render([index])[0], expected)


# Random ones. ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("players", [4, 7, 12, 70])
def test_pairs_of_complements_behind_nobody(players: int) -> None:
    most = 2**players - 2 if players < 12 else 10 * players
    bound = bind(in_a_row(players), num_coalitions=most)
    kept = bound.codes(range(len(bound)))["coalition"]
    assert len(kept) == 1 + (most - 1) // 2 * 2
    assert not kept[0].any()
    assert (kept[1::2] ^ kept[2::2]).all()
    assert len({row.tobytes() for row in kept}) == len(kept)
    assert kept[1:].any(axis=1).all()


def test_more_begin_with_the_same() -> None:
    few, more, other = (
        bind(in_a_row(9), num_coalitions=count, seed=seed) for count, seed in ((31, 4), (200, 4), (31, 5))
    )
    assert np.array_equal(few.coalitions, more.coalitions[:31])
    assert not np.array_equal(few.coalitions, other.coalitions)
    assert few.key != other.key
    assert few.key == bind(in_a_row(9), num_coalitions=32, seed=4).key, "an even number is rounded down"


@pytest.mark.parametrize("players", [4, 5, 8, 20])
def test_as_many_pairs_as_players_tell_them_apart(players: int) -> None:
    for seed in range(40):
        pairs = draw_pairs(seed, players, players - 1)
        assert np.linalg.matrix_rank(np.concatenate([np.ones((1, players)), pairs])) == players


@pytest.mark.parametrize(("players", "count"), [(6, 12), (7, 20), (9, 100)])
def test_how_likely_a_pair_is_drawn(players: int, count: int) -> None:
    """As often as over many seeds, by the size of a coalition."""
    seeds = 300
    counts = np.zeros(players + 1)
    for seed in range(seeds):
        sizes = draw_pairs(seed, players, count).sum(axis=1)
        counts += np.bincount(sizes, minlength=players + 1) + np.bincount(players - sizes, minlength=players + 1)
    chance, weight = inclusion(players, count)
    number = np.array([math.comb(players, size) for size in range(players + 1)])
    found = counts / seeds / number
    # Few pairs are not quite Poisson's, and have a spread over seeds.
    np.testing.assert_allclose(found[1:-1], chance[1:-1], rtol=0.05, atol=0.01)
    assert (number * chance).sum() / 2 == pytest.approx(count)
    wanted = 1 / (number[1:-1] * np.arange(1, players) * np.arange(players - 1, 0, -1)) / chance[1:-1]
    np.testing.assert_allclose(weight[1:-1] / weight[1], wanted / wanted[0], rtol=1e-9)


# Parts of an image. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "roi", "overlap"), [((13, 11), (6, 5), 0.5), ((9, 8, 7), (4, 4, 4), 0.25), ((4, 5), (8, 8), 0.5)]
)
def test_players_that_meet(shape: tuple[int, ...], roi: tuple[int, ...], overlap: float) -> None:
    """Voxel by voxel: the players of all patches that cover it."""
    labels = blocks(shape, 3, 9, seed=4)[0].numpy()
    players = sorted(set(labels.ravel().tolist()))
    boxes = PatchGrid(SlidingWindowInferer(roi, overlap=overlap), shape).boxes
    present = np.array([[label in labels[box] for label in players] for box in boxes])
    found = {frozenset(cell) for cell in players_that_meet(present, boxes)}
    everywhere = set()
    for voxel in itertools.product(*map(range, shape)):
        covering = [
            set(labels[box].ravel().tolist())
            for box in boxes
            if all(side.start <= at < side.stop for side, at in zip(box, voxel, strict=True))
        ]
        everywhere.add(frozenset(players.index(label) for label in set().union(*covering)))
    assert found == {cell for cell in everywhere if not any(cell < other for other in everywhere)}
    found = {frozenset(cell) for cell in players_that_meet(present, boxes, linear=True)}
    alone = {frozenset(np.flatnonzero(row).tolist()) for row in present}
    assert found == {cell for cell in alone if not any(cell < other for other in alone)}


def test_sets_that_meet_by_hand() -> None:
    coalitions, found = meetings([[0, 1], [1, 2]], 3, 100) or ((), ())
    hidden = [set((~row).nonzero()[0].tolist()) for row in coalitions]
    assert hidden == [{0, 1, 2}, {0}, {1}, {0, 1}, {2}, {1, 2}]
    assert [list(each.players) for each in found] == [[0, 1], [1, 2]]
    assert [each.rows.tolist() for each in found] == [[-1, 1, 2, 3], [-1, 2, 4, 5]]
    assert [each.new.tolist() for each in found] == [[False, True, True, True], [False, False, True, True]]


def test_players_beyond_enumeration() -> None:
    """Ten random coalitions for each player, in pairs of complements behind the coalition of nobody."""
    inferer = SlidingWindowInferer((1, 20), overlap=0.5)
    bound = bind(in_a_row(22), inferer=inferer)
    assert len(bound) == 221
    assert "the values of 22 players were estimated from 220" in bound.stopped((), torch.zeros(0), torch.zeros(0))
    again, other = (bind(in_a_row(22), inferer=inferer, seed=seed) for seed in (0, 1))
    assert bound.key == again.key != other.key


# Errors. --------------------------------------------------------------------------------------------------------------


def test_wrong_cases() -> None:
    with pytest.raises(ValueError, match=r"at most 14 players, and there are 15: give `num_coalitions` .*such as 151"):
        bind(in_a_row(15))
    assert len(bind(in_a_row(14))) == 2**14 - 1
    with pytest.raises(ValueError, match=r"`num_coalitions` must be at least 46 for 15 players.*got 45"):
        bind(in_a_row(15), num_coalitions=45)
    with pytest.raises(ValueError, match=r"`num_coalitions` must be at least 46 for 15 players.*got 45"):
        bind(in_a_row(15), num_coalitions=45, inferer=SlidingWindowInferer((1, 12)))
    assert meetings([range(20)], 20, 2**16) is None
    assert meetings([[0, 1], [1, 2]], 3, 5) is None
