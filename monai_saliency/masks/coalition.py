"""Masks that keep coalitions of players, for Shapley values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.base import BoundMasks, Id, Masks, Regions
from monai_saliency.masks.coalition_draw import Drawn, draw_pairs
from monai_saliency.masks.patch_cells import Hidden, Meeting, affordable_meetings, meetings, players_that_meet
from monai_saliency.masks.region import find_regions, on_voxels, reads_labels, summed_on_voxels
from monai_saliency.utils.arguments import flag, instance, whole_number
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import to_device

__all__ = ["BoundCoalitionMasks", "CoalitionMasks"]

#: players of whole images of which every coalition is scored: 16383 masks
_MOST_PLAYERS = 14
#: coalitions that are scored under a sliding-window inferer, most of which touch few patches
_MOST_COALITIONS = 2**16


class CoalitionMasks(Masks):
    """Masks that keep a coalition of players and hide the others, in 2D and 3D. With
    :class:`~monai_saliency.ShapleyScoring` they give Shapley values.

    A player is a region: all voxels of one label of the case's label map, or a supervoxel. The voxels of no region,
    label 0, are a player too, so that the players' values sum to what the whole image adds to the score; without the
    background as a player these voxels are always kept. The coalition of all players is the unperturbed image, which
    needs no mask. Mask 0 keeps nobody: it is the fill (beside a background that is kept).

    By default every coalition is scored: mask i keeps the players of the set bits of i, the first player (the lowest
    label) by the lowest bit. For a score that is a sum over voxels of a sliding-window model's output, ``inferer``
    leaves only the coalitions that decide it (:mod:`monai_saliency.masks.patch_cells`): those without some of the
    players that meet in the patches over one voxel. Nothing is lost by that, and there may be far more players. Where
    the patches' outputs are remembered, each patch is run once for each set of the players in it, at most; so are
    random coalitions, however many.

    With ``num_coalitions`` random coalitions are scored (:mod:`monai_saliency.masks.coalition_draw`): behind mask 0
    masks 2j + 1 and 2j + 2 keep complements of each other. With an ``inferer`` up to half of the masks are those of
    players that meet, small meetings and those inside one patch first; the others are random coalitions of the players
    in the places that are left, which keep all other players. It does so too where all coalitions that decide the score
    would be more than 2^16 masks: then up to 2^16 are those of players that meet, and ten for each player left are
    random. Where not even the sets inside single patches are so few, there are ten masks for each player in all.

    Args:
        num_coalitions: how many masks; an even number is rounded down, as coalitions come in pairs behind mask 0. None,
            or as many as there are coalitions, for all.
        seed: seed of random coalitions. With the same seed, more coalitions begin with the same ones as fewer.
        regions: function that makes the label map ``(1, *spatial)`` from an image ``(C, *spatial)`` and its voxel sizes
            in mm (None if unknown), such as :class:`~monai_saliency.Supervoxels`. By default the case's label map is
            used.
        background: whether the voxels of label 0 are a player; where there are none, they are not.
        per_channel: whether each channel of each region is a player, and each channel has its own map. With one region,
            the whole image, the channels are the players.
        inferer: the sliding-window inferer that runs the network, where the score is a sum or mean over voxels of the
            output there.
        linear: whether that score is linear in the output, as a mean of logits is, or of probabilities that the network
            itself gives. Then only players inside one patch meet. Not read without an ``inferer``.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when there are more than 14 players and neither
            ``num_coalitions`` nor an ``inferer``, when ``num_coalitions`` is less than three times the number of
            players + 1, and as for :class:`~monai_saliency.RegionMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency import CoalitionMasks
        >>> labels = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
        >>> bound = CoalitionMasks().bind(torch.zeros(1, 2, 3), labels)
        >>> bound.players, len(bound)
        ([0, 2, 5, 9], 15)
        >>> bound.render([6])[0, 0].tolist()  # keeps labels 2 and 5
        [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """

    by_region = True
    shorter = "fewer players, or num_coalitions for an estimate"

    def __init__(
        self,
        num_coalitions: int | None = None,
        seed: int = 0,
        regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
        background: bool = True,
        per_channel: bool = False,
        inferer: SlidingWindowInferer | None = None,
        linear: bool = False,
    ) -> None:
        if num_coalitions is not None:
            num_coalitions = whole_number("num_coalitions", num_coalitions, 1)
        self.num_coalitions = num_coalitions
        self.seed = whole_number("seed", seed, 0)
        words = "a function of an image that makes a label map, such as Supervoxels(200)"
        self.regions = instance("regions", regions, (), words, function=True, none=True)
        self.needs_labels = reads_labels(regions)
        self.background = flag("background", background)
        self.per_channel = flag("per_channel", per_channel)
        words = "a SlidingWindowInferer, whose patches decide which coalitions are needed"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words, none=True)
        self.linear = flag("linear", linear)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        regions = find_regions(self.regions, image, labels, spacing)
        if self.background and bool((regions.index == 0).any()):
            regions = Regions([0, *regions.values], regions.index + 1)
        return BoundCoalitionMasks(self, image, regions)


class BoundCoalitionMasks(BoundMasks):
    """The coalitions of one image's players.

    Attributes:
        players: what each of n players is: the label of its region, or the label and the channel.
        coalitions: bool ``(N, n)``, True for the players that mask i keeps. Mask 0 keeps nobody.
        meetings: the sets of players whose coalitions are all scored; None where there are none. Without ``random``
            they decide the game.
        random: coalitions that are drawn at random; None where there are none.
    """

    players: list[int] | list[tuple[int, int]]
    meetings: list[Meeting] | None = None
    random: Drawn | None = None

    def __init__(self, masks: CoalitionMasks, image: torch.Tensor, regions: Regions) -> None:
        super().__init__(image)
        self._regions = regions
        self.channels = len(image) if masks.per_channel else None
        self.players = list(regions.values)
        if self.channels is not None:
            self.players = [(label, channel) for label in regions.values for channel in range(self.channels)]
        count, players = masks.num_coalitions, len(self.players)
        if count is not None and count >= 2**players - 1:
            count = None
        if count is not None:
            _check_count(count, players)
        if masks.inferer is not None:
            self._that_meet(masks.inferer, masks.linear, masks.seed, count)
        elif count is not None:
            self.coalitions, self.random = _random(masks.seed, players, count)
        else:
            if players > _MOST_PLAYERS:
                raise ValueError(
                    f"all coalitions are scored of at most {_MOST_PLAYERS} players, and there are {players}: "
                    f"{_ask_for_fewer(players)}. Under a SlidingWindowInferer and a target that is a mean over voxels, "
                    "such as RegionScore, more players are exact"
                )
            self.coalitions, self.meetings = _all(players)
        digest = hashlib.sha256(regions.index.cpu().numpy().tobytes() + np.packbits(self.coalitions).tobytes())
        size = (self.spatial_shape, self.channels, len(self.coalitions), self.meetings is not None)
        self.key = ("CoalitionMasks", tuple(self.players), digest.hexdigest(), size)

    def _that_meet(self, inferer: SlidingWindowInferer, linear: bool, seed: int, count: int | None) -> None:
        """All coalitions that decide the game; where they are too many, as many of them as there may be, and random
        ones of the players in the places that are left.
        """
        boxes = PatchGrid(inferer, self.spatial_shape).boxes
        players = len(self.players)
        present = np.zeros((len(boxes), players), dtype=bool)
        for row, box in zip(present, boxes, strict=True):
            row[self._inside(box)] = True
        cells, patches = (players_that_meet(present, boxes, each) for each in (linear, True))
        try:
            self.coalitions, self.meetings = meetings(cells, players, count or _MOST_COALITIONS)
            return
        except ValueError:
            if count is None and not _are_affordable(patches, players):
                count = 10 * players + 1
        hidden = Hidden(players, _MOST_COALITIONS if count is None else min(count // 2, count - 3 * players))
        self.meetings, left = affordable_meetings(hidden, cells, patches)
        pairs = (10 * len(left) if count is None else count - len(hidden) - 1) // 2
        if 2 ** len(left) - 1 <= 2 * pairs:
            hidden.most = len(hidden) + 2 ** len(left)
            self.meetings += filter(None, [hidden.meet(left)])
            self.coalitions = hidden.coalitions
            return
        everybody = np.isin(np.arange(players), left)
        nobody = int(hidden.rows(everybody[None])[0])
        first = np.zeros((pairs, players), dtype=bool)
        first[:, left] = draw_pairs(seed, len(left), pairs)
        rows = hidden.rows(np.stack([everybody & ~first, first], axis=1).reshape(-1, players))
        self.coalitions, self.random = hidden.coalitions, Drawn(left, rows.reshape(-1, 2), nobody)

    def stopped(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        if self.random is None or self.meetings is None:
            return ""
        return (
            f"the values of {len(self.random.players)} of {len(self.players)} players were estimated from "
            f"{self.random.pairs.size} random coalitions: too many players meet in one place to score all"
        )

    @property
    def regions(self) -> Regions:
        """The regions, with the background among them where it is a player: ``values`` begins with 0 then."""
        return self._regions

    def __len__(self) -> int:
        return len(self.coalitions)

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``coalition`` bool ``(n, players)``, True where a player is kept."""
        return {"coalition": self.coalitions[np.asarray(ids, dtype=int)]}

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        hidden = ~self.codes(ids)["coalition"][:, self._inside(box)]
        return np.asarray(hidden.any(axis=1)), np.packbits(hidden, axis=1)

    def _inside(self, box: Box) -> np.ndarray:
        """The players with a voxel inside a box."""
        present = self._regions.index[box].unique().cpu().numpy()
        present = present[present > 0] - 1
        channels = self.channels or 1
        return (present[:, None] * channels + np.arange(channels)).ravel()

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, (slice(None),) * len(self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        return on_voxels(self._kept(codes, device), self._regions.index[box].to(device))

    @property
    def _is_crisp(self) -> bool:
        """Whether all voxels of a player have one value; a subclass may render others."""
        return type(self)._render_box is BoundCoalitionMasks._render_box

    def weighted_sum(self, ids: Sequence[Id], weights: torch.Tensor) -> torch.Tensor:
        if not self._is_crisp:
            return super().weighted_sum(ids, weights)
        return summed_on_voxels(self._kept(self.codes(ids), self.device), self._regions.index, weights)

    def _kept(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        """The masks of each region, ``(n, channels or 1, 1 + regions)``."""
        coalition = to_device(codes["coalition"], device, self.dtype)
        kept = coalition.unflatten(1, (-1, self.channels or 1)).transpose(1, 2)
        return torch.cat([kept.new_ones(*kept.shape[:2], 1), kept], dim=2)

    def paint(self, values: torch.Tensor) -> torch.Tensor:
        """Give each voxel the value of its player; 0 where it has none.

        Args:
            values: ``(n, K)``, one row per player.

        Returns:
            ``(K, channels or 1, *spatial)``, on the masks' device and in their precision.
        """
        values = values.to(self.device, self.dtype)
        table = values.reshape(-1, self.channels or 1, values.shape[1]).permute(2, 1, 0)
        table = torch.cat([table.new_zeros(*table.shape[:2], 1), table], dim=2)
        return on_voxels(table, self._regions.index)


def _all(players: int) -> tuple[np.ndarray, list[Meeting]]:
    """Every coalition but that of all players, by its bits, and the one meeting of all."""
    everybody = 2**players - 1
    bits = (np.arange(everybody)[:, None] >> np.arange(players)) & 1
    rows = everybody - np.arange(2**players)
    rows[0] = -1
    new = np.ones(2**players, dtype=bool)
    new[0] = False
    return bits.astype(bool), [Meeting(range(players), rows, new)]


def _are_affordable(cells: Sequence[Sequence[int]], players: int) -> bool:
    try:
        meetings(cells, players, _MOST_COALITIONS)
    except ValueError:
        return False
    return True


def _check_count(count: int, players: int) -> None:
    if count < 3 * players + 1:
        raise ValueError(
            f"`num_coalitions` must be at least {3 * players + 1} for {players} players, three times as many and one, "
            f"got {count}: fewer hardly tell the players apart; {10 * players + 1} are a good start"
        )


def _random(seed: int, players: int, count: int) -> tuple[np.ndarray, Drawn]:
    """The coalition of nobody, and pairs of complements."""
    first = draw_pairs(seed, players, (count - 1) // 2)
    pairs = np.stack([first, ~first], axis=1).reshape(-1, players)
    rows = np.arange(1, len(pairs) + 1).reshape(-1, 2)
    return np.concatenate([np.zeros((1, players), dtype=bool), pairs]), Drawn(range(players), rows, 0)


def _ask_for_fewer(players: int) -> str:
    return (
        f"give `num_coalitions` for an estimate, such as {10 * players + 1}, or have fewer players (a smaller "
        "`num_supervoxels`, labels that are merged)"
    )
