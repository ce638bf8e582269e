"""Random smooth masks: small random grids, stretched to the image (RISE)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks, random_rows
from monai_saliency.utils.arguments import per_axis, probability, whole_number, whole_numbers
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic
from monai_saliency.utils.tensors import to_device

__all__ = ["BoundRISEMasks", "RISEMasks"]


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
    """The stretched grids of one image.

    Attributes:
        grid_shape: cells of a grid along each axis.
        cell_shape: a cell's edges in voxels.
        stretched_shape: a grid's edges in voxels when it is stretched, at least the image's.
        shifts: int ``(num_masks, spatial_dims)``, where the image begins in each stretched grid.
    """

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

    @property
    def _have_factors(self) -> bool:
        """Whether masks are the product of two factors, the last axis and all others; a subclass may render others."""
        return type(self)._render is BoundRISEMasks._render

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        stretched, last = self._all_but_last_axis(codes, self._stretching(device))
        # Stretching the last axis last makes the full-size masks contiguous without a copy.
        return torch.bmm(stretched.transpose(1, 2), last).view(-1, 1, *self.spatial_shape)

    def _all_but_last_axis(
        self, codes: dict[str, np.ndarray], stretching: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two factors of n masks, whose product over the cells of the last axis these are: ``(n, cells, voxels of all
        axes but the last)`` and ``(n, cells, voxels of the last axis)``. The matrices that stretch a line of cells are
        those of :meth:`_stretching`, or lead to other coordinates than voxels.
        """
        masks = to_device(codes["grid"], stretching[0].device, stretching[0].dtype)
        shifts = to_device(codes["shift"].T, masks.device)
        # Cells lie side by side in memory there, so that each matrix is copied in one go.
        turned = (windows.transpose(1, 2) for windows in stretching)
        *others, last = (
            each.index_select(0, shift).transpose(1, 2) for each, shift in zip(turned, shifts, strict=True)
        )
        for rows in others:
            # Linear interpolation is separable: the first axis is stretched and becomes the last, so that nothing is
            # ever copied to another order: (n, cells, rest) and (n, cells, size) give (n, rest, size).
            masks = torch.bmm(masks.reshape(*rows.shape[:2], -1).transpose(1, 2), rows)
        return masks.reshape(*last.shape[:2], -1), last

    def _stretching(self, device: torch.device) -> list[torch.Tensor]:
        """For each axis the matrices that stretch a line of cells along it, one a shift: ``(shifts, cells, size)``."""
        if device not in self._weights:
            self._weights[device] = [
                _stretch_weights(cells, stretched, self.dtype).to(device).unfold(0, size, 1)
                for cells, stretched, size in zip(
                    self.grid_shape, self.stretched_shape, self.spatial_shape, strict=True
                )
            ]
        return self._weights[device]

    def weighted_sum(self, ids: Sequence[Id], weights: torch.Tensor) -> torch.Tensor:
        return self.folded_sum(ids, weights) if self._have_factors else super().weighted_sum(ids, weights)

    def along_axes(self, ids: Sequence[Id], matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self._have_factors or not len(ids):
            return super().along_axes(ids, matrices)
        dtype, axes = accumulation_dtype(self.device), zip(self._stretching(self.device), matrices, strict=True)
        with exact_arithmetic(self.device):
            stretching = [windows.to(dtype) @ each.to(self.device, dtype) for windows, each in axes]
            others, last = self._all_but_last_axis(self.codes(ids), stretching)
            found = torch.bmm(others.transpose(1, 2), last)
        return found.view(len(ids), 1, *(each.shape[1] for each in matrices))

    def folded_sum(self, ids: Sequence[Id], weights: torch.Tensor) -> torch.Tensor:
        """As :meth:`weighted_sum`, for masks that are stretched grids, one for each channel that has its own mask."""
        result, cells = self.zero_sums(weights), self.grid_shape
        if not len(ids):
            return result
        # Masks of one shift are stretched in the same way, so their grids are added up, and the sums of all shifts are
        # stretched: about as many numbers as the image has voxels, however many masks there are.
        shifts = self.shifts[np.asarray(ids, dtype=int)].T
        found, groups = zip(*(np.unique(each, return_inverse=True) for each in shifts), strict=True)
        # On each axis the cells of the first shift, then those of the next.
        lines = [len(each) * count for each, count in zip(found, cells, strict=True)]
        corners = np.ravel_multi_index([group * count for group, count in zip(groups, cells, strict=True)], lines)
        within = np.ravel_multi_index(list(np.indices(cells).reshape(len(cells), -1)), lines)
        places, corners = (to_device(np.asarray(each), self.device) for each in (within, corners))
        stretching = [
            windows[to_device(each, self.device)].to(result.dtype).flatten(0, 1)
            for windows, each in zip(self._stretching(self.device), found, strict=True)
        ]
        weights = weights.to(self.device, result.dtype)
        num_grids = result.shape[1]
        step, together = max(1, _CELLS_AT_ONCE // len(places)), max(1, _SUMS_AT_ONCE // num_grids)
        for maps, columns in zip(result.split(together), weights.split(together, dim=1), strict=True):
            sums = maps.new_zeros(*maps.shape[:2], math.prod(lines))
            for start in range(0, len(ids), step):
                chunk = slice(start, min(start + step, len(ids)))
                grids = to_device(self.codes(ids[chunk])["grid"], self.device, result.dtype)
                grids = grids.view(-1, num_grids, len(places))
                here = (corners[chunk, None] + places).flatten()
                for of_score, weight in zip(sums, columns[chunk].T, strict=True):
                    for total, grid in zip(of_score, grids.unbind(1), strict=True):
                        # One number after the other, so that sums repeat to the bit.
                        total.index_put_((here,), (weight[:, None] * grid).flatten(), accumulate=True)
            with exact_arithmetic(self.device):
                for place, total in zip(maps.flatten(0, 1), sums.flatten(0, 1), strict=True):
                    for rows in stretching:  # the first axis becomes the last
                        total = total.view(len(rows), -1).T @ rows
                    place[:] = total.view(self.spatial_shape)
        return result


# So many cells are added at once: 1 MB of places, and as much of values.
_CELLS_AT_ONCE = 2**17
# So many sums are made of the grids once drawn.
_SUMS_AT_ONCE = 4


def _stretch_weights(cells: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Matrix ``(size, cells)`` that stretches a line of cells linearly.

    Positions are voxel centres. Beyond the outer cell centres the line is mirrored without repeating its edge cell
    (scikit-image's ``reflect``), as in ``RISEGrid``.
    """
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
