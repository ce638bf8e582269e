"""Where cached bytes are kept: in memory, in files, in an LMDB database. Safe with threads, forks and processes.

A backend has ``get(key) -> bytes or None`` and ``put(key, data)``, and raises ``OSError`` for what the machine refuses.
It can be sent to another process, where it opens its own connections; bytes in memory are not sent.
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
from typing import Any, Protocol, TypeAlias

import lmdb
import numpy as np

from monai_saliency.storage.files import remove_stale, temporary_path

__all__ = ["Backend", "DiskBackend", "LMDBBackend", "MemoryBackend"]

Bytes: TypeAlias = "bytes | bytearray"


class Backend(Protocol):
    """What a cache needs."""

    trusted: bool  # nobody else can have changed the bytes

    def get(self, key: str) -> Bytes | None: ...

    def put(self, key: str, data: Bytes) -> None: ...


class MemoryBackend:
    """Bytes in this process's memory.

    Args:
        limit: the most entries kept, the last used ones; all by default.
        behind: a slower backend, asked for what is not in memory.
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
    """One file an entry. The folder may be shared by any number of processes, also on a network file system.

    What processes left half written that were killed on this machine is removed.

    Args:
        folder: made when first written to.
    """

    trusted = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        remove_stale(self.folder, "??")  # where entries are; a folder may hold other things

    def path(self, key: str) -> Path:
        """The entry's file."""
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
    """Entries of an LMDB database, for one machine: it must not lie on a network file system.

    Args:
        path: the database's file, made when first needed; its lock file lies beside it.
        map_size: bytes that the database may hold at first. It grows as needed.
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
                # NumPy copies without Python's lock, so that other threads go on while pages come from the disk.
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
        """Do ``work``, which needs ``size`` bytes of room, with the database open and large enough."""
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
                    # Another process has grown it.
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
            # Its files were removed or replaced, or it has mapped enough of them.
            _open.pop(name).environment.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            environment = self._environment()
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            self._set_aside(str(error))
            environment = self._environment()
        if _is_cut_off(environment):
            environment.close()
            # Another process may have set it aside by now, and have made this one.
            environment = self._environment()
            if _is_cut_off(environment):
                environment.close()
                self._set_aside("it is cut off")
                environment = self._environment()
        _open[name] = _Open(environment, _files(self.path))

    def _environment(self) -> lmdb.Environment:
        # Without `metasync` a power failure may lose the last entries, but never harms the database.
        environment = lmdb.open(
            str(self.path), subdir=False, map_size=self.map_size, max_readers=1024, metasync=False, readahead=False
        )
        # Readers of processes that were killed keep space from being used again.
        environment.reader_check()
        return environment

    def _set_aside(self, reason: str) -> None:
        suffix = f".damaged-{uuid.uuid4().hex[:8]}"
        warnings.warn(f"{self.path} is no LMDB database ({reason}): renamed to *{suffix}, made anew", stacklevel=2)
        for path in (self.path, Path(f"{self.path}-lock")):
            with contextlib.suppress(FileNotFoundError):
                path.rename(f"{path}{suffix}")


class _Gate:
    """Shared by threads that use LMDB databases; closed to all others by one that opens, resizes or forks."""

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
        """Wait until nobody is inside, and keep all others out."""
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
    mapped: int = 0  # bytes that went through it


def _is_cut_off(environment: lmdb.Environment) -> bool:
    """Whether the file ends before its last page does: to read that would end the process."""
    # The pages first: another process may write some more in between, and counts them once they are in the file.
    pages = environment.info()["last_pgno"] + 1
    return os.path.getsize(environment.path()) < pages * environment.stat()["psize"]


def _files(path: Path) -> tuple[tuple[int, int], ...]:
    """What tells the files of a database from others of their names, ``()`` where they are missing."""
    try:
        found = [os.stat(name) for name in (path, f"{path}-lock")]
    except OSError:
        return ()
    return tuple((status.st_dev, status.st_ino) for status in found)


# LMDB forbids to open a database twice in a process, so all datasets and threads share one connection.
_open: dict[str, _Open] = {}
_gate = _Gate()
_PAGES = 1 << 16  # bytes, a multiple of every machine's page size
# Pages that were read stay mapped and count as this process's memory until the database is closed.
_MOST_MAPPED = 1 << 24  # bytes

# For short work on this package's own dictionaries.
guard = threading.Lock()


def _before_fork() -> None:
    # A child must not use a connection of its parent, nor open the same database while it has inherited one, nor close
    # it, which waits forever for threads that did not follow. So nothing is open, and no lock held, at a fork.
    guard.acquire()
    _gate.close()
    while _open:
        _open.popitem()[1].environment.close()


def _after_fork() -> None:
    _gate.open()
    guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
