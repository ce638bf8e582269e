"""Boxes in a volume."""

from __future__ import annotations

__all__ = ["Box", "everywhere", "within"]

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
