"""Random smooth masks: small random grids, stretched to the image (RISE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks, random_rows
from monai_saliency.utils.arguments import (
    check_option,
    per_axis,
    positive_numbers,
    probability,
    voxels_of_mm,
    whole_number,
    whole_numbers,
)
from monai_saliency.utils.tensors import to_device

__all__ = [
    "BoundRISEMasks",
    "RISEMasks",
    "RandomGridMasks",
]


class RISEMasks(Masks):
    """Random smooth masks of RISE (Petsiuk et al., BMVC 2018, section 3.2), in 2D and 3D.

    A mask starts as a small grid of cells, each kept with probability ``p1``. The grid is stretched linearly to
    slightly more than the image, and cropped at a random shift of up to one cell. In 2D the masks equal those of
    xaitk-saliency's ``RISEGrid`` for the same seed and ``threads=0``.

    Args:
        num_masks: number of masks, at least 1.
        grid_size: cells along each axis, one number or one per axis, at least 1.
        p1: probability in [0, 1] that a cell is kept.
        seed: seed of all draws, at least 0. With the same seed, more masks begin with the same masks as fewer.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when ``grid_size`` has not one number per axis.

    Example::

        >>> import torch
        >>> from monai_saliency import RISEMasks
        >>> bound = RISEMasks(num_masks=100, grid_size=4).bind(torch.zeros(1, 32, 32, 16))
        >>> bound.codes(range(100))["grid"].shape
        (100, 4, 4, 4)
        >>> bound.render(range(8)).shape
        torch.Size([8, 1, 32, 32, 16])
    """

    shorter = "a smaller num_masks, whose map has more noise"

    def __init__(self, num_masks: int, grid_size: int | Sequence[int] = 8, p1: float = 0.5, seed: int = 0) -> None:
        num_masks = whole_number("num_masks", num_masks, 1)
        whole_numbers("grid_size", grid_size, 1)
        seed = whole_number("seed", seed, 0)
        probability("p1", p1)
        self.num_masks = num_masks
        self.grid_size = grid_size
        self.p1 = float(p1)
        self.seed = seed

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return BoundRISEMasks(self, image)


class BoundRISEMasks(BoundMasks):
    """The stretched grids of one image."""

    def __init__(self, masks: RISEMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        self.grid_shape = per_axis("grid_size", masks.grid_size, self.spatial_shape)
        self.cell_shape = tuple(-(-n // s) for n, s in zip(self.spatial_shape, self.grid_shape, strict=True))
        self.stretched_shape = tuple((s + 1) * n for s, n in zip(self.grid_shape, self.cell_shape, strict=True))
        self.key = ("RISEMasks", self.seed, self.p1, self.num_masks, self.grid_shape, self.spatial_shape)
        # NumPy cannot jump within a stream of bounded integers, so all shifts are drawn now: a few bytes per mask.
        self.shifts = np.random.default_rng(self.seed).integers(
            0, self.cell_shape, size=(self.num_masks, len(self.cell_shape))
        )
        self._weights: dict[torch.device, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return self.num_masks

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``grid`` bool ``(n, *grid_shape)``, True where a cell is kept, and ``shift`` int ``(n, spatial_dims)``."""
        grids = random_rows(self.seed, ids, int(np.prod(self.grid_shape))) < self.p1
        return {"grid": grids.reshape(-1, *self.grid_shape), "shift": self.shifts[np.asarray(ids, dtype=int)]}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        masks = to_device(codes["grid"], device, self.dtype)
        shifts = to_device(codes["shift"].T, device)
        # For each axis the matrices (n, cells, voxels) that stretch a line of cells, which lie side by side in memory.
        turned = (windows.transpose(1, 2) for windows in self._stretching(device))
        *others, last = (
            each.index_select(0, shift).transpose(1, 2) for each, shift in zip(turned, shifts, strict=True)
        )
        for rows in others:
            # Linear interpolation is separable: the first axis is stretched and becomes the last, so that nothing is
            # ever copied to another order: (n, cells, rest) and (n, cells, size) give (n, rest, size).
            masks = torch.bmm(masks.reshape(*rows.shape[:2], -1).transpose(1, 2), rows)
        # Stretching the last axis last makes the full-size masks contiguous without a copy.
        stretched = masks.reshape(*last.shape[:2], -1)
        return torch.bmm(stretched.transpose(1, 2), last).view(-1, 1, *self.spatial_shape)

    def _stretching(self, device: torch.device) -> list[torch.Tensor]:
        """For each axis the matrices that stretch a line of cells along it, one a shift: ``(shifts, cells, size)``."""
        if device not in self._weights:
            sides = zip(self.grid_shape, self.stretched_shape, self.spatial_shape, strict=True)
            self._weights[device] = [
                _stretch_weights(cells, stretched, self.dtype).to(device).unfold(0, size, 1)
                for cells, stretched, size in sides
            ]
        return self._weights[device]


def _stretch_weights(cells: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Matrix ``(size, cells)`` that stretches a line of cells linearly."""
    position = (torch.arange(size, dtype=torch.float64) + 0.5) * cells / size - 0.5
    lower = position.floor().long()
    above = position - lower
    # Only the larger weight is rounded, and the smaller one is exactly the rest of 1. So no mask rounds to above 1.
    larger = torch.maximum(above, 1 - above).to(dtype)
    upper = torch.where(above >= 0.5, larger, 1 - larger)
    weights = torch.zeros(size, cells, dtype=dtype)
    for offset, weight in ((0, 1 - upper), (1, upper)):
        cell = (lower + offset).abs()
        if cells == 1:
            cell = torch.zeros_like(cell)
        cell = torch.where(cell >= cells, 2 * (cells - 1) - cell, cell).clamp_min(0)
        weights.scatter_add_(1, cell[:, None], weight[:, None])
    return weights


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
