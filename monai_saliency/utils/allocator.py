"""What becomes of memory that is freed on the CPU."""

from __future__ import annotations

import ctypes
import sys

import torch

__all__ = ["glibc", "keep_freed_memory"]

# of glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def glibc() -> ctypes.CDLL | None:
    """The C library of this program, where that is glibc, as on most Linux systems; None elsewhere."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_freed_memory(device: torch.device | str = "cpu") -> bool:
    """Let this program keep the memory that it frees, for what it takes next.

    glibc gives a large block, such as the output of a convolution over a volume, back to the system as soon as it is
    freed, and takes a new one for the next. The system fills each new one with zeros, page by page, when it is written
    first. A network that runs thousands of times can spend a third of its time so. Results are the same to the bit.
    What is kept grows by the holes between blocks.

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
