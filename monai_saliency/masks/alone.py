"""Parts of an image that are shown alone: which of them are enough for the score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks
from monai_saliency.utils.boxes import Box, everywhere

__all__ = ["BoundAloneMasks"]

# A part is enough with this share of what the whole image adds to the score of the fill. Cut edges alone reach a half.
_ENOUGH = 0.8


class BoundAloneMasks(BoundMasks):
    """Mask 0 hides the whole image. Mask ``1 + i`` hides all of it but window i of the first level and a margin.

    The margin is a quarter of the window on each side. So whatever is no longer than half a window lies in one of the
    parts with nothing cut off.

    Args:
        windows: the windows.
        image: ``(C, *spatial)``.

    Attributes:
        edges: of a part that no border cuts, in voxels.
    """

    def __init__(self, windows: BoundHierarchicalMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        edges = [int(axis[1]) for axis in windows.bounds[0]]
        margin = np.array([-(-edge // 4) for edge in edges])
        self.edges = tuple(min(e + 2 * int(m), n) for e, m, n in zip(edges, margin, self.spatial_shape, strict=True))
        codes = windows.codes(windows.levels[0])
        first = np.maximum(codes["first"] - margin, 0)
        stop = np.minimum(codes["stop"] + margin, self.spatial_shape)
        nothing = np.zeros((1, len(edges)), dtype=int)
        self._first, self._stop = np.concatenate([nothing, first]), np.concatenate([nothing, stop])
        self._bounds = windows.bounds[0]
        self.key = ("AloneMasks", windows.key)

    def __len__(self) -> int:
        return len(self._first)

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``first`` and ``stop``, int ``(n, spatial_dims)``: what is shown, and the voxel behind its last one."""
        wanted = np.asarray(ids, dtype=int)
        return {"first": self._first[wanted], "stop": self._stop[wanted]}

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        codes, (start, end) = self.codes(ids), np.transpose([(side.start, side.stop) for side in box])
        first, stop = np.clip(codes["first"], start, end), np.clip(codes["stop"], start, end)
        # Where nothing is shown, the row is that of a window over all of the box. Others are below zero, unlike any.
        nothing = (first >= stop).any(axis=1)
        rows = -1 - np.concatenate([first, stop], axis=1)
        rows[nothing] = [*start, *end]
        return np.asarray(((first > start) | (stop < end)).any(axis=1)), rows

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        masks = torch.zeros(len(codes["first"]), 1, *(s.stop - s.start for s in box), dtype=self.dtype, device=device)
        for mask, first, stop in zip(masks, codes["first"], codes["stop"], strict=True):
            sides = zip(first.tolist(), stop.tolist(), box, strict=True)
            mask[everywhere(tuple(slice(max(a - s.start, 0), max(b - s.start, 0)) for a, b, s in sides))] = 1
        return masks

    def enough(self, gains: np.ndarray) -> list[np.ndarray]:
        """The places that are each enough for the score, the one that most parts show first.

        Parts that are enough and overlap may show the same thing, which lies in what they have in common, and in no
        part that is not enough. So a place is the voxel with the most parts that are enough, less those that are not,
        among what shows it; then that of the parts that do not show this voxel, unless the first place lies about it.

        Args:
            gains: for each window, what its part adds to the score of the fill, as a share of what the image adds.

        Returns:
            the middle of each place, in voxels.
        """
        left = 1 + np.flatnonzero(np.asarray(gains) >= _ENOUGH)
        against = np.zeros(self.spatial_shape)
        for row in 1 + np.flatnonzero(np.asarray(gains) < _ENOUGH):
            against[tuple(map(slice, self._first[row], self._stop[row]))] += 1
        found: list[np.ndarray] = []
        while len(left):
            votes = np.zeros(self.spatial_shape)
            for row in left:
                votes[tuple(map(slice, self._first[row], self._stop[row]))] += 1
            voxel = np.unravel_index(int(np.where(votes > 0, votes - against, -np.inf).argmax()), votes.shape)
            showing = ((voxel >= self._first[left]) & (voxel < self._stop[left])).all(axis=1)
            windows = np.array(np.unravel_index(left[showing] - 1, [len(axis) - 1 for axis in self._bounds]))
            ends = zip(self._bounds, windows.min(axis=1), windows.max(axis=1) + 1, strict=True)
            centre = np.array([(axis[first] + axis[stop]) / 2 for axis, first, stop in ends])
            if all((np.abs(centre - other) >= np.array(self.edges) / 2).any() for other in found):
                found.append(centre)
            left = left[~showing]
        return found
