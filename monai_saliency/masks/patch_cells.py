"""Which players meet in a sliding-window model: the small games that its game is a sum of.

A voxel's output depends on the patches that cover it, and a patch's output on the players inside it. Voxels that the
same patches cover form a *cell*. A score that is a sum over voxels is therefore a sum of games, one for each cell, of
the players in its patches. All that must be known of the whole game are the scores of those sets of players that meet
in a cell, hidden alone. A score that is linear in the output, such as a mean of logits, is even a sum of games of
single patches, since patches are blended by fixed weights.

Where too many players meet in a cell, the sets inside its patches are scored as far as they can be. By then each output
of these patches is known, and sets of more players are drawn at random: no patch is run for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monai_saliency.utils.boxes import Box

__all__ = ["Hidden", "Meeting", "affordable_meetings", "meetings", "players_that_meet"]


@dataclass(frozen=True)
class Meeting:
    """Players that meet, and the masks that hide each set of them.

    Attributes:
        players: k of them, ascending.
        rows: int ``(2^k,)``: entry b is the mask that hides the players of the set bits of b and keeps all others; -1
            for no player, which is the unperturbed image.
        new: bool ``(2^k,)``: whether no earlier meeting has this set.
    """

    players: Sequence[int]
    rows: np.ndarray
    new: np.ndarray


def players_that_meet(present: np.ndarray, boxes: Sequence[Box], linear: bool = False) -> list[list[int]]:
    """The players of each cell, without cells whose players all are in another one.

    Args:
        present: bool ``(patches, players)``, which players are in a patch.
        boxes: the patches.
        linear: whether only players of one patch meet.

    Returns:
        ascending players of each cell (or patch), in the order of cells. No list is part of another.
    """
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


class Hidden:
    """The sets of players that are hidden, each by one mask. Mask 0 hides everybody.

    Args:
        players: how many players there are.
        most: the most masks that :meth:`meet` may come to.
    """

    def __init__(self, players: int, most: int) -> None:
        self.players, self.most = players, most
        everybody = np.ones(players, dtype=bool)
        self._numbers = {np.packbits(everybody).tobytes(): 0, np.packbits(~everybody).tobytes(): -1}
        self._sets = [everybody]
        self._met = {-1}

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def coalitions(self) -> np.ndarray:
        """Bool ``(masks, players)``, True for players that are kept."""
        return ~np.stack(self._sets)

    def rows(self, hidden: np.ndarray) -> np.ndarray:
        """The masks that hide some sets, bool ``(n, players)``: those that there are, or new ones."""
        found = np.empty(len(hidden), dtype=int)
        for place, (each, key) in enumerate(zip(hidden, np.packbits(hidden, axis=1), strict=True)):
            found[place] = self._numbers.setdefault(key.tobytes(), len(self._sets))
            if found[place] == len(self._sets):
                self._sets.append(each)
        return found

    def meet(self, cell: Sequence[int]) -> Meeting | None:
        """Hide every set of the players of a cell; None, and nothing is hidden, where that makes too many masks."""
        if 2 ** len(cell) - 1 > self.most:
            return None
        bits = (np.arange(2 ** len(cell))[:, None] >> np.arange(len(cell))) & 1
        sets = np.zeros((len(bits), self.players), dtype=bool)
        sets[:, cell] = bits
        unknown = sum(key.tobytes() not in self._numbers for key in np.packbits(sets, axis=1))
        if len(self) + unknown > self.most:
            return None
        rows = self.rows(sets)
        new = np.array([row not in self._met for row in rows.tolist()])
        self._met.update(rows.tolist())
        return Meeting(list(cell), rows, new)


def meetings(cells: Sequence[Sequence[int]], players: int, most: int) -> tuple[np.ndarray, list[Meeting]]:
    """The coalitions whose scores decide a game that is a sum of small ones.

    Args:
        cells: the players of each small game.
        players: how many players there are.
        most: the most coalitions allowed.

    Returns:
        the coalitions, bool ``(N, players)``, True for players that are kept, and the meetings. Coalition 0 keeps
        nobody. Each other one hides players of one cell only, and keeps the rest.

    Raises:
        ValueError: when there are more coalitions than ``most``.
    """
    largest = max(map(len, cells))
    if 2**largest - 1 > most:
        raise ValueError(f"{largest} players meet in one place, which makes 2^{largest} coalitions")
    hidden, found = Hidden(players, most), []
    for cell in cells:
        meeting = hidden.meet(cell)
        if meeting is None:
            raise ValueError(f"the players of {len(cells)} places make more than {most} coalitions")
        found.append(meeting)
    return hidden.coalitions, found


def affordable_meetings(
    hidden: Hidden, cells: Sequence[Sequence[int]], patches: Sequence[Sequence[int]]
) -> tuple[list[Meeting], list[int]]:
    """The meetings that do not make too many masks, small ones first.

    Args:
        hidden: gets a mask for each of their sets of players.
        cells: the players of each cell.
        patches: the players of each patch, of whose sets those of a cell consist as far as they can be scored.

    Returns:
        the meetings, and the players of all cells that are not among them, ascending.
    """
    found, left = [], {tuple(cell) for cell in cells}
    for each in sorted({*left, *map(tuple, patches)}, key=lambda players: (len(players), players)):
        meeting = hidden.meet(each)
        if meeting is None:
            break
        found.append(meeting)
        left.discard(each)
    return found, sorted(set().union(*left))
