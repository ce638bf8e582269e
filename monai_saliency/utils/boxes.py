"""Boxes in a volume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["Box", "everywhere", "voxels_of", "within"]

#: a box in a volume: one slice with start and stop for each spatial axis
Box = tuple[slice, ...]


def within(box: Box, frame: Box) -> Box:
    """A box in the coordinates of a larger box around it."""
    return tuple(
        slice(side.start - outer.start, side.stop - outer.start) for side, outer in zip(box, frame, strict=True)
    )


def everywhere(box: Box) -> Box:
    """A box in all channels."""
    return (slice(None), *box)


def voxels_of(boxes: Sequence[Box], shape: Sequence[int], most: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The voxels of each box, in a volume whose axes are one."""
    ends = np.array([[(side.start, side.stop) for side in box] for box in boxes])
    edges = (ends[:, :, 1] - ends[:, :, 0]).max(axis=0).tolist()
    if (ends[:, :, 1] <= ends[:, :, 0]).any() or math.prod(edges) > most:
        return None
    places, once = np.zeros((len(boxes), 1), dtype=np.int64), np.ones((len(boxes), 1), dtype=bool)
    for (first, stop), edge, size in zip(ends.transpose(1, 2, 0)[..., None], edges, shape, strict=True):
        along = first + np.arange(edge)
        places = (places[:, :, None] * size + np.minimum(along, stop - 1)[:, None]).reshape(len(boxes), -1)
        once = (once[:, :, None] & (along < stop)[:, None]).reshape(len(boxes), -1)
    return places, once
