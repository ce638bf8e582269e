"""Backends that keep cached bytes: memory, files, an LMDB database. They are safe with threads, forks and processes.

A backend has ``get(key) -> bytes or None`` and ``put(key, data)``. Both raise ``OSError`` when the operating system
refuses. A backend can be sent to another process, which opens its own connections. Bytes in memory are not sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import lmdb
import numpy as np

from monai_saliency.storage.files import remove_stale, temporary_path

__all__ = ["Backend", "DiskBackend", "LMDBBackend", "MemoryBackend"]

Bytes: TypeAlias = "bytes | bytearray"


@runtime_checkable
class Backend(Protocol):
    """The interface of a backend."""

    trusted: bool  # whether nobody else can change the bytes

    def get(self, key: str) -> Bytes | None: ...

    def put(self, key: str, data: Bytes) -> None: ...


class MemoryBackend:
    """Entries in the memory of this process.

    Args:
        limit: the largest number of entries. The entries that were used last are kept. Default: all.
        behind: a slower backend that keeps all entries, for those that are not in memory.
    """

    def __init__(self, limit: int | None = None, behind: Backend | None = None) -> None:
        self.limit = limit
        self.behind = behind
        self.trusted = behind is None
        self._entries: OrderedDict[str, Bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entries": OrderedDict()}

    def get(self, key: str) -> Bytes | None:
        with guard:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        data = self.behind.get(key) if self.behind else None
        if data is not None:
            self._keep(key, data)
        return data

    def put(self, key: str, data: Bytes) -> None:
        self._keep(key, data)
        if self.behind:
            self.behind.put(key, data)

    def _keep(self, key: str, data: Bytes) -> None:
        with guard:
            self._entries[key] = data
            self._entries.move_to_end(key)
            while self.limit is not None and len(self._entries) > self.limit:
                self._entries.popitem(last=False)


class DiskBackend:
    """One file for each entry. Any number of processes may share the folder, also on a network file system.

    The unfinished files of processes that were killed on this machine are removed.

    Args:
        folder: the folder of the files. It is made when the first entry is written.
    """

    trusted = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        remove_stale(self.folder, "??")  # only where entries are, since the folder may hold other files

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / key[:2] / key

    def get(self, key: str) -> Bytes | None:
        try:
            return self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, key: str, data: Bytes) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


class LMDBBackend:
    """Entries of an LMDB database. It must be on a local disk, not on a network file system.

    Args:
        path: the file of the database. It is made when it is first used, with its lock file beside it.
        map_size: the first size of the database in bytes. It grows as needed. (On Windows the file has this size from
            the beginning.)
    """

    trusted = False

    def __init__(self, path: str | Path, map_size: int = 1 << 30) -> None:
        self.path = Path(path)
        self.map_size = map_size

    def get(self, key: str) -> Bytes | None:
        def read(environment: lmdb.Environment) -> Bytes | None:
            with environment.begin(buffers=True) as transaction:
                found = transaction.get(key.encode())
                if found is None:
                    return None
                data = bytearray(len(found))
                # NumPy releases Python's lock, so that other threads continue while pages are read from the disk.
                np.frombuffer(data, np.uint8)[...] = np.frombuffer(found, np.uint8)
                del found
                return data

        return self._run(read, 0)

    def put(self, key: str, data: Bytes) -> None:
        def write(environment: lmdb.Environment) -> None:
            with environment.begin(write=True) as transaction:
                transaction.put(key.encode(), data)

        self._run(write, len(data))

    def _run(self, work: Callable[[lmdb.Environment], Any], size: int) -> Any:
        """Call ``work`` with the open database, after making room for ``size`` bytes."""
        try:
            while True:
                known = None
                try:
                    with _gate.shared():
                        known = _open.get(self._name())
                        if known is not None and known.mapped < _MOST_MAPPED and known.files == _files(self.path):
                            result = work(known.environment)
                            known.mapped += len(result) if result is not None else size
                            return result
                    with _gate.alone():
                        self._reopen(known)
                except lmdb.MapFullError:
                    assert known is not None
                    with _gate.alone():
                        if _open.get(self._name()) is known:
                            grown = max(2 * known.environment.info()["map_size"], 4 * size)
                            known.environment.set_mapsize(-(-grown // _PAGES) * _PAGES)
                except lmdb.MapResizedError:
                    # Another process has made it larger.
                    assert known is not None
                    with _gate.alone():
                        if _open.get(self._name()) is known:
                            known.environment.set_mapsize(0)
        except lmdb.Error as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self.path)) from error

    def _name(self) -> str:
        return os.path.realpath(self.path)

    def _reopen(self, outdated: _Open | None) -> None:
        name = self._name()
        if _open.get(name) is not outdated:
            return
        if outdated is not None:
            # Its files were removed or replaced, or too much of them is mapped.
            _open.pop(name).environment.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            environment = self._environment()
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            self._set_aside(str(error))
            environment = self._environment()
        if _is_cut_off(environment):
            environment.close()
            # Another process may have renamed the old one by now, and made a new one.
            environment = self._environment()
            if _is_cut_off(environment):
                environment.close()
                self._set_aside("it is cut off")
                environment = self._environment()
        _open[name] = _Open(environment, _files(self.path))

    def _environment(self) -> lmdb.Environment:
        _reserve(Path(f"{self.path}-lock"))
        # Without `metasync` a power failure may lose the last entries, but never damages the database.
        environment = lmdb.open(
            str(self.path),
            subdir=False,
            map_size=self.map_size,
            max_readers=_MOST_READERS,
            metasync=False,
            readahead=False,
        )
        # Readers of killed processes would keep space from being used again.
        environment.reader_check()
        return environment

    def _set_aside(self, reason: str) -> None:
        suffix = f".damaged-{uuid.uuid4().hex[:8]}"
        warnings.warn(
            f"{self.path} is not an LMDB database ({reason}): renamed to *{suffix}, and a new one is made", stacklevel=2
        )
        for path in (self.path, Path(f"{self.path}-lock")):
            with contextlib.suppress(FileNotFoundError):
                path.rename(f"{path}{suffix}")


def _reserve(lock: Path) -> None:
    """Make room for all of a lock file on the disk. LMDB writes to it through memory, and on a full disk a write to a
    part without room would end the process by SIGBUS. (Entries themselves are written by system calls, which raise.)
    """
    if not hasattr(os, "posix_fallocate"):
        return
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o755)
    try:
        status = os.fstat(file)
        size = max(_LOCK_SIZE, status.st_size)
        if status.st_size < size or status.st_blocks * 512 < size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot reserve
            raise
    finally:
        os.close(file)


class _Gate:
    """Threads that use LMDB databases share it. A thread that opens, resizes or forks keeps all others out."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._active = 0
        self._claims = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._claims)
            self._active += 1
        try:
            yield
        finally:
            with self._condition:
                self._active -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self.open()

    def close(self) -> None:
        """Wait until no thread is inside, and keep all others out."""
        self._condition.acquire()
        self._claims += 1
        try:
            self._condition.wait_for(lambda: not self._active)
        except BaseException:
            self._claims -= 1
            self.open()
            raise
        self._claims -= 1

    def open(self) -> None:
        self._condition.notify_all()
        self._condition.release()


