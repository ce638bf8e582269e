"""Reading scans, and writing files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from uuid import uuid4

import nibabel as nib
from nibabel.spatialimages import SpatialImage

from monai_saliency.errors import OutputError

__all__ = ["atomic_path", "is_running", "load_scan", "locked", "remove_stale", "temporary_path", "this_process"]

logger = logging.getLogger(__name__)

_PROCESS = re.compile(r"\d+(\.\d+)?")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; renamed to it at the end, removed on any error.

    Raises:
        OutputError: when the file cannot be written; no part of it is left.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let what the machine refuses name the file, and say what to do."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}. What was written before is whole; free space, mend the "
            "permissions or choose another folder, and run again"
        ) from error


def temporary_path(path: Path) -> Path:
    """A name beside ``path`` that no other thread, process or machine uses.

    It starts with a dot, and keeps the suffixes, from which writers tell the format. :func:`remove_stale` knows it.
    """
    return path.with_name(f"{_temporary_prefix(this_process())}{uuid4().hex[:8]}-{path.name}")


def _temporary_prefix(process: str) -> str:
    return f".tmp-{re.sub('[^A-Za-z0-9]', '', socket.gethostname())}-{process}-"


def remove_stale(folder: str | Path, below: str = "**") -> None:
    """Remove temporary files below a folder whose process, on this machine, was killed before it could.

    Args:
        folder: it; links to others are not followed.
        below: where in it they are, as a pattern; anywhere by default.
    """
    for path in Path(folder).glob(f"{below}/{_temporary_prefix('*')}*"):
        process = path.name.split("-")[2]
        if _PROCESS.fullmatch(process) and not is_running(process):
            with suppress(OSError):  # a folder that cannot be written is met, and named, at the first file
                path.unlink(missing_ok=True)


def this_process() -> str:
    """This process's number, and when it started where that is known: numbers come again, in a container at once."""
    started = _started(os.getpid())
    return f"{os.getpid()}.{started}" if started else str(os.getpid())


def is_running(process: str) -> bool:
    """Whether this machine has a process, named as by :func:`this_process`."""
    number, _, started = process.partition(".")
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not started or _started(int(number)) in ("", started)


def _started(process: int) -> str:
    """When a process started, in ticks of the system's clock; "" where that is not told, as outside of Linux."""
    try:
        # Behind the command, which may hold anything, this is the 20th field.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


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
def locked(path: str | Path, wait: bool = True) -> Iterator[str | None]:
    """Hold a lock on a file made for nothing else, and note in it who does.

    The lock is the operating system's and ends with the process, however that ends; the file stays. Where the file
    system has no locks, as some network file systems, the block runs without one, and a warning is logged once.

    Args:
        path: the file.
        wait: until whoever holds the lock lets go of it; else the block runs at once.

    Yields:
        None when the lock is held, else who holds it.

    Raises:
        OutputError: when the file cannot be made or opened.
    """
    path = Path(path)
    with ExitStack() as stack:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # For writing: NFS turns flock into a lock that a file opened for reading, or a folder, cannot have.
            file = stack.enter_context(open(path, "ab+", buffering=0))
        holder = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            # SMB says "permission denied" of a lock that is taken.
            if not wait and isinstance(error, BlockingIOError | PermissionError):
                holder = _holder(file)
            else:
                _warn_no_locks(str(error))
        if holder is None:
            with suppress(OSError):  # for people to read: a full disk must not cost the lock
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield holder


def _holder(file: FileIO) -> str:
    with suppress(OSError):  # SMB lets nobody read a locked file
        file.seek(0)
        return file.read().decode(errors="replace").strip() or "another run"
    return "another run"


@functools.cache
def _warn_no_locks(reason: str) -> None:
    logger.warning(
        "this file system has no locks (%s): start no second run on this folder, for it would do the same work", reason
    )
