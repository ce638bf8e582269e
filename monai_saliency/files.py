"""Reading scans, and writing files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import nibabel as nib
from nibabel.spatialimages import SpatialImage

from monai_saliency.errors import OutputError

__all__ = ["atomic_path", "load_scan", "locked", "remove_stale"]


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; renamed to it at the end, removed on any error.

    The temporary name starts with a dot and keeps the suffixes, from which writers tell the format.

    Raises:
        OutputError: when the file cannot be written; no part of it is left.
    """
    path = Path(path)
    temporary = path.with_name(f"{_temporary_prefix(os.getpid())}{uuid4().hex[:8]}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}. What was written before is whole; free space or choose "
            "another folder, and run again"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _temporary_prefix(process: int | str) -> str:
    return f".tmp-{re.sub('[^A-Za-z0-9]', '', socket.gethostname())}-{process}-"


def remove_stale(folder: str | Path) -> None:
    """Remove temporary files below a folder whose process, on this machine, was killed before it could."""
    for path in Path(folder).rglob(_temporary_prefix("*") + "*"):
        process = path.name.split("-")[2]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue


def load_scan(path: str | Path) -> SpatialImage:
    """A scan or label map with its header and affine; voxels are read when asked for.

    Raises:
        ValueError: when the file is no image with an affine.
    """
    image = nib.load(path)
    if not isinstance(image, SpatialImage):
        raise ValueError(f"{path} is not a scan that nibabel reads, but a {type(image).__name__}")
    return image


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold a folder's lock while files in it are read, changed and written by several processes.

    The lock is the operating system's, leaves no file and ends with the process. On a file system that has none the
    block runs all the same.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
