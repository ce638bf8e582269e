"""Boxes: parts of a volume."""

from __future__ import annotations

__all__ = ["Box", "within"]

#: part of a volume: one slice with start and stop for each spatial axis
Box = tuple[slice, ...]


def within(box: Box, frame: Box) -> Box:
    """A box as it lies in a frame around it: its voxels counted from the frame's first."""
    return tuple(
        slice(side.start - outer.start, side.stop - outer.start) for side, outer in zip(box, frame, strict=True)
    )
