"""Masks that keep coalitions of players, for Shapley values: all, those that decide a score, or random ones."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from monai.inferers import SlidingWindowInferer
from torch import Tensor

from monai_saliency.cases import Number
from monai_saliency.masks.base import Ids, MakesRegions, Masks, Regions, Spacing, random_rows
from monai_saliency.masks.region import BoundRegionMasks, check_regions, find_regions
from monai_saliency.utils.arguments import flag, whole_number
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import Box

#: coalitions of players of whole images that are scored: all of 14 players
_MOST_COALITIONS = 2**14 - 1
#: coalitions that are scored under a sliding-window inferer, where most touch few patches
_MOST_ON_PATCHES = 2**16
# Draws made at a time, for speed.
_CHUNK = 1024


class CoalitionMasks(Masks):
    """Masks that keep a coalition of players and hide the others, for ``ShapleyScoring``.

    A player is a region: all voxels of one label of the case's label map, or a supervoxel. The voxels of no region,
    label 0, are a player too, so that the players' values sum to what the whole image adds to the score. The numbers in
    the inferer's ``inputs`` (:class:`~monai_saliency.DictInput`) are players too, after the regions. Mask 0 keeps
    nobody. The coalition of all players is the unperturbed image, which needs no mask.

    By default every coalition is scored: mask i > 0 hides the players of the set bits of i, the first player (the
    lowest label) by the lowest bit. With an ``inferer``, and a score that is a sum over voxels of a sliding-window
    model's output, only the coalitions that decide it are scored: those without some of the players that meet in the
    patches over one voxel. So there may be far more players.

    With ``num_coalitions`` random coalitions are scored, in pairs of complements behind mask 0. They are drawn without
    replacement by their leverage ``1 / C(n, s)`` in KernelSHAP's regression, so that each size s matters alike
    (Leverage SHAP: Musco and Witter, arXiv 2410.01917, section 3). With an ``inferer``, they are drawn only if there
    are more coalitions that decide the score; without ``num_coalitions`` beyond 2^16, and then ten for each player.

    Args:
        num_coalitions: how many masks; an even number is rounded down. None, or as many as there are, for all.
        seed: seed of random coalitions. With the same seed, more coalitions begin with the same ones as fewer.
        regions: makes the regions, as for :class:`~monai_saliency.masks.RegionMasks`; by default the case's label map.
        background: whether the voxels of label 0 are a player; otherwise they are always kept.
        per_channel: whether each channel of each region is a player, and each channel has its own map.
        inferer: the sliding-window inferer that runs the network, if the score is a sum over voxels of the output.
        linear: whether that score is linear in the output: then only players inside one patch meet.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) for more than 14 players with neither
            ``num_coalitions`` nor an ``inferer``, for less than three ``num_coalitions`` a player, for a number that
            is not finite, and as for :class:`~monai_saliency.masks.RegionMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import CoalitionMasks
        >>> labels = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
        >>> bound = CoalitionMasks().bind(torch.zeros(1, 2, 3), labels)
        >>> bound.players, len(bound)
        ([0, 2, 5, 9], 15)
        >>> bound.render([6])[0, 0].tolist()  # hides labels 2 and 5
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """

    by_region = True
    num_masks, p1 = None, 0.5

    def __init__(
        self,
        num_coalitions: int | None = None,
        seed: int = 0,
        regions: MakesRegions | None = None,
        background: bool = True,
        per_channel: bool = False,
        inferer: SlidingWindowInferer | None = None,
        linear: bool = False,
    ) -> None:
        if num_coalitions is not None:
            num_coalitions = whole_number("num_coalitions", num_coalitions, 1)
        self.num_coalitions = num_coalitions
        self.seed = whole_number("seed", seed, 0)
        self.regions, self.needs_labels = check_regions(regions)
        self.background = flag("background", background)
        self.per_channel = flag("per_channel", per_channel)
        self.inferer, self.linear = inferer, linear
        self.follows_target = inferer is not None

    def for_scores(self, additive: bool, linear: bool) -> CoalitionMasks:
        masks = copy.copy(self)
        masks.inferer, masks.linear = self.inferer if additive else None, linear
        return masks

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundCoalitionMasks:
        return self.bind_with_numbers({}, image, labels, spacing)

    def bind_with_numbers(
        self, numbers: Mapping[str, Number], image: Tensor, labels: Tensor | None = None, spacing: Spacing = None
    ) -> BoundCoalitionMasks:
        if wrong := [f"{name!r} is {each.value}" for name, each in numbers.items() if not math.isfinite(each.value)]:
            raise ValueError(f"the number {wrong[0]}: impute it as for the network's training, or leave the case out")
        regions = find_regions(self.regions, image, labels, spacing)
        if self.background and bool((regions.index == 0).any()):
            regions = Regions([0, *regions.values], regions.index + 1)
        return BoundCoalitionMasks(self, image, regions, numbers)


class BoundCoalitionMasks(BoundRegionMasks):
    """The coalitions of one image's players: regions, with the background of label 0 among them, or their channels; and
    the names of the case's numbers.
    """

    players: list[Any]
    meetings: list[Meeting] | None = None
    pairs: np.ndarray | None = None

    def __init__(self, masks: CoalitionMasks, image: Tensor, regions: Regions, numbers: Mapping[str, Number]) -> None:
        super().__init__(masks, image, regions)
        self.numbers = dict(numbers)
        self.players = list(regions.values)
        if masks.per_channel:
            self.channels = len(image)
            self.players = [(label, channel) for label in regions.values for channel in range(self.channels)]
        self.players += self.numbers
        count, players = masks.num_coalitions, len(self.players)
        cells, most = [list(range(players))], _MOST_COALITIONS
        if masks.inferer is not None:
            boxes, most = PatchGrid(masks.inferer, self.spatial_shape).boxes, _MOST_ON_PATCHES
            present = np.zeros((len(boxes), players), dtype=bool)
            for row, box in zip(present, boxes, strict=True):
                row[self._inside(box)] = True
            cells = players_that_meet(present, boxes, masks.linear)
        if found := meetings(cells, players, count or most):
            self.coalitions, self.meetings = found
        elif count is None and masks.inferer is None:
            raise ValueError(
                f"all coalitions are scored of at most 14 players, and there are {players}: give `num_coalitions` for "
                f"an estimate, such as {10 * players + 1}, or have fewer players (a smaller `num_supervoxels`, labels "
                "that are merged). Under a SlidingWindowInferer and a target that is a mean over voxels, such as "
                "RegionScore, more players are exact"
            )
        else:
            self._draw(masks.seed, players, count or 10 * players + 1)
            if count is None:
                self.words = (
                    f"the values of {players} players were estimated from {len(self.coalitions) - 1} random "
                    "coalitions: too many players meet in one place to score all"
                )
        digest = hashlib.sha256(np.packbits(self.coalitions).tobytes()).hexdigest()
        self.key = (*self.numbers.items(), *self.key)
        self.key = ("CoalitionMasks", tuple(self.players), digest, self.meetings is not None, *self.key)

    def _draw(self, seed: int, players: int, count: int) -> None:
        if count < 3 * players + 1:
            raise ValueError(
                f"`num_coalitions` must be at least {3 * players + 1} for {players} players, three times as many and "
                f"one, got {count}: fewer hardly tell the players apart; {10 * players + 1} are a good start"
            )
        first = draw_pairs(seed, players, (count - 1) // 2)
        both = np.stack([first, ~first], axis=1).reshape(-1, players)
        self.coalitions = np.concatenate([np.zeros((1, players), dtype=bool), both])
        self.pairs = np.arange(1, len(both) + 1).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.coalitions)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``coalition`` bool ``(n, players)``, True where a player is kept."""
        return {"coalition": self.coalitions[np.asarray(ids, dtype=int)]}

    def hidden_numbers(self, ids: Ids) -> np.ndarray:
        return ~self.codes(ids)["coalition"][:, len(self.players) - len(self.numbers) :]


@dataclass(frozen=True)
class Meeting:
    """Players that meet, and the masks that hide each set of them."""

    players: Sequence[int]
    rows: np.ndarray
    new: np.ndarray


def players_that_meet(present: np.ndarray, boxes: Sequence[Box], linear: bool = False) -> list[list[int]]:
    """The players of each cell of a sliding-window model, without cells whose players all are in another one.

    Voxels that the same patches cover form a cell: their output depends on the players in these patches. A score that
    is a sum over voxels is therefore a sum of games, one a cell; and of games of single patches where it is linear in
    the output, since patches are blended by fixed weights.
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


def meetings(cells: Sequence[Sequence[int]], players: int, most: int) -> tuple[np.ndarray, list[Meeting]] | None:
    """The coalitions whose scores decide a game that is a sum of small ones: of the players of each cell."""
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


def draw_pairs(seed: int, players: int, count: int) -> np.ndarray:
    """Draw different pairs of coalitions."""
    found: list[np.ndarray] = []
    later: list[np.ndarray] = []
    seen: set[bytes] = set()
    # Orthogonal directions that the pairs found so far span. All players together are known beforehand.
    span = np.full((1, players), players**-0.5)
    start = 0
    while len(found) < count:
        for pair in _drawn(seed, range(start, start + _CHUNK), players):
            key = (pair ^ pair[0]).tobytes()  # the same for both coalitions of a pair
            if key in seen:
                continue
            seen.add(key)
            if len(span) == players:
                found.append(pair)
                continue
            rest = pair - (span @ pair) @ span
            rest -= (span @ rest) @ span
            if np.linalg.norm(rest) < 1e-6:
                later.append(pair)
                continue
            span = np.concatenate([span, rest[None] / np.linalg.norm(rest)])
            found.append(pair)
            if len(span) == players:
                found += later
        start += _CHUNK
    return np.stack(found[:count])


def _drawn(seed: int, rows: range, players: int) -> np.ndarray:
    """Draws with replacement, bool ``(len(rows), players)``: a size in [1, players), then a set of this size."""
    numbers = random_rows(seed, rows, players + 1)
    sizes = 1 + np.minimum((numbers[:, 0] * (players - 1)).astype(int), players - 2)
    ranks = numbers[:, 1:].argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray(ranks < sizes[:, None])


@cache
def inclusion(players: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """How likely a pair of coalitions is among those drawn, and what it weighs in the regression."""
    sizes = np.arange(1, players)
    logs = np.array([math.lgamma(players + 1) - math.lgamma(s + 1) - math.lgamma(players - s + 1) for s in sizes])

    def drawn(time: float) -> tuple[np.ndarray, np.ndarray]:
        """By the size of a coalition: how likely it is drawn, and that per mean number of draws."""
        mean = np.maximum(np.exp(math.log(2 * time / (players - 1)) - logs), 1e-300)
        return -np.expm1(-mean), -np.expm1(-mean) / mean

    def expected(time: float) -> float:
        return float(time / (players - 1) * drawn(time)[1].sum())

    low, high = 1e-9, 1.0
    while expected(high) < count and high < 1e300:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < count else (low, middle)
    likely, ratio = drawn(high)
    chance, weight = np.zeros(players + 1), np.zeros(players + 1)
    chance[1:-1] = likely
    weight[1:-1] = 1 / (sizes * (players - sizes) * ratio)
    return chance, weight
