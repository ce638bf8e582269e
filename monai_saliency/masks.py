"""Where an image is perturbed: masks that are 1 where the image is kept and 0 where it is replaced.

A mask generator holds the user's settings only. :meth:`Masks.bind` fits it to one image and gives
:class:`BoundMasks`, which draws the small *codes* of its masks on the CPU and renders full-size masks from them,
a few at a time, on any device. Mask ``i`` depends on the seed, ``i`` and the spatial shape, and on nothing else, so
any division of the work over batches, workers or ranks perturbs the image in the same ways.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from monai_saliency.utils import (
    Box,
    accumulation_dtype,
    exact_arithmetic,
    per_axis,
    plain,
    positive_numbers,
    voxels_of_mm,
    whole_numbers,
)

__all__ = ["BoundMasks", "Masks", "RISEMasks", "RegionMasks", "SlidingWindowMasks"]


class Masks(ABC):
    """Settings of a family of masks."""

    @abstractmethod
    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        """Fit the masks to one image.

        Args:
            image: ``(C, *spatial)``, 2D or 3D. Its spatial shape, device and precision are read; its voxels only by
                masks that are made of its regions.
            labels: the case's label map ``(1, *spatial)``, for masks that are made of regions.
            spacing: voxel sizes in mm, one per axis, for masks whose sizes are given in mm.

        Raises:
            ValueError: when the masks do not fit the image, or need what is not given.
        """


class BoundMasks(ABC):
    """The masks of one image.

    Attributes:
        spatial_shape: the image's spatial shape.
        device: where :meth:`render` puts masks unless told otherwise.
        dtype: float64 for a float64 image, else float32.
        key: all that decides the masks: equal keys, equal masks.
        channels: how many channels have masks of their own; None where a mask is the same for all of them.
    """

    key: tuple
    channels: int | None = None

    def __init__(self, image: torch.Tensor) -> None:
        self.spatial_shape = tuple(image.shape[1:])
        self.device = image.device
        self.dtype = torch.float64 if image.dtype == torch.float64 else torch.float32

    @property
    def regions(self) -> _BoundRegionMasks | None:
        """The masks of regions that these are made of, which know the regions; None for masks of other kinds."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """The number of masks."""

    @abstractmethod
    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The small descriptions that masks are rendered from, by name, each with one row a mask."""

    @abstractmethod
    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        """Masks ``(n, channels or 1, *spatial)`` in [0, 1] of n codes."""

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        """What :meth:`_render` gives inside a box; masks that can make it without the rest override this."""
        everywhere = (slice(None), slice(None), *box)
        return self._render(codes, device)[everywhere]

    def restrict(self, indices: Sequence[int], box: Box) -> tuple[np.ndarray, np.ndarray] | None:
        """What masks do inside a box, so that work on parts of an image is done once for masks that agree there.

        Args:
            indices: which masks, n of them.
            box: one slice with start and stop for each spatial axis, inside the image.

        Returns:
            bool ``(n,)``, whether a mask hides any voxel of the box, and integers ``(n, width)``, whose rows are equal
            for masks that are equal inside the box, and for no others among those that hide something there. None,
            the default, where nothing is known, or where each mask is another in every box.
        """
        return None

    def hidden_boxes(self, indices: Sequence[int]) -> list[Box] | None:
        """The box that each mask hides whole, keeping all else: one slice with start and stop for each spatial axis.

        None, the default, where masks hide anything else.
        """
        return None

    def render(
        self,
        indices: Sequence[int],
        device: torch.device | str | None = None,
        box: Box | None = None,
    ) -> torch.Tensor:
        """Full-size masks, or their part inside a box.

        Args:
            indices: which masks, each in ``[0, len(self))``; a ``range`` is cheapest.
            device: where to; the bound image's device by default.
            box: one slice with start and stop for each spatial axis; the whole image by default.

        Returns:
            ``(n, 1, *spatial)`` in [0, 1], or ``(n, C, *spatial)`` where channels have masks of their own: 1 where the
            image is kept.

        Raises:
            IndexError: when an index is out of range.
        """
        for index in {min(indices), max(indices)} if len(indices) else ():
            if not 0 <= index < len(self):
                raise IndexError(f"mask indices must be in [0, {len(self)}), got {index}")
        device = torch.device(device) if device is not None else self.device
        if not len(indices):
            shape = self.spatial_shape if box is None else [side.stop - side.start for side in box]
            return torch.zeros(0, self.channels or 1, *shape, dtype=self.dtype, device=device)
        codes = self.codes(indices)
        with exact_arithmetic(device):
            return self._render(codes, device) if box is None else self._render_box(codes, box, device)

    def stream(self, indices: Sequence[int], max_elements: int = 2**23) -> Iterator[tuple[slice, torch.Tensor]]:
        """Render many masks a few at a time.

        The chunks depend on ``indices`` and the spatial shape only, so that sums over them repeat to the bit.

        Args:
            indices: which masks.
            max_elements: the most mask voxels held at a time (one mask at the least).

        Yields:
            the slice of ``indices`` and its masks, as :meth:`render` gives them.
        """
        size = max(1, (self.channels or 1) * int(np.prod(self.spatial_shape)))
        step = int(min(64, max(1, max_elements // size)))
        for start in range(0, len(indices), step):
            chunk = slice(start, min(start + step, len(indices)))
            yield chunk, self.render(indices[chunk])

    def weighted_sum(self, indices: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
        """Masks, each times its weight, summed up a few at a time.

        Sums are exact to the masks' precision a chunk, and in double across chunks.

        Args:
            indices: which masks, n of them.
            weights: ``(n, K)``.

        Returns:
            ``(K, channels or 1, *spatial)``, in double where the device has it.
        """
        sums = self.zero_sums(weights)
        weights = weights.to(self.device, self.dtype)
        with exact_arithmetic(self.device):
            for chunk, masks in self.stream(indices):
                sums += (weights[chunk].T @ masks.flatten(1)).reshape(sums.shape)
        return sums

    def zero_sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Zeros to add masks to, each times its weight: ``(K, channels or 1, *spatial)`` for weights ``(n, K)``, on
        the masks' device, in double where the device has it.
        """
        shape = (weights.shape[1], self.channels or 1, *self.spatial_shape)
        return torch.zeros(shape, dtype=accumulation_dtype(self.device), device=self.device)


class RISEMasks(Masks):
    """Random smooth masks of RISE (Petsiuk et al., BMVC 2018, section 3.2), in 2D and 3D.

    A mask is a small grid of cells, each kept with probability ``p1``, stretched linearly to slightly more than the
    image and cropped at a random shift of up to one cell. Grids and shifts are drawn as xaitk-saliency's ``RISEGrid``
    draws them in 2D at ``threads=0``, where both packages give the same masks for a seed.

    Args:
        num_masks: how many masks.
        grid_size: cells along each axis, one number or one per axis.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws. More masks of one seed continue the fewer.
    """

    def __init__(self, num_masks: int, grid_size: int | Sequence[int] = 8, p1: float = 0.5, seed: int = 0) -> None:
        whole_numbers("num_masks", num_masks, 1)
        whole_numbers("grid_size", grid_size, 1)
        whole_numbers("seed", seed, 0)
        if not 0 <= p1 <= 1:
            raise ValueError(f"`p1` must be in [0, 1], got {p1}")
        self.num_masks = int(num_masks)
        self.grid_size = grid_size
        self.p1 = float(p1)
        self.seed = int(seed)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundRISEMasks(self, image)


class _BoundRISEMasks(BoundMasks):
    def __init__(self, masks: RISEMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        self.grid_shape = per_axis("grid_size", masks.grid_size, self.spatial_shape)
        self.cell_shape = tuple(-(-n // s) for n, s in zip(self.spatial_shape, self.grid_shape, strict=True))
        self.key = ("RISEMasks", self.seed, self.p1, self.num_masks, self.grid_shape, self.spatial_shape)
        # The bounded integers of a stream cannot be reached at random, so all are drawn; they are a few bytes a mask.
        self.shifts = np.random.default_rng(self.seed).integers(
            0, self.cell_shape, size=(self.num_masks, len(self.cell_shape))
        )
        self._weights: dict[torch.device, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return self.num_masks

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """``grid`` bool ``(n, *grid_shape)``, True where a cell is kept, and ``shift`` int ``(n, spatial_dims)``."""
        grids = _random_rows(self.seed, indices, int(np.prod(self.grid_shape))) < self.p1
        return {"grid": grids.reshape(-1, *self.grid_shape), "shift": self.shifts[np.asarray(indices, dtype=int)]}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        stretched, last = self._all_but_last_axis(codes, device)
        # The last axis makes the full-size masks; written last they need no copy to be contiguous.
        return (stretched @ last).reshape(-1, 1, *self.spatial_shape)

    def _all_but_last_axis(
        self, codes: dict[str, np.ndarray], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two factors of n masks: ``(n, voxels of all axes but the last, cells)`` and ``(n, cells, last axis)``."""
        if device not in self._weights:
            # Every window of a matrix is one shift: (shifts, cells, size).
            self._weights[device] = [
                _stretch_weights(cells, cell, self.dtype).to(device).unfold(0, size, 1)
                for cells, cell, size in zip(self.grid_shape, self.cell_shape, self.spatial_shape, strict=True)
            ]
        masks = torch.from_numpy(codes["grid"]).to(device, self.dtype)
        shifts = torch.from_numpy(codes["shift"]).to(device)
        n = len(masks)
        *others, last = (windows[shifts[:, axis]] for axis, windows in enumerate(self._weights[device]))
        for axis, rows in enumerate(others):
            # Linear interpolation is separable: one axis at a time, (n, size, cells) @ (n, cells, rest).
            masks = masks.movedim(axis + 1, 1)
            stretched = rows.transpose(1, 2) @ masks.reshape(n, masks.shape[1], -1)
            masks = stretched.reshape(n, rows.shape[2], *masks.shape[2:]).movedim(1, axis + 1)
        return masks.reshape(n, -1, masks.shape[-1]), last

    def weighted_sum(self, indices: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
        if weights.shape[1] > _FOLDED:
            return super().weighted_sum(indices, weights)
        # A weighted sum of products of two factors is one product of matrices, so that no mask is ever written.
        sums = self.zero_sums(weights)
        voxels = int(np.prod(self.spatial_shape[:-1]))
        step = int(min(64, max(1, 2**23 // (voxels * self.grid_shape[-1]))))
        weights = weights.to(self.device, self.dtype)
        with exact_arithmetic(self.device):
            for start in range(0, len(indices), step):
                chunk = slice(start, min(start + step, len(indices)))
                stretched, last = self._all_but_last_axis(self.codes(indices[chunk]), self.device)
                weighted = last[:, :, None] * weights[chunk, None, :, None]
                product = stretched.transpose(0, 1).flatten(1) @ weighted.flatten(0, 1).flatten(1)
                sums += product.reshape(voxels, -1, self.spatial_shape[-1]).transpose(0, 1).reshape(sums.shape)
        return sums


# With more weights than this, folding them into RISE's last axis costs more than writing the masks.
_FOLDED = 4


def _random_rows(seed: int, indices: Sequence[int], width: int) -> np.ndarray:
    """Rows ``indices`` of the endless table of draws from [0, 1) that ``default_rng(seed).random((n, width))`` begins.

    Returns:
        ``(len(indices), width)``.
    """
    rows = np.empty((len(indices), width))
    if isinstance(indices, range) and indices.step == 1:
        runs = [(0, indices.start, len(indices))]
    else:
        runs = [(row, index, 1) for row, index in enumerate(indices)]
    for row, index, count in runs:
        # One double takes one step of PCG64, so any row of the seed's stream is reached without the earlier ones.
        stream = np.random.PCG64(seed).advance(int(index) * width)
        rows[row : row + count] = np.random.Generator(stream).random((count, width))
    return rows


def _stretch_weights(cells: int, cell_size: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix ``((cells + 1) * cell_size, cells)`` that stretches a line of cells linearly.

    Voxel centres are half-way, and beyond the outer cell centres the line is mirrored without repeating its edge
    cell (scikit-image's ``reflect``), as in ``RISEGrid``.
    """
    size = (cells + 1) * cell_size
    position = (torch.arange(size, dtype=torch.float64) + 0.5) * cells / size - 0.5
    lower = position.floor().long()
    above = position - lower
    # The larger weight is rounded, and the smaller one is what it leaves of 1, exactly. So no mask rounds to above 1.
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


class SlidingWindowMasks(Masks):
    """Windows that slide over the image, each hiding one box (Zeiler and Fergus, ECCV 2014, section 4.2), 2D and 3D.

    Windows start every ``stride`` voxels along each axis, the whole row shifted by half of the last one's overhang
    so that both borders are treated alike, and are cut at the border: the masks of xaitk-saliency's
    ``SlidingWindow``, in its order (the last axis fastest).

    Sizes in mm are for anisotropic scans. On each axis they become the nearest whole number of the image's voxels (half
    a voxel rounds up), and at least one: 20 mm are 20 x 20 x 4 voxels of 1 x 1 x 5 mm.

    Args:
        window_size: the hidden box's edge, one number or one per axis.
        stride: step, one number or one per axis; half of the window by default.
        unit: of both: ``"voxel"`` or ``"mm"``.
    """

    def __init__(
        self,
        window_size: float | Sequence[float],
        stride: float | Sequence[float] | None = None,
        unit: str = "voxel",
    ) -> None:
        if unit not in ("voxel", "mm"):
            raise ValueError(f"`unit` must be 'voxel' or 'mm', got {unit!r}")
        if unit == "mm":
            positive_numbers("window_size", window_size)
            stride = (np.asarray(window_size) / 2).tolist() if stride is None else stride
            positive_numbers("stride", stride)
        else:
            whole_numbers("window_size", window_size, 1)
            stride = np.maximum(1, np.asarray(window_size) // 2).tolist() if stride is None else stride
            whole_numbers("stride", stride, 1)
        self.window_size = window_size
        self.stride = stride
        self.unit = unit

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundSlidingWindowMasks(self, image, spacing)


class _BoundSlidingWindowMasks(BoundMasks):
    def __init__(self, masks: SlidingWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(image)
        window = per_axis("window_size", masks.window_size, self.spatial_shape)
        strides = per_axis("stride", masks.stride, self.spatial_shape)
        if masks.unit == "mm":
            window, strides = voxels_of_mm(window, spacing), voxels_of_mm(strides, spacing)
        self.window_shape = window
        if any(w > n for w, n in zip(self.window_shape, self.spatial_shape, strict=True)):
            raise ValueError(
                f"`window_size` {self.window_shape} is larger than the image's spatial shape {self.spatial_shape}, in "
                "voxels: a window that covers the whole image cannot tell where the evidence lies; use a smaller one"
            )
        self.key = ("SlidingWindowMasks", self.window_shape, strides, self.spatial_shape)
        self.starts = []
        for size, window, stride in zip(self.spatial_shape, self.window_shape, strides, strict=True):
            starts = np.arange(0, size, stride)
            overhang = window - (size - starts[-1])
            self.starts.append(starts - overhang // 2)

    def __len__(self) -> int:
        return int(np.prod([len(starts) for starts in self.starts]))

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """``corner`` int ``(n, spatial_dims)``: each window's first voxel, negative where the border cuts it."""
        along = np.unravel_index(np.asarray(indices, dtype=int), [len(starts) for starts in self.starts])
        return {"corner": np.stack([starts[i] for starts, i in zip(self.starts, along, strict=True)], axis=-1)}

    def hidden_boxes(self, indices: Sequence[int]) -> list[Box]:
        corners = self.codes(indices)["corner"]
        first, last = np.maximum(corners, 0), np.minimum(corners + self.window_shape, self.spatial_shape)
        return [tuple(map(slice, *ends)) for ends in zip(first.tolist(), last.tolist(), strict=True)]

    def restrict(self, indices: Sequence[int], box: Box) -> tuple[np.ndarray, np.ndarray]:
        corners = self.codes(indices)["corner"]
        start, stop = (np.array([getattr(side, end) for side in box]) for end in ("start", "stop"))
        first, last = np.maximum(corners, start), np.minimum(corners + self.window_shape, stop)
        return (first < last).all(axis=1), np.concatenate([first, last], axis=1)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        corners = torch.from_numpy(codes["corner"]).to(device)
        masks = torch.zeros((), dtype=self.dtype, device=device)
        for axis, (side, window) in enumerate(zip(box, self.window_shape, strict=True)):
            offset = torch.arange(side.start, side.stop, device=device) - corners[:, axis, None]
            outside = ((offset < 0) | (offset >= window)).to(self.dtype)
            # A voxel is kept that is outside along any axis. Only the last axis makes full-size masks, in one pass.
            outside = outside.reshape(len(corners), *(-1 if a == axis else 1 for a in range(len(box))))
            masks = torch.maximum(masks, outside)
        return masks.unsqueeze(1)


class RegionMasks(Masks):
    """Masks that hide whole regions: organs, the regions of an atlas, supervoxels. 2D and 3D.

    A region is the voxels of one label other than 0, and label 0 is always kept. A mask is a *coalition*: which regions
    are kept, the others being hidden.

    Args:
        num_masks: how many random coalitions; None for as many masks as there are regions, each hiding one of them.
        p1: probability in [0, 1] that a region is kept in a random coalition.
        seed: of random coalitions. More masks of one seed continue the fewer.
        regions: makes the label map ``(1, *spatial)`` of an image ``(C, *spatial)`` and its voxel sizes in mm (None
            where they are unknown), as :class:`~monai_saliency.Supervoxels` does; by default it is the case's own.
    """

    def __init__(
        self,
        num_masks: int | None = None,
        p1: float = 0.5,
        seed: int = 0,
        regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    ) -> None:
        if num_masks is not None:
            whole_numbers("num_masks", num_masks, 1)
        whole_numbers("seed", seed, 0)
        if not 0 <= p1 <= 1:
            raise ValueError(f"`p1` must be in [0, 1], got {p1}")
        self.num_masks = None if num_masks is None else int(num_masks)
        self.p1 = float(p1)
        self.seed = int(seed)
        self.regions = regions

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        if self.regions is not None:
            labels = self.regions(image, spacing)
        if labels is None:
            raise ValueError(
                "masks of regions need the case's label map: give `labels` (the handler's `label_key`), or `regions`, "
                "which makes one of the image"
            )
        return _BoundRegionMasks(self, image, labels)


class _BoundRegionMasks(BoundMasks):
    """The masks of one label map.

    Attributes:
        values: the regions' labels, ascending.
        index: int32 ``(*spatial)``: each voxel's place in ``values``, counted from 1; 0 where it is always kept.
    """

    def __init__(self, masks: RegionMasks, image: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(image)
        labels = torch.as_tensor(plain(labels))
        if labels.shape not in (self.spatial_shape, (1, *self.spatial_shape)):
            raise ValueError(
                f"the label map has shape {tuple(labels.shape)}, the image needs one of {(1, *self.spatial_shape)}: "
                "take it through the image's own spatial transforms, with nearest-neighbour interpolation"
            )
        labels = labels.to(self.device).reshape(self.spatial_shape)
        if labels.is_floating_point():
            if not bool((labels == labels.round()).all()):
                raise ValueError(
                    "the label map holds values that are no whole numbers: resample it by nearest neighbour"
                )
            labels = labels.long()
        found, place = labels.unique(return_inverse=True)
        hidden = found != 0
        if not bool(hidden.any()):
            raise ValueError("the label map holds no label but 0, so there is no region to hide")
        self.values = found[hidden].tolist()
        self.index = torch.where(hidden, hidden.cumsum(0), 0).to(torch.int32)[place]
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        digest = hashlib.sha256(self.index.cpu().numpy().tobytes()).hexdigest()
        self.key = ("RegionMasks", self.seed, self.p1, self.num_masks, tuple(self.values), digest, self.spatial_shape)

    @property
    def regions(self) -> _BoundRegionMasks:
        return self

    def __len__(self) -> int:
        return self.num_masks or len(self.values)

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """``coalition`` bool ``(n, regions)``, True where a region is kept."""
        if self.num_masks is None:
            return {"coalition": np.asarray(indices, dtype=int)[:, None] != np.arange(len(self.values))}
        return {"coalition": _random_rows(self.seed, indices, len(self.values)) < self.p1}

    def restrict(self, indices: Sequence[int], box: Box) -> tuple[np.ndarray, np.ndarray]:
        present = self.index[box].unique().cpu().numpy()
        hidden = ~self.codes(indices)["coalition"][:, present[present > 0] - 1]
        return np.asarray(hidden.any(axis=1)), np.packbits(hidden, axis=1)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, (slice(None),) * len(self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        coalition = torch.from_numpy(codes["coalition"]).to(device, self.dtype)
        kept = torch.cat([coalition.new_ones(len(coalition), 1), coalition], dim=1)
        index = self.index[box].to(device)
        return kept.index_select(1, index.flatten()).reshape(len(coalition), 1, *index.shape)