@dataclass
class _Open:
    environment: lmdb.Environment
    files: tuple[tuple[int, int], ...]
    mapped: int = 0  # bytes that were read or written


def _is_cut_off(environment: lmdb.Environment) -> bool:
    """Whether the file ends before its last page. Reading this page would crash the process."""
    # The number of pages first: another process may add pages in between, and counts them after writing them.
    pages = environment.info()["last_pgno"] + 1
    return os.path.getsize(environment.path()) < pages * environment.stat()["psize"]


def _files(path: Path) -> tuple[tuple[int, int], ...]:
    """What identifies the files of a database: device and inode of each. ``()`` when a file is missing."""
    try:
        found = [os.stat(name) for name in (path, f"{path}-lock")]
    except OSError:
        return ()
    return tuple((status.st_dev, status.st_ino) for status in found)


# A database must not be opened twice in one process, so all datasets and threads share one connection.
_open: dict[str, _Open] = {}
_gate = _Gate()
_PAGES = 1 << 16  # bytes, a multiple of every machine's page size
# Pages that were read stay mapped, and count as memory of this process, until the database is closed.
_MOST_MAPPED = 1 << 24  # bytes

_MOST_READERS = 1024
_LOCK_SIZE = 64 * _MOST_READERS + 128  # bytes, as LMDB makes the lock file for so many readers

# For short operations on dictionaries of this package.
guard = threading.Lock()


def _before_fork() -> None:
    # A child must not use a connection of its parent. It can neither open the same database while it has inherited a
    # connection, nor close this connection, which would wait forever for threads that do not exist in the child. So at
    # a fork no database is open, and no lock is held.
    guard.acquire()
    _gate.close()
    while _open:
        _open.popitem()[1].environment.close()


def _after_fork() -> None:
    _gate.open()
    guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
