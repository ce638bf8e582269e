"""Where an image is perturbed: masks that are 1 where the image is kept and 0 where it is replaced.

A mask generator holds the user's settings only. :meth:`Masks.bind` fits it to one image and gives
:class:`BoundMasks`, which draws the small *codes* of its masks on the CPU and renders full-size masks from them,
a few at a time, on any device. Mask ``i`` depends on the seed, ``i`` and the spatial shape, and on nothing else, so
any division of the work over batches, workers or ranks perturbs the image in the same ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monai_saliency.utils.boxes import Box
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic

__all__ = ["BoundMasks", "Masks"]


class Masks(ABC):
    """Settings of a family of masks.

    Attributes:
        by_region: whether masks hide whole regions, so that a map is flat in each region.
        needs_labels: whether these are the regions of the case's label map, which :meth:`bind` needs then.
    """

    by_region: bool = False
    needs_labels: bool = False

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


@dataclass(frozen=True)
class Regions:
    """The regions of one image.

    Attributes:
        values: the regions' labels, ascending.
        index: int32 ``(*spatial)``: each voxel's place in ``values``, counted from 1; 0 where it is in no region.
    """

    values: list[int]
    index: torch.Tensor


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
    def regions(self) -> Regions | None:
        """The regions that masks hide as a whole; None for masks of other kinds."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """The number of masks: for masks in rounds, of all that could be asked for."""

    def next_round(
        self, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[int] | None:
        """The masks to score next, now that all masks of the earlier rounds are scored.

        By default there is one round with every mask. Override this for masks that depend on earlier scores, such as
        windows that are refined where the score fell. It is asked at the end of each round and nowhere else, and must
        be a pure function of its arguments: then every worker, and every resumed run, asks for the same masks.

        Args:
            indices: the masks scored so far, in order. Empty when the first round is asked for.
            scores: ``(len(indices), K)``, their scores. ``(0, 0)`` for the first round, which no score decides.
            reference_scores: ``(K,)``, the scores of the unperturbed image. ``(0,)`` for the first round.

        Returns:
            indices of masks that were not scored before, at least one; None when there are no more.
        """
        return None if len(indices) else range(len(self))

    @property
    def in_rounds(self) -> bool:
        """Whether later masks depend on earlier scores."""
        return type(self).next_round is not BoundMasks.next_round

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


def random_rows(seed: int, indices: Sequence[int], width: int) -> np.ndarray:
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
