"""Many masks of one case at once: the patches that they change are exchanged, and scored, in few operations.

One mask after the other, an exchange is a few operations for each patch that a mask changes. On a GPU each of them is a
launch, which takes longer than the exchange of a small patch. Here the changes of all patches of some masks are put on
layers, in which no two patches of a mask overlap, and the layers are summed. All masks take a box of one size, in which
their changes lie.

Large patches need nobody's help: where the layers of two masks would be more than :data:`MOST` numbers, masks go one by
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_saliency.targets.base import BoundTarget
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import cut, to_device, windows

__all__ = ["MOST", "Exchange", "Swap", "layers_of"]

#: numbers that the exchange of some masks may hold at a time
MOST = 2**23


class Swap(NamedTuple):
    """A patch that a mask changes: the slots of its unperturbed and its perturbed output."""

    patch: int
    old: int
    new: int


def layers_of(grid: PatchGrid) -> np.ndarray:
    """The layer of each patch: patches of one layer do not overlap."""
    corners = np.array([[side.start for side in box] for box in grid.boxes])
    layers = np.zeros(len(corners), dtype=int)
    for along, size in zip(corners.T, (side.stop - side.start for side in grid.boxes[0]), strict=True):
        starts, place = np.unique(along, return_inverse=True)
        # So many neighbours along the axis overlap at most.
        count = max(int(np.searchsorted(starts, start + size)) - index for index, start in enumerate(starts))
        layers = layers * count + place.ravel() % count
    return layers


class Exchange:
    """The exchange of patches of one case.

    Args:
        target: the case's target.
        reference_sums: the unperturbed image's scores ``(K,)``, or the sums ``(J,)`` of a ``summed`` target.
        sums: ``(C, *box)``, the weighted outputs of its unperturbed patches, summed, of the channels that are read.
        weight_sum: ``(*box)``, their weights, summed.
        box: where in the volume these lie.
        volume: ``(1, C, *spatial)``, the unperturbed output; None for scores, or their sums, that are sums.
        channels: the channels of ``volume`` that are read.
        trims: by patch, the box that is exchanged, all of one size.
        layers: by patch, its layer.
    """

    def __init__(
        self,
        target: BoundTarget,
        reference_sums: torch.Tensor,
        sums: torch.Tensor,
        weight_sum: torch.Tensor,
        box: Box,
        volume: torch.Tensor | None,
        channels: slice | list[int],
        trims: dict[int, Box],
        layers: np.ndarray,
    ) -> None:
        self.target = target
        self.reference_sums = reference_sums
        self.box = box
        self.volume = volume
        self.channels = channels
        self.layers = layers
        self.count = len(sums)
        self.corners = {patch: [side.start for side in each] for patch, each in trims.items()}
        self.size = [side.stop - side.start for side in next(iter(trims.values()), box)]
        planes = [sums, weight_sum[None]]
        if volume is None:
            shares = self._shares()
            self.is_able = shares is not None
            planes += [] if shares is None else [shares]
        else:
            self.is_able = isinstance(channels, slice)
        # Side by side, so that one operation takes a part of all of them.
        self.planes = torch.cat(planes) if self.is_able else None

    def _shares(self) -> torch.Tensor | None:
        """``(J, *box)``, how much each voxel counts in each sum."""
        voxels = int(np.prod([side.stop - side.start for side in self.box]))
        if len(self.reference_sums) * voxels > 8 * MOST:
            return None
        shares = self.target.shares(self.box)
        return None if shares is None else shares.to(self.reference_sums)

    def groups(self, swaps: Sequence[Sequence[Swap]]) -> Iterator[tuple[int, int, bool]]:
        """Cut masks into runs ``[start, stop)``, in order, each with whether :meth:`scores` takes it.

        A mask that changes nothing, and one whose exchange would hold more than :data:`MOST` numbers, is a run of its
        own, which it does not take.

        Args:
            swaps: for each mask the patches that it changes.
        """
        start = 0
        while start < len(swaps):
            stop = start
            layers: set[int] = set()
            extent = np.zeros(len(self.size))
            while self.is_able and stop < len(swaps) and swaps[stop]:
                lowest, highest = self._ends(swaps[stop])
                extent = np.maximum(extent, highest - lowest)
                layers.update(self.layers[swap.patch] for swap in swaps[stop])
                if self._cost(stop + 1 - start, len(layers), extent) > MOST:
                    break
                stop += 1
            yield start, max(stop, start + 1), stop > start
            start = max(stop, start + 1)

    def _cost(self, masks: int, layers: int, size: np.ndarray) -> int:
        """The numbers that the exchange of some masks holds at a time, in boxes of a size."""
        each = (layers + 4) * (self.count + len(self.reference_sums)) * int(np.prod(size))
        return masks * (each if self.volume is None else each + 3 * self.volume.numel())

    def _ends(self, swaps: Sequence[Swap]) -> tuple[np.ndarray, np.ndarray]:
        """The first voxel of the box around what a mask changes, and the one behind its last."""
        corners = np.array([self.corners[swap.patch] for swap in swaps])
        return corners.min(axis=0), corners.max(axis=0) + self.size

    def _boxes(self, swaps: Sequence[Sequence[Swap]]) -> tuple[np.ndarray, np.ndarray]:
        """The corners ``(n, dims)`` of boxes of one size around what each mask changes, and the size."""
        lowest, highest = map(np.stack, zip(*map(self._ends, swaps), strict=True))
        size = (highest - lowest).max(axis=0)
        return np.minimum(lowest, np.array([side.stop for side in self.box]) - size), size

    def scores(self, swaps: Sequence[Sequence[Swap]], outputs: torch.Tensor) -> torch.Tensor:
        """Scores ``(n, K)`` of n masks, each of which changes a patch.

        Args:
            swaps: for each mask the patches that it changes.
            outputs: ``(2, E, C, *size)``, the unperturbed outputs of all these patches, mask by mask, and their
                perturbed ones.
        """
        assert self.planes is not None
        old, new = outputs
        corners, size = self._boxes(swaps)
        mask = np.repeat(np.arange(len(swaps)), [len(each) for each in swaps])
        patches = [swap.patch for each in swaps for swap in each]
        layer = np.unique(self.layers[patches], return_inverse=True)[1].ravel()
        inside = np.array([self.corners[patch] for patch in patches]) - corners[mask]
        # One copy to the device: where each change goes, and where each box lies in the planes and in the volume. A
        # score, or sum, is the difference of two sums, so each box is taken twice.
        copies = 1 if self.volume is not None else 2
        table = np.concatenate([np.stack([mask, layer], axis=1), inside], axis=1)
        origin = np.tile(corners - [side.start for side in self.box], (copies, 1))
        first = np.concatenate([np.arange(len(swaps))[:, None], corners], axis=1)
        found = to_device(np.concatenate([each.ravel() for each in (table, origin, first)]), self.planes.device)
        places, origins, firsts = found.split([table.size, origin.size, first.size])
        at, on, *offsets = places.view(table.shape).unbind(1)
        changes = self.planes.new_zeros(len(swaps), int(layer.max()) + 1, self.count, *size)
        finer = torch.promote_types(new.dtype, changes.dtype)
        place: tuple[Any, ...] = (at, on, slice(None), *offsets)
        windows(changes, self.size)[place] = (new.to(finer) - old).to(changes.dtype)
        change = changes.sum(dim=1) if changes.shape[1] > 1 else changes[:, 0]
        here = cut(self.planes, origins.view(origin.shape).unbind(1), size.tolist())
        values, weights, shares = here.split([self.count, 1, here.shape[1] - self.count - 1], dim=1)
        values[-len(swaps) :].add_(change)
        values.div_(weights)
        if self.volume is None:
            before, after = self.target.at_voxels(values).chunk(2)
            change = after - before
            kinds = shares[: len(swaps)].unflatten(1, (-1, change.shape[1])).mul_(change[:, None])
            sums = kinds.flatten(1, 2).flatten(2).sum(dim=2) + self.reference_sums
            return self.target.of_sums(sums) if self.target.summed else sums
        volumes = self.volume.repeat(len(swaps), *[1] * (self.volume.ndim - 1))
        row, *corner = firsts.view(first.shape).unbind(1)
        place = (row, slice(None), *corner)
        windows(volumes, size.tolist())[place] = values
        return self.target(volumes)
