"""What becomes of memory that is freed on the CPU."""

from __future__ import annotations

import ctypes
import sys
import time
from threading import Lock

import torch

__all__ = ["give_back_freed_memory", "glibc", "keep_freed_memory"]

# of glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
# Memory is given back when the program holds so many times what it held after the first batch of images since then, and
# once so many times as long has passed as it took: to take it anew takes three times as long, so 4 % at the most.
_GROWN, _PAUSE = 1.05, 100
# Whatever it takes, when the program holds so many times the most that a first batch ever left.
_MUCH = 1.2


def glibc() -> ctypes.CDLL | None:
    """The C library of this program, where that is glibc, as on most Linux systems; None elsewhere."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_freed_memory(device: torch.device | str = "cpu") -> bool:
    """Let this program keep the memory that it frees, for what it takes next.

    glibc gives a large block, such as the output of a convolution over a volume, back to the system as soon as it is
    freed, and takes a new one for the next. The system fills each new one with zeros, page by page, when it is written
    first. A network that runs thousands of times can spend a third of its time so. Results are the same to the bit.
    What is kept grows by the holes between blocks, until :func:`give_back_freed_memory` is called.

    It holds for the whole program and cannot be undone.

    Example::

        >>> keep_freed_memory("cuda")
        False

    Args:
        device: where the network runs. On another one than the CPU nothing is done: its memory is torch's.

    Returns:
        whether it is so now: only with glibc, the C library of most Linux systems.

    Source: mallopt(3) of the Linux manual pages, M_MMAP_MAX and M_TRIM_THRESHOLD.
    """
    library = glibc() if torch.device(device).type == "cpu" else None
    if library is None:
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, -1))


class _GiveBack:
    """Gives freed memory back where the program has grown by it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._begun: int | None = None  # pages held after the first batch since memory was given back
        self._most, self._next = 0, 0.0

    def __call__(self) -> bool:
        library = glibc()
        if library is None or not self._lock.acquire(blocking=False):
            return False
        try:
            held, begun = _resident(), time.monotonic()
            if self._begun is None:
                self._begun, self._most = held, max(held, self._most)
            has_grown = held > _GROWN * self._begun and begun >= self._next
            if not has_grown and held <= _MUCH * self._most:
                return False
            library.malloc_trim(0)
            ended = time.monotonic()
            self._begun, self._next = None, ended + _PAUSE * (ended - begun)
            return True
        except OSError:  # a system without /proc
            return False
        finally:
            self._lock.release()


def _resident() -> int:
    """Pages that this program holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1])


_give_back = _GiveBack()


def give_back_freed_memory() -> bool:
    """Give back to the system what is freed and not used, wherever it lies between what is used, if it has become much.

    glibc holds the holes between blocks. A network that meets images of many shapes leaves holes that fit none of the
    next, so that a program's memory grows from image to image although nothing of them is held. This is called after
    each batch of images that is explained. It does nothing where the program holds about what the first batch left, and
    is not done so often that it takes a share of the time worth naming, unless the program has grown by a fifth. What
    :func:`keep_freed_memory` keeps is given back too, and kept anew.

    Returns:
        whether it was done now: only with glibc.

    Source: malloc_trim(3) of the Linux manual pages.
    """
    return _give_back()
