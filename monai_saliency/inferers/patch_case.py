"""One case under remembered patches: its unperturbed output, and how a mask's patches change the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.patch_exchange import Exchange, Swap, layers_of
from monai_saliency.inferers.patch_memory import Row, owned, stacked
from monai_saliency.inferers.patch_plan import find_touches, find_trims
from monai_saliency.utils.boxes import Box, everywhere, within
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import to_device, windows

__all__ = ["PatchCase", "around", "cancels"]

#: rounding of an output's largest value that an ordinary value may be off by, relative to the latter, or to 1
_LOST = 0.01
#: one of so many values may be smaller than an ordinary one
_ORDINARY = 1000


class PatchCase:
    """One case's unperturbed output, and the patches in which each mask changes it.

    Args:
        state: the case, with its target bound.
        sums: ``(C, *spatial)``, the weighted outputs of its patches, summed.
        weight_sum: ``(*spatial)``, their weights, summed.
        volume: ``(1, C, *spatial)``, the ratio of the two.
        grid: the patches.
        first_slot: the slot of the unperturbed image's first patch.

    Attributes:
        trims: by patch, the box that the target reads, and as much around it as makes all of one size.
        touches: rows (i, patch, j) of the round: the i-th mask changes the patch, and the j-th is the first that
            changes it in the same way. Ascending.
        slots: the slot of each row of ``touches``.
    """

    touches: np.ndarray
    slots: np.ndarray

    def __init__(
        self,
        state: CaseState,
        sums: torch.Tensor,
        weight_sum: torch.Tensor,
        volume: torch.Tensor,
        grid: PatchGrid,
        first_slot: int,
    ) -> None:
        self.state = state
        self.target = state.target
        self.reference_scores = state.state.reference_scores
        self.grid = grid
        self.first_slot = first_slot
        self.trims = of_one_size(find_trims(grid, self.target.reach()), grid)
        channels = self.target.channels_read
        self.channels = slice(None) if channels is None else list(channels)
        # Outside of this box nothing is read.
        self.box = around(self.trims.values()) if self.trims else (slice(0, 0),) * (volume.ndim - 2)
        self.sums = owned(sums[self.channels][everywhere(self.box)])
        self.weight_sum = owned(weight_sum[self.box])
        # A copy, since the target may hold on to what it was bound to.
        self.volume = None if self.target.additive or self.target.summed else volume.clone()
        self.reference_sums = self.target.sums(volume)[0] if self.target.summed else self.reference_scores
        self.exchange = Exchange(
            self.target,
            self.reference_sums,
            self.sums,
            self.weight_sum,
            self.box,
            self.volume,
            self.channels,
            self.trims,
            layers_of(grid),
        )
        if self.exchange.planes is not None:
            self.sums, self.weight_sum = self.exchange.planes[: len(self.sums)], self.exchange.planes[len(self.sums)]
        self._contributions: dict[tuple, torch.Tensor] = {}
        self._first_row = 1

    def begin(self, start: int, stop: int) -> np.ndarray:
        """Find the patches that the masks of rows [start, stop) change.

        Returns:
            rows (row, patch): the contents of patches that no earlier mask of these rows has.
        """
        self._first_row = start
        self.touches = find_touches(self.state.masks, self.grid, self.trims, self.state.masks_of(start, stop))
        self._rows = np.searchsorted(self.touches[:, 0], np.arange(stop - start + 1))
        new = self.touches[self.touches[:, 0] == self.touches[:, 2], :2]
        return new + np.array([start, 0])

    def number(self, new: np.ndarray, first_slot: int) -> None:
        """Give slots from ``first_slot`` on to the contents that :meth:`begin` returned."""
        # Both ascend by mask, then by patch.
        count = [len(self.grid.boxes), 1]
        known, wanted = (new - np.array([self._first_row, 0])) @ count, self.touches[:, [2, 1]] @ count
        self.slots = first_slot + np.searchsorted(known, wanted)

    def exchanges(self, row: int) -> list[Swap]:
        """The patches that a row's mask changes."""
        place = row - self._first_row
        touches = slice(self._rows[place], self._rows[place + 1])
        changed = zip(self.touches[touches, 1].tolist(), self.slots[touches].tolist(), strict=True)
        return [Swap(patch, self.first_slot + patch, new) for patch, new in changed]

    def needs_all(self, outputs: torch.Tensor) -> bool:
        """Whether the target needs all channels and voxels of the outputs ``(n, C, *box)`` of patches."""
        return isinstance(self.channels, slice) and list(outputs.shape[2:]) == self.exchange.size

    def trim(self, patches: Sequence[int], outputs: torch.Tensor) -> torch.Tensor:
        """What the target needs of the outputs ``(n, C, *box)`` of some patches, ``(n, C, *size)``."""
        if self.needs_all(outputs):
            return owned(outputs)
        parts = self._read(outputs)
        size = self.exchange.size
        inside = [within(self.trims[patch], self.grid.boxes[patch]) for patch in patches]
        if all(box == inside[0] for box in inside):
            side: tuple[slice, ...] = everywhere(everywhere(inside[0]))
            return owned(parts[side])
        rows = [[row, *(side.start for side in box)] for row, box in enumerate(inside)]
        row, *corner = to_device(np.array(rows), parts.device).unbind(1)
        place: tuple[Any, ...] = (row, slice(None), *corner)
        return windows(parts, size)[place]

    def _read(self, outputs: torch.Tensor) -> torch.Tensor:
        """The channels that are read, without a list as an index, for which the device is waited."""
        if isinstance(self.channels, slice):
            return outputs
        first, last = self.channels[0], self.channels[-1]
        if last - first + 1 == len(self.channels):
            return outputs[:, first : last + 1]
        return torch.stack([outputs[:, channel] for channel in self.channels], dim=1)

    def scores(self, start: int, stop: int, take: Callable[[int], Row]) -> torch.Tensor:
        """Scores ``(stop - start, K)`` of the masks of rows; ``take`` gives the outputs of their patches."""
        swaps = [self.exchanges(row) for row in range(start, stop)]
        found = []
        for first, last, together in self.exchange.groups(swaps):
            some = swaps[first:last]
            if not together:
                found.append(self.score(start + first, take)[None])
                continue
            pairs = [(take(swap.old), take(swap.new)) for each in some for swap in each]
            outputs = stacked([*(old for old, _ in pairs), *(new for _, new in pairs)], self.sums.device)
            found.append(self.exchange.scores(some, outputs.unflatten(0, (2, -1))))
        return torch.cat(found) if len(found) > 1 else found[0]

    def score(self, row: int, take: Callable[[int], Row]) -> torch.Tensor:
        """Scores ``(K,)`` of a row's mask; ``take`` gives the outputs of its patches."""
        exchanges = self.exchanges(row)
        if not exchanges:
            return self.reference_scores
        box = around(self.trims[patch] for patch, _, _ in exchanges)
        here = within(box, self.box)
        values = self.sums[everywhere(here)].clone()
        for patch, old, new in exchanges:
            part = values[everywhere(within(self.trims[patch], box))]
            part -= take(old).values.to(values.device)
            part += take(new).values.to(values.device)
        values /= self.weight_sum[here]
        if self.volume is None:
            sums = self.reference_sums + (self.target.contribution(values[None], box)[0] - self._reference(box))
            return self.target.of_sums(sums[None])[0] if self.target.summed else sums
        place = (0, self.channels, *box)
        kept = self.volume[place].clone()
        self.volume[place] = values
        scores = self.target(self.volume)[0].clone()
        self.volume[place] = kept
        return scores

    def _reference(self, box: Box) -> torch.Tensor:
        """What a box of the unperturbed output adds to the sums; masks that change the same patches share it."""
        key = tuple((side.start, side.stop) for side in box)
        if key not in self._contributions:
            here = within(box, self.box)
            values = self.sums[everywhere(here)] / self.weight_sum[here]
            self._contributions[key] = self.target.contribution(values[None], box)[0]
        return self._contributions[key]


