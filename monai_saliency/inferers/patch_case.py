"""One case under remembered patches: its unperturbed output, and how a mask's patches change the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.patch_memory import owned
from monai_saliency.inferers.patch_plan import find_touches, find_trims
from monai_saliency.utils.boxes import Box, everywhere, within
from monai_saliency.utils.patch_grid import PatchGrid

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
        trims: by patch, the box that the target reads.
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
        self.trims = find_trims(grid, self.target.reach())
        channels = self.target.channels_read
        self.channels = slice(None) if channels is None else list(channels)
        # Outside of this box nothing is read.
        self.box = around(self.trims.values()) if self.trims else (slice(0, 0),) * (volume.ndim - 2)
        self.sums = owned(sums[self.channels][everywhere(self.box)])
        self.weight_sum = owned(weight_sum[self.box])
        # A copy, since the target may hold on to what it was bound to.
        self.volume = None if self.target.additive else volume.clone()
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

    def exchanges(self, row: int) -> Iterator[tuple[int, int, int]]:
        """The patches that a row's mask changes, each with the slots of its unperturbed and its perturbed output."""
        place = row - self._first_row
        for touch in range(self._rows[place], self._rows[place + 1]):
            patch = int(self.touches[touch, 1])
            yield patch, self.first_slot + patch, int(self.slots[touch])

    def trim(self, patch: int, output: torch.Tensor, box: Box) -> torch.Tensor:
        """What the target needs of an output ``(C, *box)``."""
        return owned(output[self.channels][everywhere(within(self.trims[patch], box))])

    def score(self, row: int, take: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Scores ``(K,)`` of a row's mask; ``take`` gives the outputs of its patches."""
        exchanges = list(self.exchanges(row))
        if not exchanges:
            return self.reference_scores
        box = around(self.trims[patch] for patch, _, _ in exchanges)
        here = within(box, self.box)
        values = self.sums[everywhere(here)].clone()
        for patch, old, new in exchanges:
            part = values[everywhere(within(self.trims[patch], box))]
            part -= take(old).to(values.device)
            part += take(new).to(values.device)
        values /= self.weight_sum[here]
        if self.volume is None:
            return self.reference_scores + (self.target.contribution(values[None], box)[0] - self._reference(box))
        place = (0, self.channels, *box)
        kept = self.volume[place].clone()
        self.volume[place] = values
        scores = self.target(self.volume)[0].clone()
        self.volume[place] = kept
        return scores

    def _reference(self, box: Box) -> torch.Tensor:
        """What a box of the unperturbed output adds to the scores; masks that change the same patches share it."""
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


def around(boxes: Iterable[Box]) -> Box:
    """The smallest box around some boxes."""
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides)) for sides in zip(*boxes, strict=True)
    )
