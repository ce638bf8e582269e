"""The perturbed images of one case: ``mask * image + (1 - mask) * fill``, written row by row into a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids
from monai_saliency.utils.tensors import Box, everywhere, finite_between


class Whole(Enum):
    """The images of a case that no mask makes, named beside the ids of masks."""

    IMAGE = "the unperturbed image"
    HIDDEN = "the image with everything hidden"


# Values of masks, and of fills that depend on the mask, that are made at once, and the most masks without such fills.
_VALUES, _VALUES_ON_GPU, _MASKS = 2**22, 2**25, 64


class Perturbation:
    """Writes the images of one case: :class:`Whole` ones, and one for each mask.

    Args:
        image: ``(C, *spatial)``.
        held: what the network takes beside the image and no mask changes, ``(H, *spatial)``.
        fill: ``(C, *spatial)``; where the fill depends on the mask, of a mask that hides everything.
        fill_of: makes fills ``(n, C, *spatial)`` of the image ``(1, C, *spatial)`` and masks, where they depend on
            these; else None.
        masks: the case's masks.
        part: the voxels that masks may hide, bool ``(1, *spatial)``; None for all. Masks are 1 everywhere else.
    """

    def __init__(
        self,
        image: Tensor,
        held: Tensor,
        fill: Tensor,
        fill_of: Callable[[Tensor, Tensor], Tensor] | None,
        masks: BoundMasks,
        part: Tensor | None = None,
    ) -> None:
        if part is not None:
            whole = fill if fill_of is None else fill_of(image[None], (~part)[None].to(image))[0].to(image)
            fill = torch.where(part, whole, image)
        self.image, self.held, self.fill, self.fill_of = image, held, fill, fill_of
        self.masks, self.part = masks, part
        self.is_finite = finite_between(fill, image)  # whether each voxel has a finite distance to its fill
        self._group: tuple[Ids, int, Tensor, Tensor] | None = None  # an ask, a place in it, and masks and fills there

    def hidden_numbers(self, ids: Ids) -> np.ndarray:
        """Which numbers of the case some images hide, bool ``(n, numbers)``."""
        whole = [name for name in ids if isinstance(name, Whole)]
        first = np.zeros((len(whole), len(self.masks.numbers)), dtype=bool)
        first[[row for row, name in enumerate(whole) if name is Whole.HIDDEN]] = True
        return np.concatenate([first, self.masks.hidden_numbers(ids[len(whole) :])])

    def unperturbed(self) -> Tensor:
        """The image as the network gets it, ``(1, C + H, *spatial)``."""
        return torch.cat([self.image, self.held])[None]

    def hidden(self) -> Tensor:
        """The same with everything hidden."""
        return torch.cat([self.fill, self.held])[None]

    def inside(self, images: Tensor) -> Tensor:
        """Changed images ``(n, C, *spatial)`` with the unperturbed image outside of the part."""
        return images if self.part is None else torch.where(self.part, images, self.image)

    def write(self, ids: Ids, start: int, stop: int, out: Tensor) -> None:
        """Write the images ``ids[start:stop]`` to ``out``, ``(stop - start, C + H, *spatial)``. The whole ones, if any,
        lead ``ids``.
        """
        if len(self.held):
            out[:, len(self.image) :] = self.held
            out = out[:, : len(self.image)]
        whole = sum(isinstance(name, Whole) for name in ids[:2])
        for place in range(start, min(stop, whole)):
            out[place - start] = self.image if ids[place] is Whole.IMAGE else self.fill
        if stop <= whole:
            return
        for place, masks, fills in self._masks_and_fills(ids, whole, max(start, whole), stop):
            here = out[place - start : place - start + len(masks)]
            self.masks.perturb(self.image, fills, masks, self.is_finite, here)

    def write_box(self, name: object, box: Box, out: Tensor) -> None:
        """Write the part of one image inside a box to ``out``, ``(1, C + H, *spatial)``."""
        image, fill, held = (each[everywhere(box)] for each in (self.image, self.fill, self.held))
        if len(held):
            out[:, len(image) :] = held
            out = out[:, : len(image)]
        if isinstance(name, Whole):
            out[0] = image if name is Whole.IMAGE else fill
            return
        self.masks.perturb(image, fill, self._rendered([name], box), self.is_finite, out, box)

    def _rendered(self, ids: Ids, box: Box | None = None) -> Tensor:
        # Foreign masks need not know boxes.
        masks = self.masks.render(ids) if box is None else self.masks.render(ids, box=box)
        if self.part is not None:
            masks = torch.where(self.part if box is None else self.part[everywhere(box)], masks, 1.0)
        return masks.to(self.image.dtype)

    def _masks_and_fills(self, ids: Ids, first: int, start: int, stop: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """A place in ``ids``, and the masks and the fills ``(n, C, *spatial)`` from there, for some places each, which
        together are [start, stop). They are made in groups at fixed places behind ``first`` (law 7).
        """
        size = max(1, (_VALUES_ON_GPU if self.image.is_cuda else _VALUES) // self.image.numel())
        if self.fill_of is None:
            size = min(size, _MASKS)
        for begin in range(start - (start - first) % size, stop, size):
            if self._group is None or self._group[0] is not ids or self._group[1] != begin:
                self._group = ids, begin, *self._made(ids[begin : begin + size])
            rows = slice(max(start - begin, 0), stop - begin)
            yield max(start, begin), self._group[2][rows], self._group[3][rows]
        if stop == len(ids):
            self._group = None

    def _made(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """The masks and fills of a group."""
        masks = self._rendered(ids)
        fills = self.fill
        if self.fill_of is not None:
            fills = self.fill_of(self.image[None], self.masks.kept_share(masks)).to(self.image)
        return masks, fills.expand(len(masks), *self.image.shape)
