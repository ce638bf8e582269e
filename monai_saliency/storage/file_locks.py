"""The operating system's locks on open files: ``fcntl`` on POSIX systems, ``msvcrt`` on Windows."""

from __future__ import annotations

import errno
import importlib
import time
from io import FileIO
from typing import Any

__all__ = ["lock_file", "unlock_file"]

# Windows locks bytes, and nobody else can read a locked byte. This one lies behind the text of the file.
_BYTE = 1 << 30
_POLL = 0.1  # seconds


def lock_file(file: FileIO, wait: bool) -> None:
    """Lock an open file for one owner. The lock ends at :func:`unlock_file`, or with the process.

    Args:
        file: opened for writing, without a buffer.
        wait: wait while somebody else holds the lock, instead of raising.

    Raises:
        BlockingIOError, PermissionError: when somebody else holds the lock, and ``wait`` is False.
        OSError: when the file system or the operating system has no locks.
    """
    fcntl, msvcrt = _module("fcntl"), _module("msvcrt")
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    if msvcrt is None:
        raise OSError(errno.ENOSYS, "Python has neither fcntl nor msvcrt on this system")
    while True:
        file.seek(_BYTE)
        try:
            # Not LK_LOCK, which gives up after ten seconds.
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return
        except PermissionError:
            if not wait:
                raise
        time.sleep(_POLL)


def unlock_file(file: FileIO) -> None:
    """Release the lock of a file that :func:`lock_file` has locked, before the file is closed."""
    # flock ends when the file is closed; Windows may take its time then.
    if _module("fcntl") is None and (msvcrt := _module("msvcrt")) is not None:
        file.seek(_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)


def _module(name: str) -> Any:
    """A module of the standard library, or None where the operating system does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
