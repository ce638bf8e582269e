"""The peak of a map."""

from __future__ import annotations

import numpy as np

from monai_saliency.utils.arguments import instance

__all__ = ["peak_voxel"]


def peak_voxel(saliency: np.ndarray) -> tuple[int, ...]:
    """The index of the voxel with the highest value of a map.

    Occlusion maps are flat in places. Of several highest voxels (equal to 1e-6 of the map's largest absolute value),
    the one nearest to their centre of mass is returned. If no voxel is positive, voxels of 0 are left out: no mask hid
    them, or the network did not see them.

    Args:
        saliency: one map ``(*spatial)``, 2D or 3D.

    Returns:
        one index per spatial axis.

    Example::

        >>> peak_voxel(np.array([[0.0, 1.0, 3.0], [0.0, 2.0, 1.0]]))
        (0, 2)
        >>> peak_voxel(np.array([[0.0, 5.0, 5.0, 5.0, 0.0]]))
        (0, 2)
    """
    instance("saliency", saliency, np.ndarray, "one map (*spatial) as an array, such as maps[0].numpy(force=True)")
    if not saliency.size or not np.isfinite(saliency).all():
        raise ValueError(f"`saliency` must have voxels, and no NaN or infinite ones, got shape {saliency.shape}")
    rounding = 1e-6 * np.abs(saliency).max()
    highest = saliency.max()
    if highest <= rounding and saliency.min() < -rounding:
        highest = saliency[saliency < -rounding].max()
    level = np.abs(saliency - highest) <= rounding
    # The centre comes from counts along each axis, so that a flat map of a large scan needs no list of all voxels.
    distance = np.where(level, np.float32(0), np.float32(np.inf))
    for axis, size in enumerate(saliency.shape):
        counts = level.sum(axis=tuple(other for other in range(saliency.ndim) if other != axis))
        offset = np.arange(size) - (counts @ np.arange(size)) / counts.sum()
        distance += (offset**2).astype(np.float32).reshape([size if a == axis else 1 for a in range(saliency.ndim)])
    return tuple(int(i) for i in np.unravel_index(int(np.argmin(distance)), saliency.shape))
