"""Masks that keep coalitions of players, for Shapley values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.masks.base import BoundMasks, Id, Masks, Regions
from monai_saliency.masks.coalition_draw import draw_pairs
from monai_saliency.masks.patch_cells import Meeting, meetings, players_that_meet
from monai_saliency.masks.region import find_regions, on_voxels, reads_labels
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
    label 0, are a player too, so that the players' values sum to what the whole image adds to the score. Mask 0 keeps
    nobody. The coalition of all players is the unperturbed image, which needs no mask.

    By default every coalition is scored: mask i keeps the players of the set bits of i, the first player (the lowest
    label) by the lowest bit. With an ``inferer``, and a score that is a sum over voxels of a sliding-window model's
    output, only the coalitions that decide it are scored (:mod:`monai_saliency.masks.patch_cells`): those without some
    of the players that meet in the patches over one voxel. So there may be far more players.

    With ``num_coalitions`` random coalitions are scored, in pairs of complements behind mask 0
    (:mod:`monai_saliency.masks.coalition_draw`). With an ``inferer``, they are drawn only if there are more coalitions
    that decide the score; without ``num_coalitions`` beyond 2^16, and then ten for each player.

    Args:
        num_coalitions: how many masks; an even number is rounded down. None, or as many as there are coalitions, for
            all.
        seed: seed of random coalitions. With the same seed, more coalitions begin with the same ones as fewer.
        regions: function that makes the label map ``(1, *spatial)`` from an image ``(C, *spatial)`` and its voxel sizes
            in mm (None if unknown), such as :class:`~monai_saliency.Supervoxels`. By default the case's label map is
            used.
        background: whether the voxels of label 0 are a player; otherwise they are always kept.
        per_channel: whether each channel of each region is a player, and each channel has its own map.
        inferer: the sliding-window inferer that runs the network, if the score is a sum or mean over voxels of the
            output there.
        linear: whether that score is linear in the output, as a mean of logits is. Then only players inside one patch
            meet. Not read without an ``inferer``.

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
    """The coalitions of one image's players."""

    players: list[int] | list[tuple[int, int]]
    meetings: list[Meeting] | None = None
    pairs: np.ndarray | None = None
    estimates_unasked = False

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
        exact = masks.inferer is not None and self._that_meet(masks.inferer, masks.linear, count or _MOST_COALITIONS)
        if not exact and masks.inferer is not None and count is None:
            self.estimates_unasked, count = True, 10 * players + 1
        if not exact and count is not None:
            # Mask 0 keeps nobody; pairs of complements follow.
            first = draw_pairs(masks.seed, players, (count - 1) // 2)
            both = np.stack([first, ~first], axis=1).reshape(-1, players)
            self.coalitions = np.concatenate([np.zeros((1, players), dtype=bool), both])
            self.pairs = np.arange(1, len(both) + 1).reshape(-1, 2)
        elif not exact:
            if players > _MOST_PLAYERS:
                raise ValueError(
                    f"all coalitions are scored of at most {_MOST_PLAYERS} players, and there are {players}: give "
                    f"`num_coalitions` for an estimate, such as {10 * players + 1}, or have fewer players (a smaller "
                    "`num_supervoxels`, labels that are merged). Under a SlidingWindowInferer and a target that is a "
                    "mean over voxels, such as RegionScore, more players are exact"
                )
            self.coalitions, self.meetings = _all(players)
        digest = hashlib.sha256(regions.index.cpu().numpy().tobytes() + np.packbits(self.coalitions).tobytes())
        size = (self.spatial_shape, self.channels, len(self.coalitions), self.meetings is not None)
        self.key = ("CoalitionMasks", tuple(self.players), digest.hexdigest(), size)

    def _that_meet(self, inferer: SlidingWindowInferer, linear: bool, most: int) -> bool:
        """Take all coalitions that decide the game; False if they are too many."""
        boxes = PatchGrid(inferer, self.spatial_shape).boxes
        present = np.zeros((len(boxes), len(self.players)), dtype=bool)
        for row, box in zip(present, boxes, strict=True):
            row[self._inside(box)] = True
        found = meetings(players_that_meet(present, boxes, linear), len(self.players), most)
        if found is not None:
            self.coalitions, self.meetings = found
        return found is not None

    def stopped(self, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor) -> str:
        if self.pairs is None or not self.estimates_unasked:
            return ""
        return (
            f"the values of {len(self.players)} players were estimated from {self.pairs.size} random coalitions: too "
            "many players meet in one place to score all"
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

    def _kept(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        """The masks of each region, ``(n, channels or 1, 1 + regions)``."""
        coalition = to_device(codes["coalition"], device, self.dtype)
        kept = coalition.unflatten(1, (-1, self.channels or 1)).transpose(1, 2)
        return torch.cat([kept.new_ones(*kept.shape[:2], 1), kept], dim=2)

    def paint(self, values: torch.Tensor) -> torch.Tensor:
        """Give each voxel the value of its player; 0 where it has none."""
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


def _check_count(count: int, players: int) -> None:
    if count < 3 * players + 1:
        raise ValueError(
            f"`num_coalitions` must be at least {3 * players + 1} for {players} players, three times as many and one, "
            f"got {count}: fewer hardly tell the players apart; {10 * players + 1} are a good start"
        )
