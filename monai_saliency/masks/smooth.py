"""Smooth edges of masks: the crisp mask, averaged over a small box around each voxel (arXiv 2409.04116)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.utils.arguments import per_axis
from monai_saliency.utils.tensors import Box


def widths_of(smooth: Any, spatial_shape: Sequence[int]) -> tuple[float, ...]:
    """The width of an edge along each axis; empty where all edges are crisp."""
    widths = tuple(max(1.0, float(width)) for width in per_axis("smooth", smooth, len(spatial_shape)))
    return widths if max(widths) > 1 else ()


def _reaches(widths: Sequence[float]) -> tuple[int, ...]:
    """How many voxels away, along each axis, a voxel still changes an averaged mask."""
    return tuple(math.ceil((width - 1) / 2) for width in widths)


def grown(box: Box, widths: Sequence[float], spatial_shape: Sequence[int]) -> Box:
    """A box with all voxels around it that change an averaged mask inside it."""
    return tuple(
        slice(max(0, side.start - reach), min(size, side.stop + reach))
        for side, reach, size in zip(box, _reaches(widths), spatial_shape, strict=True)
    )


def averaged(hidden: torch.Tensor, box: Box, widths: Sequence[float], spatial_shape: Sequence[int]) -> torch.Tensor:
    """What is hidden, averaged over ``widths`` around each voxel; the image is continued by its last voxel."""
    outer = grown(box, widths, spatial_shape)
    for axis, (width, reach, size) in enumerate(zip(widths, _reaches(widths), spatial_shape, strict=True)):
        if reach:
            voxels = torch.arange(box[axis].start - reach, box[axis].stop + reach, device=hidden.device)
            around = hidden.index_select(axis + 2, voxels.clamp(0, size - 1) - outer[axis].start)
            count = box[axis].stop - box[axis].start
            shares = _shares(width, reach, 2.0**24 if hidden.dtype == torch.float32 else 2.0**48)
            hidden = around.narrow(axis + 2, 0, count) * shares[0]
            product = torch.empty_like(hidden)
            for offset, share in enumerate(shares[1:], start=1):
                # In two steps, which round alike wherever a voxel lies in memory.
                hidden += torch.mul(around.narrow(axis + 2, offset, count), share, out=product)
    return hidden


def _shares(width: float, reach: int, parts: float) -> list[float]:
    """The part of a line of some width that lies in each voxel, from ``-reach`` to ``reach``. They sum to 1 exactly:
    all are multiples of ``1 / parts``, which the precision holds.
    """
    outer = [min(1.0, width / 2 + 0.5 - distance) / width for distance in range(1, reach + 1)]
    rounded = [round(share * parts) / parts for share in outer]
    return [*rounded[::-1], 1 - 2 * sum(rounded), *rounded]
