"""Checks of arguments, each naming the argument that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["per_axis", "positive_numbers", "probability", "voxels_of_mm", "whole_numbers"]


def whole_numbers(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number, or several, of at least ``least``.

    Raises:
        ValueError: naming the parameter.
    """
    numbers = np.atleast_1d(np.asarray(value))
    if not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}")


def positive_numbers(name: str, value: Any) -> None:
    """Refuse what is not a finite number above 0, or several.

    Raises:
        ValueError: naming the parameter.
    """
    numbers = np.atleast_1d(np.asarray(value))
    if numbers.dtype.kind not in "iuf" or not bool((np.isfinite(numbers) & (numbers > 0)).all()):
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}")


def probability(name: str, value: float) -> None:
    """Refuse a number outside of [0, 1].

    Raises:
        ValueError: naming the parameter.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}")


def per_axis(name: str, value: Any, spatial_shape: Sequence[int]) -> tuple[Any, ...]:
    """A size given as one number or one per axis, as one per axis of ``spatial_shape``.

    Raises:
        ValueError: when the number of sizes is not the number of axes.
    """
    sizes = np.atleast_1d(np.asarray(value)).tolist()
    if len(sizes) == 1:
        sizes = sizes * len(spatial_shape)
    if len(sizes) != len(spatial_shape):
        raise ValueError(
            f"`{name}` must be one number or one per spatial axis, got {value} for an image of spatial shape "
            f"{tuple(spatial_shape)}"
        )
    return tuple(sizes)


def voxels_of_mm(sizes: Sequence[float], spacing: Sequence[float] | None) -> tuple[int, ...]:
    """Sizes in mm as the nearest whole numbers of voxels, one per axis: half a voxel rounds up, and none below one.

    Args:
        sizes: in mm, one per axis.
        spacing: voxel sizes in mm, one per axis.

    Raises:
        ValueError: when the voxel sizes are not known.
    """
    if spacing is None:
        raise ValueError(
            "sizes in mm need the image's voxel sizes, which are unknown: give a MetaTensor with its affine (as "
            "LoadImaged does) or `spacings`, or give the sizes in voxels"
        )
    # Voxel sizes are rounded in files, and worked out of oblique affines.
    return tuple(max(1, int(round(size / edge, 4) + 0.5)) for size, edge in zip(sizes, spacing, strict=True))
