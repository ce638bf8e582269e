"""Where preprocessed items are kept: in memory, in files, in an LMDB database. Reading an entry never runs code.

A backend has ``get(key) -> bytes or None`` and ``put(key, data)``. Both raise ``OSError`` when the operating system
refuses. A backend can be sent to another process; entries in memory are not sent.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, cast

import filelock
import lmdb
import torch

from monai_saliency.storage.files import remove_stale, write_whole
from monai_saliency.utils.monai_private import tree_map
from monai_saliency.utils.plain_loading import load_plain

__all__ = ["Backend", "DiskBackend", "EntryError", "LMDBBackend", "MemoryBackend", "decode", "encode"]


_CHECKSUM, _MAP_SIZE = 4, 1 << 30  # bytes


class _Pickle:
    """For ``torch.save``. Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) would pickle getattr for a member of an enum,
    which is not read again.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


class EntryError(ValueError):
    """An item that cannot be stored, or bytes that are not the item of a key."""


def encode(item: Any, key: str) -> bytes:
    """Convert an item to bytes."""
    buffer = io.BytesIO()
    try:
        torch.save(tree_map(_compact, item), buffer, pickle_module=_Pickle)
    except Exception as error:  # pickle raises many
        raise EntryError(f"{type(error).__name__}: {error}") from error
    return _checksum(buffer.getvalue(), key) + buffer.getvalue()


def decode(data: bytes, key: str) -> Any:
    """Convert bytes back to an item, whose tensors and arrays are copies."""
    content = memoryview(data)[_CHECKSUM:]
    if data[:_CHECKSUM] != _checksum(content, key):
        raise EntryError("its checksum differs")
    try:
        return load_plain(io.BytesIO(content), map_location=_place)
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

    def __init__(self, limit: int | None = None, behind: Backend | None = None) -> None:
        self.limit = limit
        self.behind = behind
        self._entries: OrderedDict[str, bytes] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entries": OrderedDict()}

    def get(self, key: str) -> bytes | None:
        data = self._entries.get(key)
        if data is None and self.behind is not None:
            data = self.behind.get(key)
        if data is not None:
            self._keep(key, data)
        return data

    def put(self, key: str, data: bytes) -> None:
        self._keep(key, data)
        if self.behind is not None:
            self.behind.put(key, data)

    def _keep(self, key: str, data: bytes) -> None:
        with _alone:
            self._entries[key] = data
            self._entries.move_to_end(key)
            while self.limit is not None and len(self._entries) > self.limit:
                self._entries.popitem(last=False)


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
        write_whole(self.path(key), data, durable=False)


class LMDBBackend:
    """Entries of an LMDB database. It must be on a local disk, not on a network file system."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def get(self, key: str) -> bytes | None:
        with self._opened(0) as environment, environment.begin() as transaction:
            return cast("bytes | None", transaction.get(key.encode()))

    def put(self, key: str, data: bytes) -> None:
        # Twice the entry: a transaction writes copies of the pages that it changes.
        with self._opened(2 * len(data) + (1 << 20)) as environment, environment.begin(write=True) as transaction:
            transaction.put(key.encode(), data)

    @contextmanager
    def _opened(self, room: int) -> Iterator[lmdb.Environment]:
        """The database, with room for ``room`` more bytes. Errors of LMDB become errors of the operating system."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone, filelock.FileLock(f"{self.path}.lock"):
            held = self.path.stat().st_size if self.path.exists() else 0
            try:
                # Our lock replaces LMDB's, whose file on a full disk would end the process. Without `metasync` a power
                # failure may lose the last entries, but never damages the database.
                with lmdb.open(
                    str(self.path), max(_MAP_SIZE, held + room), subdir=False, lock=False, metasync=False
                ) as environment:
                    pages = environment.info()["last_pgno"] + 1
                    if self.path.stat().st_size < pages * environment.stat()["psize"]:  # reading would end the process
                        raise lmdb.CorruptedError("the file is cut off: remove it")
                    yield environment
            except lmdb.Error as error:
                if not held:  # it could not be made, on a full disk for example
                    self.path.unlink(missing_ok=True)
                raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self.path)) from error


Backend: TypeAlias = MemoryBackend | DiskBackend | LMDBBackend

# No other thread is in a backend when a process forks, so that the child finds no open database and no held lock.
_alone = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_alone.acquire, after_in_parent=_alone.release, after_in_child=_alone.release)
