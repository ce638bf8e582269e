"""Random smooth masks with several fills: each hidden cell is replaced by one of them (MC-RISE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.rise import BoundRISEMasks, RISEMasks
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.boxes import Box, everywhere
from monai_saliency.utils.tensors import blend

__all__ = ["MCRISEMasks"]

# Masks between two states of the generator that are kept, so that any mask's fills are drawn again from near.
_STEP = 64


class MCRISEMasks(RISEMasks):
    """Random smooth masks of MC-RISE (Hatakeyama et al., ACCV 2020, section 3), in 2D and 3D: each hidden cell draws
    one of K fills.

    Cells are kept with probability ``p1`` and shifted as those of :class:`~monai_saliency.RISEMasks`. Each fill k has
    its own mask M_k, 0 where it replaces the voxel and 1 elsewhere. So a rendered mask is ``(K, *spatial)``, and the
    perturbed image is ``(1 - sum_k (1 - M_k)) * image + sum_k (1 - M_k) * fill_k``. Fill 0 is the case's own;
    ``more_fills`` follow. In 2D the masks equal those of xaitk-saliency's ``MCRISEGrid`` for the same seed and
    ``threads=0``. As there, another number of masks draws other fills for the same cells.

    Use with :class:`~monai_saliency.MCRISEScoring` or :class:`~monai_saliency.OcclusionScoring`: each fill gets its own
    map, as channels do elsewhere.

    Args:
        num_masks: number of masks, at least 1.
        more_fills: further fills, each a function of images ``(B, C, *spatial)`` such as ``ConstantFill(1.0)`` or
            ``BlurFill()``. A fill that needs the case's file can only be fill 0.
        grid_size: cells along each axis, one number or one per axis, at least 1.
        p1: probability in [0, 1] that a cell is kept.
        seed: seed of all draws, at least 0.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) as for :class:`~monai_saliency.RISEMasks`, or when a
            fill does not give an image of the same shape.

    Example::

        >>> import torch
        >>> from monai_saliency import ConstantFill, MCRISEMasks
        >>> bound = MCRISEMasks(100, [ConstantFill(1.0), ConstantFill(2.0)], grid_size=4).bind(torch.zeros(1, 16, 16))
        >>> bound.render(range(100)).shape
        torch.Size([100, 3, 16, 16])
    """

    def __init__(
        self,
        num_masks: int,
        more_fills: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        grid_size: int | Sequence[int] = 8,
        p1: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(num_masks, grid_size, p1, seed)
        instance("more_fills", more_fills, (list, tuple), "a list of fills such as [ConstantFill(1.0)]")
        words = "functions of images such as ConstantFill(1.0); one that needs the case's file is the `fill`"
        self.more_fills = [instance("more_fills", each, (), words, function=True) for each in more_fills]

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundMCRISEMasks(self, image)


class _BoundMCRISEMasks(BoundRISEMasks):
    layer = "fill"

    def __init__(self, masks: MCRISEMasks, image: torch.Tensor) -> None:
        super().__init__(masks, image)
        self.more_fills = [self._filled(each, image) for each in masks.more_fills]
        self.channels: int = 1 + len(self.more_fills)
        self._is_finite = all(bool(torch.isfinite(each).all()) for each in self.more_fills)
        self.key = ("MCRISEMasks", self.channels, *self.key)
        self._cells = int(np.prod(self.grid_shape))
        # NumPy cannot jump within a stream of bounded integers: it is drawn once, and states are kept on the way.
        stream = np.random.PCG64(self.seed).advance(self.num_masks * self._cells)
        self._states = []
        for _ in range(0, self.num_masks, _STEP):
            self._states.append(stream.state)
            np.random.Generator(stream).integers(0, self.channels, size=(_STEP, self._cells))

    def _filled(self, fill: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        found = fill(image[None])
        if not isinstance(found, torch.Tensor) or found[:1].shape != (1, *image.shape):
            gave = f"shape {tuple(found.shape[1:])}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise ValueError(f"one of `more_fills` gave {gave} for an image of {tuple(image.shape)}")
        return found[0].to(image)

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``grid`` bool ``(n, K, *grid_shape)``, False where the fill replaces a cell, and ``shift`` int ``(n,
        spatial_dims)``.
        """
        codes = super().codes(ids)
        drawn = self._drawn(np.asarray(ids, dtype=int)).reshape(-1, 1, *self.grid_shape)
        fills = np.arange(self.channels).reshape(-1, *[1] * len(self.grid_shape))
        return codes | {"grid": codes["grid"][:, None] | (drawn != fills)}

    def _drawn(self, places: np.ndarray) -> np.ndarray:
        """The fill of each cell where it is hidden, int ``(n, cells)``."""
        found = np.empty((len(places), self._cells), dtype=int)
        for number in np.unique(places // _STEP):
            stream = np.random.PCG64(0)
            stream.state = self._states[number]
            drawn = np.random.Generator(stream).integers(0, self.channels, size=(_STEP, self._cells))
            here = places // _STEP == number
            found[here] = drawn[places[here] % _STEP]
        return found

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        grids = codes["grid"].reshape(-1, *self.grid_shape)
        flat = {"grid": grids, "shift": codes["shift"].repeat(self.channels, axis=0)}
        return super()._render(flat, device).reshape(-1, self.channels, *self.spatial_shape)

    def perturb(
        self,
        image: torch.Tensor,
        fill: torch.Tensor,
        rendered: torch.Tensor,
        is_finite: bool,
        out: torch.Tensor,
        box: Box | None = None,
    ) -> None:
        fills = [fill, *(each if box is None else each[everywhere(box)] for each in self.more_fills)]
        if is_finite and self._is_finite:
            torch.mul(rendered.sum(dim=1, keepdim=True).sub_(self.channels - 1), image, out=out)
            hidden = rendered.neg().add_(1)
            for number, each in enumerate(fills):
                out.addcmul_(hidden[:, number : number + 1], each.to(out))
            return
        # What is NaN or infinite counts only where it is kept, or replaces something.
        hidden = 1 - rendered
        total = hidden.sum(dim=1, keepdim=True)
        mixed = torch.zeros((), dtype=out.dtype, device=out.device)
        for number, each in enumerate(fills):
            share = hidden[:, number : number + 1]
            mixed = mixed + torch.where(share > 0, share * each.to(out), 0.0)
        blend(torch.where(total > 0, mixed / total, fill), image, (1 - total).clamp(0, 1), False, out=out)
