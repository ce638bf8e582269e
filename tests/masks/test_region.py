import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masks import bind, everything
from helpers.searches import driven
from helpers.tolerances import MASKS, assert_close
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks import CoalitionMasks, RegionMasks, SlidingWindowMasks
from monai_saliency.masks.coalition import draw_pairs, inclusion, meetings
from monai_saliency.masks.order import OrderMasks


class TestRegionMasks:
    LABELS = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
    IMAGE = torch.zeros(3, 2, 3)

    def test_each_region_hidden_in_turn(self) -> None:
        bound = RegionMasks().bind(self.IMAGE, labels=self.LABELS)
        assert bound.values == [2, 5, 9]
        expected = [[[1, 1, 1], [0, 0, 1]], [[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 1, 0]]]
        assert bound.render(range(3))[:, 0].tolist() == expected

    def test_random_coalitions_by_a_slow_loop(self) -> None:
        bound = RegionMasks(num_masks=50, p1=0.3, seed=4).bind(self.IMAGE, labels=self.LABELS.float())
        draws = np.random.default_rng(4).random((50, 3)) < 0.3
        for i, kept in enumerate(draws):
            expected = [[1.0 if v == 0 else float(kept[[2, 5, 9].index(v)]) for v in row] for row in self.LABELS[0]]
            assert bound.render([i])[0, 0].tolist() == expected
        assert np.array_equal(bound.codes([7, 3, 49])["coalition"], draws[[7, 3, 49]])

    def test_made_of_the_image(self) -> None:
        image = torch.tensor([[[0.0, 3.0, 0.0, 3.0]]])
        bound = RegionMasks(regions=lambda image, spacing: (image > 1).long()).bind(image)
        assert bound.render([0]).tolist() == [[[[1.0, 0.0, 1.0, 0.0]]]]

    @pytest.mark.parametrize(
        ("labels", "match"),
        [
            (None, "need the case's label map"),
            (torch.zeros(1, 2, 3), "has only label 0"),
            (torch.full((1, 2, 3), 0.5), "values that are not whole numbers"),
            (torch.full((1, 2, 3), float("nan")), "values that are not whole numbers"),
            (torch.tensor([[[0.0, 1, 2], [3, 4, float("inf")]]]), "not whole numbers, NaN or infinity"),
            (torch.tensor([[[0.0, 1, 2], [3, 4, 1e20]]]), "float32 tells whole numbers apart up to"),
            (torch.tensor([[[0, 1, 2], [3, 4, 614454277.0]]]), "float32 .* 16777216"),
            (torch.tensor([[[0, 1, 2], [3, 4, 4096.0]]]).half(), "float16 tells whole numbers apart up to 2048"),
            (torch.ones(1, 3, 2), r"shape \(1, 3, 2\), the image needs one of \(1, 2, 3\)"),
        ],
    )
    def test_errors(self, labels: torch.Tensor | None, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            RegionMasks().bind(self.IMAGE, labels=labels)


# Smooth edges: by hand, against a slow average, and on remembered patches.
WIDTHS = [2, 3, 4.5, (1, 5)]


def slow_average(hidden: np.ndarray, widths: tuple[float, ...]) -> np.ndarray:
    """A voxel's box of ``widths`` is filled with 180 points an axis, of which each lies in one voxel."""
    found = np.zeros(hidden.shape)
    for voxel in itertools.product(*map(range, hidden.shape)):
        axes = []
        for at, width, size in zip(voxel, widths, hidden.shape, strict=True):
            points = at + 0.5 + (np.arange(180) + 0.5) / 180 * width - width / 2
            axes.append(np.clip(np.floor(points).astype(int), 0, size - 1))
        found[voxel] = hidden[np.ix_(*axes)].mean()
    return found


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (0, [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
        (1, [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]),
        (2, [1, 1, 1, 3 / 4, 1 / 4, 0, 0, 1 / 4, 3 / 4, 1]),
        (3, [1, 1, 1, 2 / 3, 1 / 3, 0, 0, 1 / 3, 2 / 3, 1]),
        (4, [1, 1, 7 / 8, 5 / 8, 3 / 8, 1 / 8, 1 / 8, 3 / 8, 5 / 8, 7 / 8]),
    ],
)
def test_a_window_by_hand(width: float, expected: list[float]) -> None:
    windows = bind(SlidingWindowMasks((1, 4), (1, 4), smooth=(0, width)), 1, 10, dtype=torch.float64)
    (index,) = [i for i, first in enumerate(windows.codes(range(3))["first"][:, 1]) if first == 3]
    # Windows begin at -1, 3 and 7: the one at 3 is moved by a voxel to where it is written above.
    rolled = windows.render([index])[0, 0, 0].roll(1)
    assert_close(rolled[1:], expected[1:])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_slow_average(width: Any) -> None:
    crisp = everything(bind(SlidingWindowMasks((4, 3), 3), 9, 8))
    smooth = everything(bind(SlidingWindowMasks((4, 3), 3, smooth=width), 9, 8))
    widths = tuple(np.broadcast_to(width, 2).tolist())
    for hard, soft in zip(crisp, smooth, strict=True):
        expected = 1 - slow_average(1 - hard, widths)
        assert_close(soft, expected, within=MASKS)  # shares are multiples of 2^-24


def test_windows_side_by_side_hide_everything_once() -> None:
    """Where crisp windows tile the image, so do smooth ones: what one keeps at its edge its neighbours hide."""
    bound = bind(SlidingWindowMasks((4, 3), (4, 3), smooth=2.5), 12, 9, dtype=torch.float64)
    total = (1 - bound.render(range(len(bound)))).sum(dim=0)
    assert_close(total, torch.ones_like(total))


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


# Coalitions: by hand, and what every order of the work must give alike.
LABELS = torch.tensor([[[0, 5, 5], [2, 2, 9]]])


def bind_players(labels: torch.Tensor, **settings: Any) -> Any:
    return CoalitionMasks(**settings).bind(torch.zeros(labels.shape), labels)


def in_a_row(players: int) -> torch.Tensor:
    return torch.arange(1, players + 1)[None, None]


def test_a_background_that_is_not_a_player_is_kept() -> None:
    bound = bind_players(LABELS, background=False)
    assert bound.players == [2, 5, 9]
    assert len(bound) == 7
    assert bound.render([0])[0, 0].tolist() == [[1, 0, 0], [0, 0, 0]]
    without = bind_players(LABELS + 1)
    assert without.players == [1, 3, 6, 10], "where no voxel is 0, there is no background"


@pytest.mark.parametrize("players", [4, 7, 12, 70])
def test_pairs_of_complements_behind_nobody(players: int) -> None:
    most = 2**players - 2 if players < 12 else 10 * players
    bound = bind_players(in_a_row(players), num_coalitions=most)
    kept = bound.codes(range(len(bound)))["coalition"]
    assert len(kept) == 1 + (most - 1) // 2 * 2
    assert not kept[0].any()
    assert (kept[1::2] ^ kept[2::2]).all()
    assert len({row.tobytes() for row in kept}) == len(kept)
    assert kept[1:].any(axis=1).all()


def test_more_begin_with_the_same() -> None:
    few, more, other = (
        bind_players(in_a_row(9), num_coalitions=count, seed=seed) for count, seed in ((31, 4), (200, 4), (31, 5))
    )
    assert np.array_equal(few.coalitions, more.coalitions[:31])
    assert not np.array_equal(few.coalitions, other.coalitions)
    assert few.key != other.key
    assert few.key == bind_players(in_a_row(9), num_coalitions=32, seed=4).key, "an even number is rounded down"


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
    assert_close((number * chance).sum() / 2, count)
    wanted = 1 / (number[1:-1] * np.arange(1, players) * np.arange(players - 1, 0, -1)) / chance[1:-1]
    assert_close(weight[1:-1] / weight[1], wanted / wanted[0])


# Parts of an image.
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
    bound = bind_players(in_a_row(22), inferer=inferer)
    assert len(bound) == 221
    assert (
        "the values of 22 players were estimated from 220"
        in driven(bound, torch.zeros(1), lambda ids: torch.zeros(len(ids), 1)).words
    )
    again, other = (bind_players(in_a_row(22), inferer=inferer, seed=seed) for seed in (0, 1))
    assert bound.key == again.key != other.key


def test_wrong_cases() -> None:
    with pytest.raises(ValueError, match=r"at most 14 players, and there are 15: give `num_coalitions` .*such as 151"):
        bind_players(in_a_row(15))
    assert len(bind_players(in_a_row(14))) == 2**14 - 1
    with pytest.raises(ValueError, match=r"`num_coalitions` must be at least 46 for 15 players.*got 45"):
        bind_players(in_a_row(15), num_coalitions=45)
    with pytest.raises(ValueError, match=r"`num_coalitions` must be at least 46 for 15 players.*got 45"):
        bind_players(in_a_row(15), num_coalitions=45, inferer=SlidingWindowInferer((1, 12)))
    assert meetings([range(20)], 20, 2**16) is None
    assert meetings([[0, 1], [1, 2]], 3, 5) is None
