"""Checks of arguments. Each error names the argument."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from monai.utils import look_up_option

__all__ = ["check_option", "per_axis", "positive_numbers", "probability", "voxels_of_mm", "whole_numbers"]


def check_option(name: str, value: Any, options: Collection[str]) -> Any:
    """Look up a choice among named options.

    Example::

        >>> check_option("split", "cases", ["auto", "cases", "masks"])
        'cases'
        >>> check_option("power", "square", {"square": 2, "cube": 3})
        2

    Args:
        name: the name of the parameter, for the error.
        value: the choice.
        options: the names, or a dictionary by name.

    Returns:
        the name, or what the dictionary holds under it.

    Raises:
        ValueError: when there is no such option. It names the parameter.
    """
    try:
        return look_up_option(value, options)
    except ValueError:
        # MONAI's own error does not name the parameter, and must not be the one that a user is shown as the cause.
        raise ValueError(f"`{name}` must be one of {sorted(options)}, got {value!r}") from None


def whole_numbers(name: str, value: Any, least: int) -> None:
    """Check that a value is one or several whole numbers of at least ``least``.

    Args:
        name: the name of the parameter, for the error.
        value: a number, or a sequence of numbers.
        least: the smallest number allowed.

    Raises:
        ValueError: when it is not. It names the parameter.
    """
    numbers = np.atleast_1d(np.asarray(value))
    if not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}")


def positive_numbers(name: str, value: Any) -> None:
    """Check that a value is one or several finite numbers above 0.

    Args:
        name: the name of the parameter, for the error.
        value: a number, or a sequence of numbers.

    Raises:
        ValueError: when it is not. It names the parameter.
    """
    numbers = np.atleast_1d(np.asarray(value))
    if numbers.dtype.kind not in "iuf" or not bool((np.isfinite(numbers) & (numbers > 0)).all()):
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}")


def probability(name: str, value: float) -> None:
    """Check that a number is in [0, 1].

    Args:
        name: the name of the parameter, for the error.
        value: the number.

    Raises:
        ValueError: when it is not. It names the parameter.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}")


def per_axis(name: str, value: Any, spatial_shape: Sequence[int]) -> tuple[Any, ...]:
    """One size for each spatial axis.

    Example::

        >>> per_axis("window_size", 8, (64, 64, 32))
        (8, 8, 8)

    Args:
        name: the name of the parameter, for the error.
        value: one size for all axes, or one for each.
        spatial_shape: the spatial shape of the image.

    Raises:
        ValueError: when there are more or fewer sizes than axes. It names the parameter.
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
    """Convert sizes in mm to the nearest whole numbers of voxels, at least 1. Half a voxel is rounded up.

    Example::

        >>> voxels_of_mm((10, 10, 10), spacing=(1.0, 2.0, 4.0))
        (10, 5, 3)

    Args:
        sizes: one size in mm for each axis.
        spacing: the voxel size in mm for each axis.

    Raises:
        ValueError: when the voxel sizes are not known.
    """
    if spacing is None:
        raise ValueError(
            "sizes in mm need the image's voxel sizes, which are unknown: give a MetaTensor with its affine (as "
            "LoadImaged does) or `spacings`, or give the sizes in voxels"
        )
    # Rounded first, since voxel sizes in files, and voxel sizes of oblique affines, are not exact.
    return tuple(max(1, int(round(size / edge, 4) + 0.5)) for size, edge in zip(sizes, spacing, strict=True))
