"""Random smooth masks: small random grids, stretched to the image (RISE), with one fill or several (MC-RISE)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, Masks, Spacing, random_rows
from monai_saliency.masks.sizes import check_sizes, check_unit, in_voxels
from monai_saliency.utils.arguments import instance, per_axis, probability, whole_number, whole_numbers
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic
from monai_saliency.utils.tensors import Box, blend, everywhere, to_device

# Masks that are looked at together, and those of them that are stretched and added at once.
TOGETHER, _AT_ONCE = 256, 16


class RISEMasks(Masks):
    """Random smooth masks of RISE (Petsiuk et al., BMVC 2018, section 3.2), in 2D and 3D.

    A mask starts as a small grid of cells, each kept with probability ``p1``. The grid is stretched linearly to
    slightly more than the image, and cropped at a random shift of up to one cell. In 2D the masks equal
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
        >>> from monai_saliency.masks import RISEMasks
        >>> bound = RISEMasks(num_masks=100, grid_size=4).bind(torch.zeros(1, 32, 32, 16))
        >>> bound.codes(range(100))["grid"].shape
        (100, 4, 4, 4)
        >>> bound.render(range(8)).shape
        torch.Size([8, 1, 32, 32, 16])
    """

    def __init__(self, num_masks: int, grid_size: int | Sequence[int] = 8, p1: float = 0.5, seed: int = 0) -> None:
        self.num_masks = whole_number("num_masks", num_masks, 1)
        whole_numbers("grid_size", grid_size, 1)
        self.grid_size = grid_size
        self.p1 = probability("p1", p1)
        self.seed = whole_number("seed", seed, 0)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return BoundRISEMasks(self, image)


class BoundRISEMasks(BoundMasks):
    """The stretched grids of one image."""

    def __init__(self, masks: RISEMasks, image: Tensor) -> None:
        super().__init__(image)
        grid = per_axis("grid_size", masks.grid_size, len(self.spatial_shape))
        self._cut(masks, grid, tuple(-(-n // s) for n, s in zip(self.spatial_shape, grid, strict=True)), 1)
        self.key = ("RISEMasks", self.seed, self.p1, self.num_masks, grid, self.spatial_shape)
        # NumPy cannot jump within a stream of bounded integers, so all shifts are drawn now: a few bytes per mask.
        size = (self.num_masks, len(grid))
        self.shifts = np.random.default_rng(self.seed).integers(0, self.cell_shape, size=size)

    def _cut(
        self, masks: RISEMasks | RandomGridMasks, grid: tuple[int, ...], cell: tuple[int, ...], beyond: int
    ) -> None:
        """Take over settings, and how large grids and cells are; a grid is stretched to some cells more."""
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        self.grid_shape, self.cell_shape = grid, cell
        self.stretched_shape = tuple((s + beyond) * n for s, n in zip(grid, cell, strict=True))
        self._weights: dict[torch.device, list[Tensor]] = {}

    def __len__(self) -> int:
        return self.num_masks

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``grid`` bool ``(n, *grid_shape)``, True where a cell is kept, and ``shift`` int ``(n, spatial_dims)``."""
        grids = random_rows(self.seed, ids, int(np.prod(self.grid_shape))) < self.p1
        return {"grid": grids.reshape(-1, *self.grid_shape), "shift": self.shifts[np.asarray(ids, dtype=int)]}

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        matrices = [stretching[..., side] for stretching, side in zip(self._stretching(device), box, strict=True)]
        masks, last = self._before_last_axis(codes, device, matrices)
        # Stretching the last axis last makes the masks contiguous without a copy.
        return torch.bmm(masks.transpose(1, 2), last).view(-1, 1, *(side.stop - side.start for side in box))

    def along_axes(self, ids: Ids, matrices: Sequence[Tensor]) -> Tensor:
        """As for all masks, but the matrices are multiplied by those that stretch, so no mask is rendered."""
        double = accumulation_dtype(self.device)
        with exact_arithmetic(self.device):
            sides = zip(self._stretching(self.device), matrices, strict=True)
            products = [stretching.to(double) @ matrix.to(self.device, double) for stretching, matrix in sides]
            masks, last = self._before_last_axis(self.codes(ids), self.device, products)
            return torch.bmm(masks.transpose(1, 2), last).view(-1, 1, *(matrix.shape[1] for matrix in matrices))

    def _before_last_axis(
        self, codes: dict[str, np.ndarray], device: torch.device, matrices: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Grids of cells, multiplied along all axes but the last by the matrix ``(cells, columns)`` of their shift:
        ``(n, cells, rest)``, and the matrices of the last axis ``(n, cells, columns)``.
        """
        masks = to_device(codes["grid"], device, matrices[0].dtype)
        shifts = to_device(codes["shift"].T, device)
        # Rows of cells lie side by side in memory.
        *others, last = (
            matrix.transpose(1, 2).index_select(0, shift).transpose(1, 2)
            for matrix, shift in zip(matrices, shifts, strict=True)
        )
        for rows in others:
            # The first axis is multiplied and becomes the last, so that nothing is ever copied to another order:
            # (n, cells, rest) and (n, cells, columns) give (n, rest, columns).
            masks = torch.bmm(masks.reshape(*rows.shape[:2], -1).transpose(1, 2), rows)
        return masks.reshape(*last.shape[:2], -1), last

    def weighted_sum(self, ids: Ids, weights: Tensor) -> Tensor:
        """As for all masks, but masks of one shift are added before they are stretched along the last axis. On a GPU
        the few large products of all masks are faster than these many small ones.
        """
        if self.device.type == "cuda":
            return super().weighted_sum(ids, weights)
        sums, weights = self.zero_sums(weights), weights.to(self.device, self.dtype)
        with exact_arithmetic(self.device):
            for rows, masks, last in self._alike(ids):
                sums += (_added(weights[rows], masks) @ last).reshape(sums.shape)
        return sums

    def moments(self, ids: Ids, first: Tensor, second: Tensor, origin: float) -> tuple[Tensor, Tensor]:
        """As for all masks, but squares too are added before they are stretched: a voxel lies between two cells, a and
        b with shares s and t, so its square is ``s^2 a^2 + t^2 b^2 + 2 s t a b``.
        """
        if self.device.type == "cuda":
            return super().moments(ids, first, second, origin)
        sums = self.zero_sums(first), self.zero_sums(second)
        first, second = first.to(self.device, self.dtype), second.to(self.device, self.dtype)
        with exact_arithmetic(self.device):
            for rows, masks, last in self._alike(ids):
                masks = masks - origin
                sums[0].add_((_added(first[rows], masks) @ last).reshape(sums[0].shape))
                squares = _added(second[rows], masks.square()) @ last.square()
                squares += _added(second[rows], masks[:, 1:] * masks[:, :-1]) @ (2 * last[1:] * last[:-1])
                sums[1].add_(squares.reshape(sums[1].shape))
        return sums

    def _alike(self, ids: Ids) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """Rows of masks of one shift along the last axis, these masks stretched along the other axes
        ``(n, cells, rest)``, and the matrix ``(cells, size)`` that stretches them along the last one.
        """
        for start in range(0, len(ids), TOGETHER):
            codes = self.codes(ids[start : start + TOGETHER])
            shifts = codes["shift"][:, -1]
            alike = [np.flatnonzero(shifts == shift) for shift in np.unique(shifts)]
            for rows in (each[at : at + _AT_ONCE] for each in alike for at in range(0, len(each), _AT_ONCE)):
                some = {name: codes[name][rows] for name in codes}
                masks, last = self._before_last_axis(some, self.device, self._stretching(self.device))
                yield start + rows, masks, last[0]

    def _stretching(self, device: torch.device) -> list[Tensor]:
        """For each axis the matrices that stretch a line of cells along it, one a shift: ``(shifts, cells, size)``."""
        if device not in self._weights:
            sides = zip(self.grid_shape, self.stretched_shape, self.spatial_shape, strict=True)
            self._weights[device] = [
                to_device(_stretch_weights(cells, stretched, self.dtype).numpy(), device).unfold(0, size, 1)
                for cells, stretched, size in sides
            ]
        return self._weights[device]


def _added(weights: Tensor, masks: Tensor) -> Tensor:
    """Masks ``(n, cells, rest)``, multiplied by weights ``(n, K)`` and added: ``(K, rest, cells)``."""
    return torch.tensordot(weights.T, masks, dims=1).transpose(1, 2)


def _stretch_weights(cells: int, size: int, dtype: torch.dtype) -> Tensor:
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
        cell = torch.where(cell >= cells, 2 * (cells - 1) - cell, cell).clamp_min(0)  # of one cell, always 0
        weights.scatter_add_(1, cell[:, None], weight[:, None])
    return weights


class RandomGridMasks(Masks):
    """Random smooth masks with cells of one size, in 2D and 3D (xaitk-saliency's ``RandomGrid``).

    A random grid is stretched linearly as in ``RISEMasks``, but a cell has a size, not the grid.
    Along an axis of n voxels a grid of cells of c voxels has ``g = ceil(n / c) + 1`` cells, and the image is
    taken from its middle, moved at random by ``t`` with ``-floor(c / 2) <= t < floor(c / 2)``:
    ``M(v) = stretched(v + floor((g * c - n) / 2) + t)``. In 2D the masks equal ``RandomGrid``'s for the same
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
        >>> from monai_saliency.masks import RandomGridMasks
        >>> masks = RandomGridMasks(num_masks=100, cell_size=(8, 8, 4))
        >>> masks.bind(torch.zeros(1, 32, 30, 16)).codes([0])["grid"].shape
        (1, 5, 5, 5)
    """

    def __init__(
        self,
        num_masks: int,
        cell_size: float | Sequence[float] | None = None,
        p1: float = 0.5,
        seed: int = 0,
        unit: str = "voxel",
    ) -> None:
        self.unit = check_unit(unit, "cell_size", cell_size)
        check_sizes(unit, cell_size=cell_size)
        self.num_masks = whole_number("num_masks", num_masks, 1)
        self.cell_size = cell_size
        self.p1 = probability("p1", p1)
        self.seed = whole_number("seed", seed, 0)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return _BoundRandomGridMasks(self, image, spacing)


class _BoundRandomGridMasks(BoundRISEMasks):
    def __init__(self, masks: RandomGridMasks, image: Tensor, spacing: Spacing) -> None:
        BoundMasks.__init__(self, image)
        shape = self.spatial_shape
        sizes = [-(-n // 8) for n in shape] if masks.cell_size is None else masks.cell_size
        cell = in_voxels("cell_size", sizes, masks.unit, shape, spacing)
        self._cut(masks, tuple(-(-n // c) + 1 for n, c in zip(shape, cell, strict=True)), cell, 0)
        self.key = ("RandomGridMasks", self.seed, self.p1, self.num_masks, cell, shape)
        half = np.array(cell) // 2
        moved = np.flatnonzero(half)[::-1]  # the last axis is drawn first, and one without a choice is not drawn
        shifts = np.zeros((self.num_masks, len(half)), dtype=np.int64)
        size = (self.num_masks, len(moved))
        shifts[:, moved] = np.random.default_rng(self.seed).integers(-half[moved], half[moved], size=size)
        self.shifts = shifts + (np.array(self.stretched_shape) - np.array(shape)) // 2


class MCRISEMasks(RISEMasks):
    """Random smooth masks of MC-RISE (Hatakeyama et al., ACCV 2020, section 3), in 2D and 3D: each hidden cell draws
    one of K fills.

    Cells are kept with probability ``p1`` and shifted as in :class:`~monai_saliency.masks.RISEMasks`. Each fill k has
    its own mask M_k, 0 where it replaces the voxel and 1 elsewhere. So a rendered mask is ``(K, *spatial)``, and the
    perturbed image is ``(1 - sum_k (1 - M_k)) * image + sum_k (1 - M_k) * fill_k``. Fill 0 is the case's own. In 2D the
    masks equal xaitk-saliency's ``MCRISEGrid`` for the same seed and ``threads=0``. Another number of masks
    draws other fills for the same cells.

    Use with :class:`~monai_saliency.estimators.MCRISEScoring` or :class:`~monai_saliency.estimators.OcclusionScoring`.

    Args:
        num_masks: as for :class:`~monai_saliency.masks.RISEMasks`.
        grid_size: as for :class:`~monai_saliency.masks.RISEMasks`.
        p1: as for :class:`~monai_saliency.masks.RISEMasks`.
        seed: as for :class:`~monai_saliency.masks.RISEMasks`.
        more_fills: further fills, each a function of images ``(B, C, *spatial)`` such as ``ConstantFill(1.0)`` or
            ``BlurFill()``. A fill that needs the case or the mask can only be fill 0.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for ``RISEMasks``, or when a
            fill does not give an image of the same shape.

    Example::

        >>> import torch
        >>> from monai_saliency import ConstantFill
        >>> from monai_saliency.masks import MCRISEMasks
        >>> bound = MCRISEMasks(100, [ConstantFill(1.0), ConstantFill(2.0)], grid_size=4).bind(torch.zeros(1, 16, 16))
        >>> bound.render(range(100)).shape
        torch.Size([100, 3, 16, 16])
    """

    def __init__(
        self,
        num_masks: int,
        more_fills: Sequence[Callable[[Tensor], Tensor]],
        grid_size: int | Sequence[int] = 8,
        p1: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(num_masks, grid_size, p1, seed)
        instance("more_fills", more_fills, (list, tuple), "a list of fills such as [ConstantFill(1.0)]")
        words = "functions of images such as ConstantFill(1.0); one that needs the case's file is the `fill`"
        self.more_fills = [instance("more_fills", each, (), words, function=True) for each in more_fills]

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return _BoundMCRISEMasks(self, image)


class _BoundMCRISEMasks(BoundRISEMasks):
    layer = "fill"
    weighted_sum, moments, along_axes = BoundMasks.weighted_sum, BoundMasks.moments, BoundMasks.along_axes

    def __init__(self, masks: MCRISEMasks, image: Tensor) -> None:
        super().__init__(masks, image)
        self.more_fills = [each(image[None])[0].to(image) for each in masks.more_fills]
        self.channels: int = 1 + len(self.more_fills)
        self.key = ("MCRISEMasks", self.channels, *self.key)
        # The fill of each cell where it is hidden. They are drawn behind all grids, so all at once: a byte each.
        size = (self.num_masks, int(np.prod(self.grid_shape)))
        stream = np.random.PCG64(self.seed).advance(size[0] * size[1])
        self.drawn_fills = np.random.Generator(stream).integers(0, self.channels, size=size).astype(np.uint8)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``grid`` bool ``(n, K, *grid_shape)``, False where the fill replaces a cell, and ``shift`` as RISE."""
        codes = super().codes(ids)
        drawn = self.drawn_fills[np.asarray(ids, dtype=int)].reshape(-1, 1, *self.grid_shape)
        fills = np.arange(self.channels).reshape(-1, *[1] * len(self.grid_shape))
        return codes | {"grid": codes["grid"][:, None] | (drawn != fills)}

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        grids = codes["grid"].reshape(-1, *self.grid_shape)
        flat = {"grid": grids, "shift": codes["shift"].repeat(self.channels, axis=0)}
        return super()._render_box(flat, box, device).unflatten(0, (-1, self.channels)).squeeze(2)

    def kept_share(self, rendered: Tensor) -> Tensor:
        return (1 - (1 - rendered).sum(dim=1, keepdim=True)).clamp(0, 1)

    def perturb(
        self, image: Tensor, fill: Tensor, rendered: Tensor, is_finite: bool, out: Tensor, box: Box | None = None
    ) -> None:
        fills = [fill, *(each if box is None else each[everywhere(box)] for each in self.more_fills)]
        # What is NaN or infinite counts only where it is kept, or replaces something.
        hidden = 1 - rendered
        total = hidden.sum(dim=1, keepdim=True)
        mixed = torch.zeros((), dtype=out.dtype, device=out.device)
        for share, each in zip(hidden.split(1, dim=1), fills, strict=True):
            mixed = mixed + torch.where(share > 0, share * each.to(out), 0.0)
        blend(torch.where(total > 0, mixed / total, fill), image, (1 - total).clamp(0, 1), False, out=out)
