"""Sizes in voxels or mm, and boxes: what families of masks check and convert alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai_saliency.masks.base import Spacing
from monai_saliency.utils.arguments import check_option, per_axis, positive_numbers, voxels_of_mm, whole_numbers
from monai_saliency.utils.tensors import Box


def check_unit(unit: str, name: str, size: Any) -> str:
    """Check a unit, and that a size whose default is in voxels is given in mm."""
    if check_option("unit", unit, ("voxel", "mm")) == "mm" and size is None:
        raise ValueError(f"`unit` 'mm' needs a `{name}`: the default is in voxels")
    return unit


def check_sizes(unit: str, **sizes: Any) -> None:
    """Check sizes in voxels, which are whole numbers, or mm; None is the default."""
    for name, value in sizes.items():
        if value is not None and unit == "mm":
            positive_numbers(name, value)
        elif value is not None:
            whole_numbers(name, value, 1)


def in_voxels(name: str, sizes: Any, unit: str, spatial_shape: Sequence[int], spacing: Spacing) -> tuple[int, ...]:
    """Sizes along each axis, in voxels."""
    found = per_axis(name, sizes, len(spatial_shape))
    return voxels_of_mm(found, spacing) if unit == "mm" else found


def overlap(one: Box, other: Box) -> Box:
    """The intersection of two boxes; empty if they do not meet."""
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))
