"""Which players meet in a sliding-window model: the small games that its game is a sum of.

A voxel's output depends on the patches that cover it, and a patch's output on the players inside it. Voxels that the
same patches cover form a *cell*. A score that is a sum over voxels is therefore a sum of games, one for each cell, of
the players in its patches: the scores of the sets of players that meet in a cell, hidden alone, decide the whole game.
A score that is linear in the output is even a sum of games of single patches, since patches are blended by fixed
weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monai_saliency.utils.boxes import Box

__all__ = ["Meeting", "meetings", "players_that_meet"]


@dataclass(frozen=True)
class Meeting:
    """Players that meet, and the masks that hide each set of them."""

    players: Sequence[int]
    rows: np.ndarray
    new: np.ndarray


def players_that_meet(present: np.ndarray, boxes: Sequence[Box], linear: bool = False) -> list[list[int]]:
    """The players of each cell, without cells whose players all are in another one."""
    if linear:
        return _largest(present)
    starts = np.array([[side.start for side in box] for box in boxes])
    stops = np.array([[side.stop for side in box] for box in boxes])
    # The same patches cover all voxels from one patch's border to the next.
    axes = [np.union1d(start, stop)[:-1] for start, stop in zip(starts.T, stops.T, strict=True)]
    covered = [((starts <= first) & (stops > first)).all(axis=1) for first in itertools.product(*axes)]
    return _largest(np.stack([present[patches].any(axis=0) for patches in covered if patches.any()]))


def _largest(cells: np.ndarray) -> list[list[int]]:
    """The players of each row, bool ``(cells, players)``, without rows whose players all are in another one."""
    _, places = np.unique(cells, axis=0, return_index=True)
    cells = cells[np.sort(places)]
    counts = cells.sum(axis=1)
    is_part = [bool(((cells >= cell).all(axis=1) & (counts > cell.sum())).any()) for cell in cells]
    return [cell.nonzero()[0].tolist() for cell, part in zip(cells, is_part, strict=True) if not part]


def meetings(cells: Sequence[Sequence[int]], players: int, most: int) -> tuple[np.ndarray, list[Meeting]] | None:
    """The coalitions whose scores decide a game that is a sum of small ones."""
    everybody = np.ones(players, dtype=bool)
    sets, numbers = [everybody], {everybody.tobytes(): 0, (~everybody).tobytes(): -1}
    met, found = {-1}, []
    for cell in cells:
        if 2 ** len(cell) - 1 > most:
            return None
        hidden = np.zeros((2 ** len(cell), players), dtype=bool)
        hidden[:, cell] = (np.arange(len(hidden))[:, None] >> np.arange(len(cell))) & 1
        rows = np.empty(len(hidden), dtype=int)
        for place, each in enumerate(hidden):
            rows[place] = numbers.setdefault(each.tobytes(), len(sets))
            if rows[place] == len(sets):
                sets.append(each)
        if len(sets) > most:
            return None
        new = np.array([row not in met for row in rows.tolist()])
        met.update(rows.tolist())
        found.append(Meeting(list(cell), rows, new))
    return ~np.stack(sets), found
