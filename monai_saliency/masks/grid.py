"""Random grids with crisp cells: each cell is kept or hidden as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks, random_rows
from monai_saliency.masks.region import BoundRegionMasks, RegionMasks
from monai_saliency.utils.arguments import per_axis, probability, whole_number, whole_numbers

__all__ = [
    "BoundSubsetMasks",
    "GridMasks",
    "SubsetMasks",
]


class GridMasks(Masks):
    """Random grids with crisp cells, in 2D and 3D: each cell is kept with probability ``p1``.

    Voxel v of an axis of n voxels lies in cell ``v * grid_size // n``, so the cells of an axis differ by one voxel at
    most. Along an axis with fewer voxels than ``grid_size`` each voxel is a cell. There are no ramps and no shift: a
    cell is one yes or no, which :class:`~monai_saliency.HSICScoring` reads.

    Args:
        num_masks: number of masks, at least 1.
        grid_size: cells along each axis, one number or one per axis, at least 1.
        p1: probability in [0, 1] that a cell is kept.
        seed: seed of all draws, at least 0. With the same seed, more masks begin with the same masks as fewer.
        regions: makes regions to keep or hide instead of cells, such as ``Supervoxels(200)``: a function of an image
            ``(C, *spatial)`` and its voxel sizes that gives a label map ``(1, *spatial)``. The masks are those of
            :class:`~monai_saliency.RegionMasks`.
        by_label: keep or hide the regions of the case's label map instead of cells.

    Raises:
        ValueError: for settings out of range, for both ``regions`` and ``by_label``, and (from ``bind``) when
            ``grid_size`` has not one number per axis, or as for :class:`~monai_saliency.RegionMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency import GridMasks
        >>> bound = GridMasks(num_masks=100, grid_size=2).bind(torch.zeros(1, 1, 5))
        >>> bound.index.tolist()  # the cell of each voxel, counted from 1
        [[1, 1, 1, 2, 2]]
        >>> bound.codes([0])["coalition"].tolist(), bound.render([0])[0, 0].tolist()
        ([[False, True]], [[0.0, 0.0, 0.0, 1.0, 1.0]])
    """

    by_region = True
    shorter = "a smaller num_masks, whose map has more noise"

    def __init__(
        self,
        num_masks: int,
        grid_size: int | Sequence[int] = 8,
        p1: float = 0.5,
        seed: int = 0,
        regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
        by_label: bool = False,
    ) -> None:
        whole_numbers("grid_size", grid_size, 1)
        probability("p1", p1)
        self.num_masks = whole_number("num_masks", num_masks, 1)
        self.grid_size = grid_size
        self.p1 = float(p1)
        self.seed = whole_number("seed", seed, 0)
        if by_label and regions is not None:
            raise ValueError("give `regions` or `by_label`, not both: each says which regions are hidden")
        by_region = by_label or regions is not None
        self.instead = RegionMasks(num_masks, p1, seed, regions) if by_region else None
        self.needs_labels = bool(by_label)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundRegionMasks:
        return _BoundGridMasks(self, image) if self.instead is None else self.instead.bind(image, labels, spacing)


class _BoundGridMasks(BoundRegionMasks):
    """The grids of one image. A cell is a region, numbered from 1; the last axis changes fastest."""

    def __init__(self, masks: GridMasks, image: torch.Tensor) -> None:
        # Its label map is made here, so that it need not be checked and sorted as one that a user gives.
        BoundMasks.__init__(self, image)
        wanted = per_axis("grid_size", masks.grid_size, self.spatial_shape)
        self.grid_shape = tuple(min(cells, size) for cells, size in zip(wanted, self.spatial_shape, strict=True))
        self.values = list(range(1, int(np.prod(self.grid_shape)) + 1))
        self.index = torch.ones((), dtype=torch.int32, device=self.device)
        for axis, (cells, size) in enumerate(zip(self.grid_shape, self.spatial_shape, strict=True)):
            along = torch.arange(size, device=self.device) * cells // size
            step = int(np.prod(self.grid_shape[axis + 1 :]))
            shape = [-1 if a == axis else 1 for a in range(len(self.spatial_shape))]
            self.index = self.index + (along * step).to(torch.int32).reshape(shape)
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        self.key = ("GridMasks", self.seed, self.p1, self.num_masks, self.grid_shape, self.spatial_shape)


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
        cells = _BoundGridMasks(GridMasks(1, masks.grid_size), image)
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
