"""Masks that each hide as many cells of a grid, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks, random_rows
from monai_saliency.masks.grid import GridMasks
from monai_saliency.masks.region import BoundRegionMasks
from monai_saliency.utils.arguments import whole_number, whole_numbers

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


class BoundSubsetMasks(BoundRegionMasks):
    """The masks of one image. A cell is a region."""

    num_masks: int

    def __init__(self, masks: SubsetMasks, image: torch.Tensor) -> None:
        BoundMasks.__init__(self, image)
        cells = GridMasks(1, masks.grid_size).bind(image)
        self.values, self.index = cells.values, cells.index
        self.num_masks, self.num_hidden, self.seed = masks.num_masks, masks.num_hidden, masks.seed
        if self.num_hidden > len(self.values):
            raise ValueError(f"`num_hidden` is {self.num_hidden}, and the grid {cells.grid_shape} has fewer cells")
        self.key = ("SubsetMasks", self.seed, self.num_masks, self.num_hidden, cells.grid_shape, self.spatial_shape)

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``coalition`` bool ``(n, cells)``, True where a cell is kept."""
        # The cells with the smallest of as many random numbers are a subset drawn without replacement.
        order = random_rows(self.seed, ids, len(self.values)).argsort(axis=1, kind="stable")
        kept = np.ones(order.shape, dtype=bool)
        np.put_along_axis(kept, order[:, : self.num_hidden], False, axis=1)
        return {"coalition": kept}
