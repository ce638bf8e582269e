"""What glibc's allocator does in this process."""

from __future__ import annotations

import ctypes

import pytest

from monai_saliency.utils.allocator import glibc

needs_glibc = pytest.mark.skipif(glibc() is None, reason="needs glibc")


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of <malloc.h>, of glibc 2.33 and later."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")] + [
        (name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def gives_large_blocks_back() -> bool:
    """Whether a block of 64 MiB is a mapping of its own, which goes back to the system when it is freed."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Info
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = library.mallinfo2().hblks
    block = library.malloc(ctypes.c_size_t(2**26))
    found = library.mallinfo2().hblks > before
    library.free(block)
    return bool(found)
