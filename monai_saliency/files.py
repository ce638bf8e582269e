"""Reading scans, and writing files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
from nibabel.spatialimages import SpatialImage

__all__ = ["atomic_path", "load_scan"]


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; renamed to it at the end, removed on any error.

    The temporary name starts with a dot and keeps the suffixes, from which writers tell the format.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_scan(path: str | Path) -> SpatialImage:
    """A scan or label map with its header and affine; voxels are read when asked for.

    Raises:
        ValueError: when the file is no image with an affine.
    """
    image = nib.load(path)
    if not isinstance(image, SpatialImage):
        raise ValueError(f"{path} is not a scan that nibabel reads, but a {type(image).__name__}")
    return image
