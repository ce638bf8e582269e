"""The peak of a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    pass

__all__ = ["peak_voxel"]


def peak_voxel(saliency: np.ndarray) -> tuple[int, ...]:
    """The voxel index of a map's highest value.

    Where nothing is positive, voxels of value 0 do not count: no mask hid them, or they lie outside of what the network
    saw. Maps of windows and regions are flat in places: of voxels that are equally high (to 1e-6 of the highest
    magnitude) it is the one nearest to their centre.
    """
    rounding = 1e-6 * np.abs(saliency).max()
    highest = saliency.max()
    if highest <= rounding and saliency.min() < -rounding:
        highest = saliency[saliency < -rounding].max()
    level = np.abs(saliency - highest) <= rounding
    # From counts along each axis, so that a flat map of a large scan needs no list of its voxels.
    distance = np.where(level, np.float32(0), np.float32(np.inf))
    for axis, size in enumerate(saliency.shape):
        counts = level.sum(axis=tuple(other for other in range(saliency.ndim) if other != axis))
        offset = np.arange(size) - (counts @ np.arange(size)) / counts.sum()
        distance += (offset**2).astype(np.float32).reshape([size if a == axis else 1 for a in range(saliency.ndim)])
    return tuple(int(i) for i in np.unravel_index(int(np.argmin(distance)), saliency.shape))
