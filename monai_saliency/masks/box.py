"""What masks that each hide one box have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.smooth import rise_over
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.tensors import to_device

__all__ = ["BoundBoxMasks"]


class BoundBoxMasks(BoundMasks):
    """Masks of which each hides one box and keeps the rest. A subclass implements :meth:`codes`."""

    smooth: tuple[float, ...] = ()

    @abstractmethod
    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``first`` and ``stop``, int ``(n, spatial_dims)``: each box's first voxel, and the voxel behind its last."""

    def hidden_boxes(self, ids: Sequence[Id]) -> list[Box] | None:
        if self.smooth:
            return None
        first, stop = self._inside(ids, [(0, size) for size in self.spatial_shape])
        return [tuple(map(slice, *ends)) for ends in zip(first.tolist(), stop.tolist(), strict=True)]

    def changed_boxes(self, ids: Sequence[Id]) -> list[Box] | None:
        if not self.smooth:
            return self.hidden_boxes(ids)
        lowest, highest = self._ramps(ids, [(0, size) for size in self.spatial_shape])
        highest = np.maximum(highest, lowest - 1)
        return [tuple(map(slice, *ends)) for ends in zip(lowest.tolist(), (highest + 1).tolist(), strict=True)]

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        if self.smooth:
            return self._restrict_smooth(ids, box)
        first, stop = self._inside(ids, [(side.start, side.stop) for side in box])
        return np.asarray((first < stop).all(axis=1)), np.concatenate([first, stop], axis=1)

    def _inside(self, ids: Sequence[Id], sides: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """The first voxels of boxes, and those behind their last, inside a box."""
        codes, (start, end) = self.codes(ids), np.transpose(sides)
        return np.maximum(codes["first"], start), np.minimum(codes["stop"], end)

    def _edges(self, codes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Where ramps have their middles: infinitely far away where the box reaches the image's border."""
        first, stop = codes["first"].astype(float), codes["stop"].astype(float)
        return np.where(first <= 0, -np.inf, first), np.where(stop >= self.spatial_shape, np.inf, stop)

    def _ramps(self, ids: Sequence[Id], sides: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last voxels inside a box that masks with smooth edges hide at least in part."""
        first, stop = self._edges(self.codes(ids))
        (start, end), half = np.transpose(sides), np.array(self.smooth) / 2
        # Their centres lie between the outer ends of the two ramps.
        lowest = np.maximum(np.floor(first - half - 0.5) + 1, start)
        highest = np.minimum(np.ceil(stop + half - 0.5) - 1, end - 1)
        return lowest.astype(int), highest.astype(int)

    def _restrict_smooth(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        sides = [(side.start, side.stop) for side in box]
        lowest, highest = self._ramps(ids, sides)
        first, stop = self._edges(self.codes(ids))
        (start, end), half = np.transpose(sides), np.array(self.smooth) / 2
        # An edge whose ramp ends outside the box is like any other there.
        near, far = np.floor(start + 0.5 - half), np.ceil(end - 0.5 + half)
        rows = np.concatenate([np.clip(first, near, far), np.clip(stop, near, far)], axis=1)
        return np.asarray((lowest <= highest).all(axis=1)), rows.astype(int)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        if self.smooth:
            return self._render_smooth(codes, box, device)
        # Which voxels of a line along an axis lie outside the box: small, so made here and copied once.
        voxels = [np.arange(side.start, side.stop) for side in box]
        ends = zip(codes["first"].T[:, :, None], codes["stop"].T[:, :, None], strict=True)
        lines = [(voxel < first) | (voxel >= stop) for voxel, (first, stop) in zip(voxels, ends, strict=True)]
        sizes = [len(voxel) for voxel in voxels]
        outside = to_device(np.concatenate(lines, axis=1), device, self.dtype).split(sizes, dim=1)
        # A voxel outside the box along any axis is kept. Only the last axis makes full-size masks, in one pass.
        masks = outside[0].view(len(outside[0]), 1, -1, *[1] * (len(box) - 1))
        for axis, line in enumerate(outside[1:], 1):
            masks = torch.maximum(masks, line.view(len(line), 1, *(-1 if a == axis else 1 for a in range(len(box)))))
        return masks

    def _render_smooth(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        first, stop = (to_device(ends, device, self.dtype) for ends in self._edges(codes))
        hidden = torch.ones((), dtype=self.dtype, device=device)
        for axis, (side, width) in enumerate(zip(box, self.smooth, strict=True)):
            centre = torch.arange(side.start, side.stop, device=device).to(self.dtype) + 0.5
            along = rise_over(centre - first[:, axis, None], width) - rise_over(centre - stop[:, axis, None], width)
            hidden = hidden * along.reshape(len(first), *(-1 if a == axis else 1 for a in range(len(box))))
        return (1 - hidden).unsqueeze(1)