def cancels(volume: torch.Tensor) -> bool:
    """Whether exchanging patches of an output loses its ordinary values: where a network masks voxels by a large number
    such as -1e9, and a mask brings an ordinary value back, the difference of the two rounds it away.

    So it is where, in a channel, the largest magnitude times the type's epsilon is more than 1 % of an ordinary
    magnitude: of the smallest thousandth's upper end, or of 1 where that is less. In float32 these are values beyond
    84,000 beside ordinary ones. A channel that holds -1e9 throughout loses nothing, nor does one of large values.

    Args:
        volume: ``(1, C, *spatial)``, the output of the unperturbed image.
    """
    values = volume[0].flatten(1)
    low, high = values.aminmax(dim=1)
    some = values[:, :: max(1, values.shape[1] // 2**18)].abs()
    ordinary = some.kthvalue(max(1, some.shape[1] // _ORDINARY), dim=1).values.clamp(min=1)
    largest = torch.maximum(low.abs(), high.abs())
    return bool((largest * torch.finfo(volume.dtype).eps > _LOST * ordinary).any())


def of_one_size(trims: dict[int, Box], grid: PatchGrid) -> dict[int, Box]:
    """Boxes inside of patches, made as large as the largest along each axis."""
    size = [max(side.stop - side.start for side in sides) for sides in zip(*trims.values(), strict=True)]
    found = {}
    for patch, box in trims.items():
        ends = zip(box, grid.boxes[patch], size, strict=True)
        starts = [min(side.start, whole.stop - length) for side, whole, length in ends]
        found[patch] = tuple(slice(start, start + length) for start, length in zip(starts, size, strict=True))
    return found


def around(boxes: Iterable[Box]) -> Box:
    """The smallest box around some boxes."""
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides)) for sides in zip(*boxes, strict=True)
    )
