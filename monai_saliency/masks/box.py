"""What masks that each hide one box have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks
from monai_saliency.utils.boxes import Box

__all__ = ["BoundBoxMasks"]


class BoundBoxMasks(BoundMasks):
    """Masks of which each hides one box and keeps the rest. A subclass implements :meth:`codes`."""

    @abstractmethod
    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """``first`` and ``stop``, int ``(n, spatial_dims)``: each box's first voxel, and the voxel behind its last.

        Both may lie outside the image, where the border cuts the box.
        """

    def hidden_boxes(self, indices: Sequence[int]) -> list[Box]:
        first, stop = self._inside(indices, [(0, size) for size in self.spatial_shape])
        return [tuple(map(slice, *ends)) for ends in zip(first.tolist(), stop.tolist(), strict=True)]

    def restrict(self, indices: Sequence[int], box: Box) -> tuple[np.ndarray, np.ndarray]:
        first, stop = self._inside(indices, [(side.start, side.stop) for side in box])
        return np.asarray((first < stop).all(axis=1)), np.concatenate([first, stop], axis=1)

    def _inside(self, indices: Sequence[int], sides: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """The first voxels of boxes, and those behind their last, inside a box."""
        codes, (start, end) = self.codes(indices), np.transpose(sides)
        return np.maximum(codes["first"], start), np.minimum(codes["stop"], end)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        first, stop = (torch.from_numpy(codes[name]).to(device) for name in ("first", "stop"))
        masks = torch.zeros((), dtype=self.dtype, device=device)
        for axis, side in enumerate(box):
            voxel = torch.arange(side.start, side.stop, device=device)
            outside = ((voxel < first[:, axis, None]) | (voxel >= stop[:, axis, None])).to(self.dtype)
            # A voxel outside the box along any axis is kept. Only the last axis makes full-size masks, in one pass.
            outside = outside.reshape(len(first), *(-1 if a == axis else 1 for a in range(len(box))))
            masks = torch.maximum(masks, outside)
        return masks.unsqueeze(1)
