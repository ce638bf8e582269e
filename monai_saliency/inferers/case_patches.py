"""One case under remembered patches: its unperturbed output, and how a mask's patches change the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from monai_saliency.inferers.walk import Walk
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.networks.outputs import placed
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.precision import accumulation_dtype
from monai_saliency.utils.tensors import Box, everywhere, tight, within


class Swap(NamedTuple):
    """A patch that a mask changes: the slots of its unperturbed and its perturbed output."""

    patch: int
    old: int
    new: int


class CasePatches:
    """One case's unperturbed output, and the patches that each mask changes."""

    def __init__(
        self,
        walk: Walk,
        sums: torch.Tensor,
        weight_sum: torch.Tensor,
        volume: torch.Tensor,
        grid: PatchGrid,
        first_slot: int,
    ) -> None:
        self.masks, self.target = walk.masks, walk.target
        self.grid = grid
        self.first_slot = first_slot
        self.trims = find_trims(grid, self.target.reach())
        channels = self.target.channels_read
        self.channels = slice(None) if channels is None else list(channels)
        # Outside of this box nothing is read.
        self.box = around(self.trims.values()) if self.trims else (slice(0, 0),) * (volume.ndim - 2)
        self.sums = sums[self.channels][everywhere(self.box)].clone()
        self.weight_sum = weight_sum[self.box].clone()
        # A copy, since the target may hold on to what it was bound to.
        self.volume = None if self.target.additive else volume.clone()
        self.reference_scores = walk.scores.reference
        self._contributions: dict[tuple, torch.Tensor] = {}

    def begin(self, ids: Sequence[Id], first_slot: int) -> np.ndarray:
        """Find the patches that some masks change, and give slots to their contents: rows of a mask's place in ``ids``
        and a patch.
        """
        # Rows (i, patch, j): the i-th mask changes the patch, and the j-th is the first that changes it the same way.
        touches = find_touches(self.masks, self.grid, self.trims, ids)
        new = touches[touches[:, 0] == touches[:, 2], :2]
        # Both ascend by mask, then by patch.
        count = [len(self.grid.boxes), 1]
        slots = first_slot + np.searchsorted(new @ count, touches[:, [2, 1]] @ count)
        self._swaps: dict[Id, list[Swap]] = {}
        for (number, patch, _), slot in zip(touches.tolist(), slots.tolist(), strict=True):
            self._swaps.setdefault(ids[number], []).append(Swap(patch, self.first_slot + patch, slot))
        return new

    def swaps(self, mask: Id) -> list[Swap]:
        """The patches that a mask changes."""
        return self._swaps.get(mask, [])

    def trim(self, patch: int, output: torch.Tensor) -> torch.Tensor:
        """A copy of what the target needs of the output ``(C, *box)`` of a patch."""
        inside = everywhere(within(self.trims[patch], self.grid.boxes[patch]))
        if isinstance(self.channels, slice):
            return output[inside].clone()
        return torch.stack([output[channel][inside[1:]] for channel in self.channels])

    def score(self, mask: Id, take: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Scores ``(K,)`` of a mask; ``take`` gives the outputs of its patches."""
        swaps = self.swaps(mask)
        if not swaps:
            return self.reference_scores
        box = around(self.trims[swap.patch] for swap in swaps)
        here = within(box, self.box)
        values = self.sums[everywhere(here)].clone()
        for swap in swaps:
            part = values[everywhere(within(self.trims[swap.patch], box))]
            part -= take(swap.old).to(values.device)
            part += take(swap.new).to(values.device)
        values /= self.weight_sum[here]
        if self.volume is None:
            gained = self._contribution(values, box) - self._reference(box)
            return self.reference_scores + gained.to(self.reference_scores)
        place = (0, self.channels, *box)
        kept = self.volume[place].clone()
        self.volume[place] = values
        scores = self.target(placed(self.volume, self.target.path))[0].clone()
        self.volume[place] = kept
        return scores

    def _reference(self, box: Box) -> torch.Tensor:
        """The share of a box of the unperturbed output in the sums; masks that change the same patches share it."""
        key = tuple((side.start, side.stop) for side in box)
        if key not in self._contributions:
            here = within(box, self.box)
            values = self.sums[everywhere(here)] / self.weight_sum[here]
            self._contributions[key] = self._contribution(values, box)
        return self._contributions[key]

    def _contribution(self, values: torch.Tensor, box: Box) -> torch.Tensor:
        """The part that a box adds to the sums, precisely, since a change is the difference of two large ones."""
        return self.target.contribution(values[None].to(accumulation_dtype(values.device)), box)[0]


def around(boxes: Iterable[Box]) -> Box:
    """The smallest box around some boxes."""
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides)) for sides in zip(*boxes, strict=True)
    )


def cancels(volume: torch.Tensor) -> bool:
    """Whether exchanging patches of an output ``(1, C, *spatial)`` loses its ordinary values: where a network masks
    voxels by a number such as -1e9, the difference of two patches rounds away what a mask brings back.
    """
    values = volume[0].flatten(1).abs()
    some = values[:, :: max(1, values.shape[1] // 2**18)]
    # One of a thousand values may be smaller than an ordinary one.
    ordinary = some.kthvalue(max(1, some.shape[1] // 1000), dim=1).values.clamp(min=1)
    return bool((values.amax(dim=1) * torch.finfo(volume.dtype).eps > 0.01 * ordinary).any())


def find_trims(grid: PatchGrid, reach: torch.Tensor | None) -> dict[int, Box]:
    """For each patch with voxels that the target reads, the smallest box around these."""
    if reach is None:
        return dict(enumerate(grid.boxes))
    voxels, trims = reach.numpy(force=True), {}
    for patch, box in enumerate(grid.boxes):
        if trim := tight(voxels[box], box):
            trims[patch] = trim
    return trims


def find_touches(masks: BoundMasks, grid: PatchGrid, patches: Iterable[int], ids: Sequence[Id]) -> np.ndarray:
    """Which masks change which patches."""
    rows = [np.empty((0, 3), dtype=int)]
    for patch in patches:
        restricted = masks.restrict(ids, grid.boxes[patch])
        assert restricted is not None
        changed = restricted[0].nonzero()[0]
        if len(changed):
            _, first, same = np.unique(restricted[1][changed], axis=0, return_index=True, return_inverse=True)
            rows.append(np.stack([changed, np.full_like(changed, patch), changed[first][same.ravel()]], axis=1))
    touches = np.concatenate(rows)
    return touches[np.lexsort((touches[:, 1], touches[:, 0]))]
