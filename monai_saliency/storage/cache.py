"""Where preprocessed items are kept: in memory or in files. Reading an entry never runs code.

A backend has ``get(key) -> bytes or None`` and ``put(key, data)``. Both raise ``OSError`` when the operating system
refuses. A backend can be sent to another process; entries in memory are not sent.
"""

from __future__ import annotations

import copyreg
import io
import pathlib
import re
import zlib
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import monai.utils.enums
import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.storage.files import atomic_path, remove_stale
from monai_saliency.utils.monai_private import tree_map

__all__ = ["Backend", "DiskBackend", "EntryError", "MemoryBackend", "decode", "encode"]


def _kinds(module: Any, base: type = object) -> list[Any]:
    """The subclasses of a class in a module."""
    return [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]


_ENUMS = _kinds(monai.utils.enums, Enum)
# The types in MONAI's items that torch does not load by itself.
_TYPES: list[Any] = [
    *(MetaTensor, np.ndarray, np.dtype, pathlib.PosixPath, pathlib.WindowsPath),
    *(np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0]),  # the functions that make arrays and numbers
    *(*_kinds(np.dtypes), *_kinds(np, np.generic), *_ENUMS),
]
torch.serialization.add_safe_globals(_TYPES)
for _enum in _ENUMS:  # Python 3.11.0 to 3.11.3 would pickle getattr, which is not read again
    copyreg.pickle(_enum, lambda member: (type(member), (member.value,)))
_CHECKSUM = 4  # bytes


class EntryError(ValueError):
    """An item that cannot be stored, or bytes that are not the item of a key."""


def encode(item: Any, key: str) -> bytes:
    """Convert an item to bytes."""
    buffer = io.BytesIO()
    try:
        torch.save(tree_map(_compact, item), buffer)
    except Exception as error:  # pickle raises many
        raise EntryError(f"{type(error).__name__}: {error}") from error
    return _checksum(buffer.getvalue(), key) + buffer.getvalue()


def decode(data: bytes, key: str) -> Any:
    """Convert bytes back to an item, whose tensors and arrays are copies."""
    content = memoryview(data)[_CHECKSUM:]
    if data[:_CHECKSUM] != _checksum(content, key):
        raise EntryError("its checksum differs")
    try:
        return torch.load(io.BytesIO(content), map_location=_place, weights_only=True)
    except Exception as error:  # bytes of unknown origin can raise errors of any type
        refused = re.search(r"GLOBAL (\S+)", str(error))
        raise EntryError(f"it holds a {refused[1]}" if refused else f"{type(error).__name__}: {error}") from error


def _checksum(data: bytes | memoryview, key: str) -> bytes:
    return zlib.crc32(data, zlib.crc32(key.encode())).to_bytes(_CHECKSUM, "big")


def _place(storage: Any, location: str) -> Any:
    # Not in a process that was forked from one that had used CUDA, where CUDA cannot be used.
    return storage.cuda() if location.startswith("cuda") and torch.cuda.is_initialized() else storage


def _compact(value: Any) -> Any:
    """A tensor that holds no memory beyond its voxels: a view would be stored with all that it is a view of."""
    is_view = isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if is_view else value


class MemoryBackend:
    """Entries in the memory of this process."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_entries": {}}

    def get(self, key: str) -> bytes | None:
        return self._entries.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._entries[key] = data


class DiskBackend:
    """One file for each entry. Any number of processes may share the folder, also on a network file system."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        remove_stale(self.folder, "??")  # only where entries are, since the folder may hold other files

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / key[:2] / key

    def get(self, key: str) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, key: str, data: bytes) -> None:
        with atomic_path(self.path(key), durable=False) as temporary:
            temporary.write_bytes(data)


Backend: TypeAlias = MemoryBackend | DiskBackend
