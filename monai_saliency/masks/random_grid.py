"""Random smooth masks whose cells have one size in voxels or mm, whatever the image's size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.rise import BoundRISEMasks
from monai_saliency.utils.arguments import (
    check_option,
    per_axis,
    positive_numbers,
    probability,
    voxels_of_mm,
    whole_number,
    whole_numbers,
)

__all__ = ["RandomGridMasks"]


class RandomGridMasks(Masks):
    """Random smooth masks with cells of one size, in 2D and 3D (xaitk-saliency's ``RandomGrid``).

    A small random grid is stretched linearly as in :class:`~monai_saliency.RISEMasks`, but a cell has a size, not the
    grid. Along an axis of n voxels a grid of cells of c voxels has ``g = ceil(n / c) + 1`` cells, and the image is
    taken from its middle, moved at random by ``t`` with ``-floor(c / 2) <= t < floor(c / 2)``:
    ``M(v) = stretched(v + floor((g * c - n) / 2) + t)``. In 2D the masks equal those of ``RandomGrid`` for the same
    seed and ``threads=0``.

    Args:
        num_masks: number of masks, at least 1.
        cell_size: edge of a cell in ``unit``, one number or one per axis; by default an eighth of each axis of the
            image, in whole voxels, rounded up.
        p1: probability in [0, 1] that a cell is kept.
        seed: seed of all draws, at least 0. With the same seed, more masks begin with the same masks as fewer.
        unit: unit of ``cell_size``, ``"voxel"`` or ``"mm"``; mm are rounded to whole voxels, at least one.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when ``cell_size`` has not one number per axis, or is
            in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> from monai_saliency import RandomGridMasks
        >>> masks = RandomGridMasks(num_masks=100, cell_size=(8, 8, 4))
        >>> masks.bind(torch.zeros(1, 32, 30, 16)).codes([0])["grid"].shape
        (1, 5, 5, 5)
    """

    shorter = "a smaller num_masks, whose map has more noise"

    def __init__(
        self,
        num_masks: int,
        cell_size: float | Sequence[float] | None = None,
        p1: float = 0.5,
        seed: int = 0,
        unit: str = "voxel",
    ) -> None:
        self.unit = check_option("unit", unit, ("voxel", "mm"))
        self.num_masks = whole_number("num_masks", num_masks, 1)
        if cell_size is None and unit == "mm":
            raise ValueError("`unit` 'mm' needs a `cell_size`: the default, an eighth of each axis, is in voxels")
        if cell_size is not None and unit == "mm":
            positive_numbers("cell_size", cell_size)
        elif cell_size is not None:
            whole_numbers("cell_size", cell_size, 1)
        probability("p1", p1)
        self.cell_size = cell_size
        self.p1 = float(p1)
        self.seed = whole_number("seed", seed, 0)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundRandomGridMasks(self, image, spacing)


class _BoundRandomGridMasks(BoundRISEMasks):
    def __init__(self, masks: RandomGridMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        BoundMasks.__init__(self, image)
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        sizes = [-(-n // 8) for n in self.spatial_shape] if masks.cell_size is None else masks.cell_size
        cell = per_axis("cell_size", sizes, self.spatial_shape)
        self.cell_shape = voxels_of_mm(cell, spacing) if masks.unit == "mm" else cell
        sides = list(zip(self.spatial_shape, self.cell_shape, strict=True))
        self.grid_shape = tuple(-(-n // c) + 1 for n, c in sides)
        self.stretched_shape = tuple(g * c for g, c in zip(self.grid_shape, self.cell_shape, strict=True))
        self.key = ("RandomGridMasks", self.seed, self.p1, self.num_masks, self.cell_shape, self.spatial_shape)
        half = np.array(self.cell_shape) // 2
        moved = np.flatnonzero(half)[::-1]  # the last axis is drawn first, and one without a choice is not drawn
        shifts = np.zeros((self.num_masks, len(half)), dtype=np.int64)
        shifts[:, moved] = np.random.default_rng(self.seed).integers(
            -half[moved], half[moved], size=(self.num_masks, len(moved))
        )
        self.shifts = shifts + (np.array(self.stretched_shape) - np.array(self.spatial_shape)) // 2
        self._weights: dict[torch.device, list[torch.Tensor]] = {}
