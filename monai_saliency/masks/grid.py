"""Grids with crisp cells, each kept, hidden or dimmed as a whole: at random, or by a Sobol design."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import Ids, Masks, Regions, Spacing
from monai_saliency.masks.region import BoundRegionMasks
from monai_saliency.utils.arguments import per_axis, whole_number, whole_numbers
from monai_saliency.utils.tensors import Box

# Cells of a grid, about, by default.
_CELLS = 64


class GridMasks(Masks):
    """Random grids with crisp cells, in 2D and 3D: each cell is kept with probability 1/2.

    Voxel v of an axis of n voxels lies in cell ``v * grid_size // n``. Along an axis with fewer voxels than
    ``grid_size`` each voxel is a cell. A cell is one yes or no, which ``HSICScoring`` reads.

    Args:
        num_masks: number of masks, at least 1.
        grid_size: cells along each axis, one number or one per axis, at least 1.
        seed: seed of all draws, at least 0. With the same seed, more masks begin with the same masks as fewer.

    Raises:
        ValueError: for settings out of range.
    """

    by_region = True
    p1 = 0.5

    def __init__(self, num_masks: int, grid_size: int | Sequence[int] | None = 8, seed: int = 0) -> None:
        if grid_size is not None:
            whole_numbers("grid_size", grid_size, 1)
        self.num_masks = whole_number("num_masks", num_masks, 1)
        self.grid_size = grid_size
        self.seed = whole_number("seed", seed, 0)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundRegionMasks:
        return BoundRegionMasks(self, image, self._cells(image))

    def _cells(self, image: Tensor) -> Regions:
        """The cells of an image, numbered from 1; the last axis changes fastest."""
        shape = image.shape[1:]
        size = round(_CELLS ** (1 / len(shape))) if self.grid_size is None else self.grid_size
        index = torch.zeros((), dtype=torch.int32, device=image.device)
        for cells, voxels in zip(per_axis("grid_size", size, len(shape)), shape, strict=True):
            count = min(cells, voxels)
            index = index[..., None] * count + torch.arange(voxels, device=image.device) * count // voxels
        return Regions(list(range(1, int(index.max()) + 2)), (index + 1).to(torch.int32))


class SobolMasks(GridMasks):
    """The design of total Sobol indices (Fel et al., NeurIPS 2021, arXiv 2111.04138, section 3), in 2D and 3D.

    A mask keeps each cell in part: by a number in [0, 1], 1 for all of it. For each of N designs there are
    d + 2 masks of d cells: one of numbers A, one of numbers B, and for each cell the numbers A with that cell's number
    taken from B. A and B are the two halves of a scrambled Sobol sequence in 2 d dimensions.

    Args:
        num_designs: N, at least 2; a power of 2 fills the space best. The paper takes 32.
        grid_size: cells along each axis, one number or one per axis, at least 1. By default 8 in 2D and 4 in 3D.
        seed: of the scrambling, at least 0. With the same seed, more designs begin with the same masks as fewer.

    Raises:
        ValueError: for settings out of range.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import SobolMasks
        >>> bound = SobolMasks(num_designs=4, grid_size=2).bind(torch.zeros(1, 8, 8))
        >>> len(bound)  # 4 designs of 2 * 2 + 2 masks
        24
        >>> a, b, first = bound.codes([0, 1, 2])["coalition"]
        >>> bool(first[0] == b[0]), bool((first[1:] == a[1:]).all())
        (True, True)
    """

    def __init__(
        self,
        num_designs: int = 32,
        grid_size: int | Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(1, grid_size, seed)
        self.num_designs = whole_number("num_designs", num_designs, 2)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundRegionMasks:
        return BoundSobolMasks(self, image, self._cells(image))


class BoundSobolMasks(BoundRegionMasks):
    """The design of one image."""

    def __init__(self, masks: SobolMasks, image: Tensor, cells: Regions) -> None:
        super().__init__(masks, image, cells)
        self.num_designs, count = masks.num_designs, len(self.values)
        self.num_masks = self.num_designs * (count + 2)
        engine = torch.quasirandom.SobolEngine(2 * count, scramble=True, seed=masks.seed)
        self.table = engine.draw(self.num_designs, dtype=torch.float64).numpy().reshape(-1, 2, count)
        self.key = (*self.key, self.num_designs)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``coalition`` float64 ``(n, cells)`` in [0, 1], how much of each cell is kept."""
        design, place = np.divmod(np.asarray(ids, dtype=int), len(self.values) + 2)
        kept = self.table[design, (place == 1).astype(int)]
        (exchanged,) = (place > 1).nonzero()
        cell = place[exchanged] - 2
        kept[exchanged, cell] = self.table[design[exchanged], 1, cell]
        return {"coalition": kept}

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        kept = self.codes(ids)["coalition"][:, self._inside(box)]
        # Numbers are equal where their bits are.
        return np.asarray((kept < 1).any(axis=1)), np.ascontiguousarray(kept).view(np.int64)
