"""The p1 at which half of the effect is left: answers worked out by hand for an OR, an AND, a sum and a majority."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from monai_saliency.masks.half_effect import half_effect

# (cells, score of which cells are kept, the best p1 by hand)
Game = tuple[int, Callable[[np.ndarray], np.ndarray], float]
GAMES: dict[str, Game] = {
    "or of 1": (1, lambda cells: cells.any(-1), 0.5),
    "or of 2": (2, lambda cells: cells.any(-1), 0.2929),  # 1 - 2^(-1/2)
    "or of 4": (4, lambda cells: cells.any(-1), 0.1591),
    "or of 8": (8, lambda cells: cells.any(-1), 0.0830),
    "and of 1": (1, lambda cells: cells.all(-1), 0.5),
    "and of 2": (2, lambda cells: cells.all(-1), 0.7071),  # 2^(-1/2)
    "and of 4": (4, lambda cells: cells.all(-1), 0.8409),
    "and of 8": (8, lambda cells: cells.all(-1), 0.9170),
    "sum of 8": (8, lambda cells: cells.mean(-1), 0.5),
    "majority of 5": (5, lambda cells: cells.mean(-1) > 0.5, 0.5),
}


def left(game: Game, kept: float) -> float:
    """The mean score of all sets of cells, each kept with a probability."""
    count, score, _ = game
    cells = np.array(list(product([0, 1], repeat=count)))
    chance = (kept**cells * (1 - kept) ** (1 - cells)).prod(axis=1)
    return float((chance * score(cells)).sum())


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("kept", [0.3, 0.5, 0.7])
def test_many_masks_of_any_p1_give_it(name: str, kept: float) -> None:
    share = left(GAMES[name], kept)
    off = abs(half_effect([kept] * 10_000, [share] * 10_000) - GAMES[name][2])
    # A sum and a majority are not of the family: exact at 1/2, and near it elsewhere.
    is_family = name.startswith(("or", "and")) or kept == 0.5
    assert off <= (0.011 if is_family else 0.2)


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("seed", range(20))
def test_eight_rounds_of_twenty_masks_come_within_a_tenth_of_it(name: str, seed: int) -> None:
    count, score, best = GAMES[name]
    random, kept, shares = np.random.default_rng(seed), [], []
    for _ in range(8):
        p1 = half_effect(kept, shares)
        kept += [p1] * 20
        shares += score(random.random((20, count)) < p1).astype(float).tolist()
    assert half_effect(kept, shares) == pytest.approx(best, abs=0.1)


def test_of_nothing_it_is_a_half() -> None:
    assert half_effect([], []) == 0.5


def test_where_masks_add_to_the_score_hardly_anything_is_hidden() -> None:
    assert half_effect([0.5] * 8, [1.2] * 8) == 0.95


def test_it_stays_within_bounds() -> None:
    assert half_effect([0.5] * 1000, [1.0] * 1000) == pytest.approx(0.05, abs=0.04)
    assert half_effect([0.5] * 1000, [0.0] * 1000) == pytest.approx(0.95, abs=0.04)
