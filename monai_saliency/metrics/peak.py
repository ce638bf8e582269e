"""The peak of a map."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.ndimage import center_of_mass

from monai_saliency.utils.arguments import instance


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
    return _most_central(np.abs(saliency - highest) <= rounding)


def _most_central(inside: np.ndarray) -> tuple[int, ...]:
    """The index of the voxel inside, bool ``(*spatial)``, that is nearest to the centre of all voxels inside."""
    distance = np.where(inside, np.float32(0), np.float32(np.inf))
    # Added axis by axis, so that a flat map of a large scan needs no list of all voxels.
    axes: Any = np.indices(inside.shape, sparse=True)
    for places, centre in zip(axes, center_of_mass(inside), strict=True):
        distance += ((places - centre) ** 2).astype(np.float32)
    nearest = np.unravel_index(int(np.argmin(distance)), inside.shape)
    return tuple(int(index) for index in nearest)
