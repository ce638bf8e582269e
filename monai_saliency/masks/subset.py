"""Masks that each hide as many cells of a grid, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks, random_rows
from monai_saliency.utils.arguments import per_axis, whole_number, whole_numbers
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.tensors import to_device

__all__ = ["BoundSubsetMasks", "SubsetMasks"]


class SubsetMasks(Masks):
    """Masks that each hide ``num_hidden`` cells of a grid, drawn at random without replacement: the subsets of
    sensitivity-n (Ancona et al., ICLR 2018, section 3).

    Args:
        num_masks: how many masks, at least 1.
        num_hidden: n, how many cells each mask hides, at least 1.
        grid_size: cells along each axis, one number or one per axis, at least 1; single voxels along an axis that is
            shorter. Cells differ in size by one voxel where they do not divide the axis.
        seed: of the random subsets.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when the grid has fewer cells than ``num_hidden``.

    Example::

        >>> bound = SubsetMasks(num_masks=3, num_hidden=2, grid_size=2).bind(torch.zeros(1, 4, 4))
        >>> (1 - bound.render(range(3))).sum((1, 2, 3)).tolist()  # two cells of four voxels
        [8.0, 8.0, 8.0]
    """

    shorter = "fewer num_masks"

    def __init__(
        self, num_masks: int = 100, num_hidden: int = 8, grid_size: int | Sequence[int] = 8, seed: int = 0
    ) -> None:
        self.num_masks = whole_number("num_masks", num_masks, 1)
        self.num_hidden = whole_number("num_hidden", num_hidden, 1)
        whole_numbers("grid_size", grid_size, 1)
        self.grid_size = grid_size
        self.seed = whole_number("seed", seed, 0)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundSubsetMasks:
        return BoundSubsetMasks(self, image)


class BoundSubsetMasks(BoundMasks):
    """The masks of one image."""

    def __init__(self, masks: SubsetMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        sizes = per_axis("grid_size", masks.grid_size, self.spatial_shape)
        self.grid = tuple(min(int(g), n) for g, n in zip(sizes, self.spatial_shape, strict=True))
        self.num_masks, self.num_hidden, self.seed = masks.num_masks, masks.num_hidden, masks.seed
        if self.num_hidden > np.prod(self.grid):
            raise ValueError(f"`num_hidden` is {self.num_hidden}, and the grid {self.grid} has fewer cells")
        self.key = ("SubsetMasks", self.seed, self.num_masks, self.num_hidden, self.grid, self.spatial_shape)

    def __len__(self) -> int:
        return self.num_masks

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``kept`` bool ``(n, *grid)``."""
        size = int(np.prod(self.grid))
        # The cells with the smallest of as many random numbers are a subset drawn without replacement.
        order = random_rows(self.seed, ids, size).argsort(axis=1, kind="stable")
        kept = np.ones((len(ids), size), dtype=bool)
        np.put_along_axis(kept, order[:, : self.num_hidden], False, axis=1)
        return {"kept": kept.reshape(-1, *self.grid)}

    def _cells(self, box: Box) -> list[np.ndarray]:
        """For each axis, the cell of each voxel inside a box."""
        every = [np.arange(n) * g // n for n, g in zip(self.spatial_shape, self.grid, strict=True)]
        return [cells[side] for cells, side in zip(every, box, strict=True)]

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        hidden = ~self.codes(ids)["kept"]
        for axis, cells in enumerate(self._cells(box)):
            hidden = np.take(hidden, np.unique(cells), axis=axis + 1)
        hidden = hidden.reshape(len(hidden), -1)
        return np.asarray(hidden.any(axis=1)), np.packbits(hidden, axis=1)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, (slice(None),) * len(self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        kept = to_device(codes["kept"], device, self.dtype)
        for axis, cells in reversed(list(enumerate(self._cells(box), start=1))):  # what is copied last is longest
            kept = kept.index_select(axis, to_device(cells, device))
        return kept.unsqueeze(1)
