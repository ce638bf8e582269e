"""Blocks of windows, which find a place in fewer masks than windows do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import Id
from monai_saliency.masks.box import BoundBoxMasks
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks

__all__ = ["BoundBlockMasks"]

# Those are refined that together hold this share of what all of their level took.
_HELD = 0.8


class BoundBlockMasks(BoundBoxMasks):
    """Each mask hides a block of two windows of the first level along each axis, fewer at the end of an axis.

    Args:
        windows: the windows.
        image: ``(C, *spatial)``.

    Example::

        >>> import torch
        >>> from monai_saliency import HierarchicalMasks
        >>> windows = HierarchicalMasks(4, 2).bind(torch.zeros(1, 12, 16))
        >>> blocks = BoundBlockMasks(windows, torch.zeros(1, 12, 16))
        >>> len(blocks), blocks.hidden_boxes([2])
        (4, [(slice(8, 12, None), slice(0, 8, None))])
        >>> blocks.inside(2)  # windows that it holds
        [8, 9]
    """

    def __init__(self, windows: BoundHierarchicalMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        self.windows = windows
        self._ends = [np.append(axis[:-1:2], axis[-1]) for axis in windows.bounds[0]]
        self._grid = [len(axis) - 1 for axis in self._ends]
        self._meeting = int(np.prod([min(2, count) for count in self._grid]))  # blocks that meet at a corner
        self.key = ("BlockMasks", windows.key)

    def __len__(self) -> int:
        return int(np.prod(self._grid))

    @property
    def at_most(self) -> int:
        """How many masks find a place at the most: blocks, the windows inside those that meet, and their parts."""
        held = sorted((len(self.inside(block)) for block in range(len(self))), reverse=True)
        return len(self) + sum(held[: self._meeting]) + self.windows.at_most - len(self.windows.levels[0])

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        places = np.unravel_index(np.asarray(ids, dtype=int), self._grid)
        ends = [(axis[at], axis[at + 1]) for axis, at in zip(self._ends, places, strict=True)]
        first, stop = (np.stack(each, axis=1) for each in zip(*ends, strict=True))
        return {"first": first, "stop": stop}

    def inside(self, block: int) -> list[int]:
        """The windows of the first level that a block holds."""
        place = np.unravel_index(block, self._grid)
        counts = [len(axis) - 1 for axis in self.windows.bounds[0]]
        sides = [range(2 * int(at), min(2 * int(at) + 2, n)) for at, n in zip(place, counts, strict=True)]
        return np.ravel_multi_index(np.array(list(itertools.product(*sides))).T, counts).tolist()

    def finer(self, drops: torch.Tensor, ids: Sequence[Id], taken: torch.Tensor) -> list[int]:
        """The windows that come next: inside the blocks that took most, then parts of the windows that did.

        Those are refined that together hold 80 % of what all of their level took: one, where a place lies inside it,
        and several, where it lies across their borders, but at most as many blocks as meet at a corner, and as many
        windows as without blocks.

        Args:
            drops: ``(blocks,)``, what each block took from the score.
            ids: n windows that were scored, those of a level behind those of the level before.
            taken: ``(n,)``, what each window took.

        Returns:
            none where the last level was scored, or nothing of the level took anything.
        """
        if not ids:
            chosen = _holding(range(len(self)), drops, self._meeting)
            return sorted(window for block in chosen for window in self.inside(block))
        number, level = next(each for each in enumerate(self.windows.levels) if ids[-1] in each[1])
        if number + 1 == self.windows.num_levels:
            return []
        rows = [row for row, index in enumerate(ids) if index in level]
        most = self.windows.refined_at_most[number]
        return self.windows.parts_of(_holding([ids[row] for row in rows], taken[rows], most))

    def spread(self, drops: torch.Tensor, ids: Sequence[Id], taken: torch.Tensor) -> np.ndarray:
        """Spread what each block took over the windows of the last level inside it, as
        :meth:`BoundHierarchicalMasks.spread` does with windows of the first level.

        Args:
            drops: ``(blocks,)``, what each block took from the score.
            ids: n windows, those of a level behind those of the level before.
            taken: ``(n,)``, what each window took.

        Returns:
            a value for each window of the last level.
        """
        rows = {int(index): row for row, index in enumerate(ids)}
        shares = taken.clone()
        found = np.zeros([len(axis) - 1 for axis in self.windows.bounds[-1]])
        codes = self.codes(range(len(self)))
        for block, (first, stop) in enumerate(zip(codes["first"], codes["stop"], strict=True)):
            held = [rows[window] for window in self.inside(block) if window in rows]
            parts = taken[held].clamp(min=0)
            if float(parts.sum()) > 0:
                shares[held] = parts / parts.sum() * drops[block].to(parts)
                continue
            shares[held] = 0
            ends = zip(self.windows.bounds[-1], first, stop, strict=True)
            cells = tuple(slice(*np.searchsorted(axis, side).tolist()) for axis, *side in ends)
            found[cells] = float(drops[block]) / found[cells].size
        return found + self.windows.spread(ids, shares)


def _holding(ids: Sequence[Id], drops: torch.Tensor, most: int) -> list[int]:
    """The masks that took most, the strongest first, until they hold enough of what all took."""
    order = drops.argsort(descending=True, stable=True)
    held = drops[order].clamp(min=0).cumsum(0)
    before = held - drops[order].clamp(min=0)
    return [
        ids[row]
        for row, sum_before in zip(order.tolist(), before.tolist(), strict=True)
        if drops[row] > 0 and sum_before < _HELD * float(held[-1])
    ][:most]
