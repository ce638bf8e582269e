"""The perturbed images of one case: ``mask * image + (1 - mask) * fill``, written row by row into a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from monai_saliency.inferers.case_search import CaseSearch
from monai_saliency.masks.base import BoundMasks, Ids
from monai_saliency.utils.tensors import Box, everywhere, finite_between

#: the row with the whole image replaced by the fill
HIDDEN = -1

# Values of masks, and of fills that depend on the mask, that are made at once, and the most masks without such fills.
_VALUES, _VALUES_ON_GPU, _MASKS = 2**22, 2**25, 64


class Perturbation:
    """Writes the rows of one case. Row 0 is the unperturbed image, row i + 1 the i-th mask that was asked for. The row
    :data:`HIDDEN` has everything hidden; it belongs to no round.

    Args:
        image: ``(C, *spatial)``.
        held: what the network takes beside the image and no mask changes, ``(H, *spatial)``.
        fill: ``(C, *spatial)``; where the fill depends on the mask, of a mask that hides everything.
        fill_of: makes fills ``(n, C, *spatial)`` of the image ``(1, C, *spatial)`` and masks, where they depend on
            these; else None.
        search: the masks.
        part: the voxels that masks may hide, bool ``(1, *spatial)``; None for all. Masks are 1 everywhere else.
    """

    def __init__(
        self,
        image: Tensor,
        held: Tensor,
        fill: Tensor,
        fill_of: Callable[[Tensor, Tensor], Tensor] | None,
        search: CaseSearch,
        part: Tensor | None = None,
    ) -> None:
        if part is not None:
            whole = fill if fill_of is None else fill_of(image[None], (~part)[None].to(image))[0].to(image)
            fill = torch.where(part, whole, image)
        self.image, self.held, self.fill, self.fill_of = image, held, fill, fill_of
        self.search, self.part = search, part
        self.is_finite = finite_between(fill, image)  # whether each voxel has a finite distance to its fill
        self._group: tuple[int, Tensor, Tensor] | None = None  # the first row, the masks and the fills of a group

    @property
    def masks(self) -> BoundMasks:
        return self.search.masks

    def ids(self, start: int, stop: int) -> Ids:
        """The masks of rows [start, stop), all behind row 0."""
        return self.search.ids[start - 1 : stop - 1]

    def hidden_numbers(self, start: int, stop: int) -> np.ndarray:
        """Which numbers of the case rows [start, stop) hide, bool ``(rows, numbers)``."""
        first = np.full((int(start <= 0), len(self.masks.numbers)), start == HIDDEN)
        return np.concatenate([first, self.masks.hidden_numbers(self.ids(max(start, 1), max(stop, 1)))])

    def unperturbed(self) -> Tensor:
        """The image as the network gets it, ``(1, C + H, *spatial)``."""
        return torch.cat([self.image, self.held])[None]

    def inside(self, images: Tensor) -> Tensor:
        """Changed images ``(n, C, *spatial)`` with the unperturbed image outside of the part."""
        return images if self.part is None else torch.where(self.part, images, self.image)

    def write(self, start: int, stop: int, out: Tensor, box: Box | None = None) -> None:
        """Write rows [start, stop), or their part inside a box, to ``out``, ``(rows, C + H, *spatial)``."""
        image, fill, held = self.image, self.fill, self.held
        if box is not None:
            image, fill, held = image[everywhere(box)], fill[everywhere(box)], held[everywhere(box)]
        if len(held):
            out[:, len(image) :] = held
            out = out[:, : len(image)]
        if start <= 0:
            out[0] = fill if start == HIDDEN else image
            start, out = 1, out[1:]
        if start >= stop:
            return
        if box is not None:
            self.masks.perturb(image, fill, self._rendered(start, stop, box), self.is_finite, out, box)
            return
        for first, masks, fills in self._masks_and_fills(start, stop):
            self.masks.perturb(image, fills, masks, self.is_finite, out[first - start : first - start + len(masks)])

    def _rendered(self, start: int, stop: int, box: Box | None = None) -> Tensor:
        ids = self.ids(start, stop)
        # Foreign masks need not know boxes.
        masks = self.masks.render(ids) if box is None else self.masks.render(ids, box=box)
        if self.part is not None:
            masks = torch.where(self.part if box is None else self.part[everywhere(box)], masks, 1.0)
        return masks.to(self.image.dtype)

    def _masks_and_fills(self, start: int, stop: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The first row, the masks and the fills ``(n, C, *spatial)`` of some rows each, which together are the rows
        [start, stop) of a round. They are made in groups at fixed places of the round (law 7).
        """
        size = max(1, (_VALUES_ON_GPU if self.image.is_cuda else _VALUES) // self.image.numel())
        if self.fill_of is None:
            size = min(size, _MASKS)
        ends = [1, *(end + 1 for end in self.search.ends)]
        begin, end = next(rows for rows in pairwise(ends) if start < rows[1])
        for first in range(start - (start - begin) % size, stop, size):
            if self._group is None or self._group[0] != first:
                self._group = first, *self._made(first, min(first + size, end))
            rows = slice(max(start - first, 0), stop - first)
            yield max(start, first), self._group[1][rows], self._group[2][rows]
        if stop == end:
            self._group = None

    def _made(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The masks and fills of a group of rows [start, stop)."""
        masks = self._rendered(start, stop)
        fills = self.fill
        if self.fill_of is not None:
            fills = self.fill_of(self.image[None], self.masks.kept_share(masks)).to(self.image)
        return masks, fills.expand(len(masks), *self.image.shape)
