"""Files that appear whole or not at all, that are read once while they stay the same, and locks."""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

from monai_saliency.errors import AdviceError, CaseError, OutputError

__all__ = ["atomic_path", "case_file", "locked", "remove_stale", "while_unchanged"]

logger = logging.getLogger(__name__)

_TEMPORARY = ".tmp-"
_LEFT = 3600  # seconds since the last byte, after which nobody writes to a temporary file any more
# Errors of the file system about one name; another name may work.
_BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EISDIR}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def case_file(folder: Path, case: str, ending: str) -> Path:
    """The file of a case below an output folder. CaseError for a name that leads out of the folder."""
    if ".." in Path(case).parts or Path(case).is_absolute():
        raise CaseError(case, f"its name leads out of {folder}: give its item a `case` without '..' or a root")
    return folder / f"{case}{ending}"


def error_key(key: str) -> str:
    """The key, and so the ending of the file's name, of the standard error of a map under a key: ``standard_error`` for
    ``saliency``, ``<key>_standard_error`` for another.
    """
    return "standard_error" if key == "saliency" else f"{key}_standard_error"


def files_below(folder: str | Path) -> Iterator[Path]:
    """The files below a folder, and links to files that do not exist. Links to folders are followed once; hidden files
    are left out.
    """

    def refuse(error: OSError) -> None:
        raise error  # else the scans of a folder that cannot be read would be left out

    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        above = {os.path.realpath(parent) for parent in (Path(place), *Path(place).parents)}
        seen = [name for name in folders if not name.startswith(".")]
        folders[:] = [name for name in seen if os.path.realpath(os.path.join(place, name)) not in above]
        for name in names:
            if not name.startswith("."):
                yield Path(place, name)


@contextmanager
def atomic_path(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path next to ``path`` to write to. It is renamed to ``path`` at the end, and removed on any error."""
    path = Path(path)
    # A name that no other thread, process or machine uses.
    temporary = path.with_name(f"{_TEMPORARY}{uuid4().hex[:12]}-{path.name[-50:]}")
    try:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if durable:
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file by :func:`atomic_path`; text in UTF-8."""
    with atomic_path(path, durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into errors that name the file and say what to do."""
    try:
        yield
    except OSError as error:
        words = f"cannot write {path}: {error.strerror or error}. "
        if error.errno in _BAD_NAME:  # a matter of this one case
            raise AdviceError(f"{words}Rename the scan, or choose another folder") from error
        raise OutputError(
            f"{words}What was written before is whole; free space, mend the permissions or choose another folder, and "
            "run again"
        ) from error


def remove_stale(folder: str | Path, below: str = "**") -> None:
    """Remove temporary files that processes left when they were killed: those nobody has written to for an hour."""
    for path in Path(folder).glob(f"{below}/{_TEMPORARY}*"):
        with suppress(OSError):  # a folder that cannot be written fails at its first file, with a message
            if path.stat().st_mtime < time.time() - _LEFT:
                path.unlink()


@contextmanager
def locked(path: str | Path, wait: bool = True) -> Iterator[str | None]:
    """Hold a lock on a file that exists only for this lock, and write into the file who holds it.

    The operating system ends the lock with the process, even when the process is killed. The file stays. Where the
    file system has no locks, as on some network file systems, the block runs without a lock, and one warning is logged.

    Without ``wait`` the block runs at once. It gets None when this process holds the lock, otherwise who holds it.
    """
    path, holder = Path(path), None
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One thread takes a claim, and the thread that writes gives it back.
            stack.enter_context(FileLock(path, timeout=-1 if wait else 0, thread_local=False))
            with suppress(OSError):  # the text is for people: a full disk must not cost the lock
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except Timeout:
            holder = "another run"
            with suppress(OSError):  # on SMB nobody can read a locked file
                holder = path.read_text(errors="replace").strip() or holder
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                with _naming(path):
                    raise
            _warn_no_locks(str(error))
        yield holder


@functools.cache
def _warn_no_locks(reason: str) -> None:
    logger.warning(
        "this file system has no locks (%s): start no second run on this folder, for it would do the same work", reason
    )


def while_unchanged(read: Callable[[Any], str]) -> Callable[[Any], str]:
    """Have a function of a path read the file once, and again when its size or times have changed."""

    @functools.lru_cache(maxsize=1 << 18)  # an archive's folder may hold many series
    def cached(path: Any, *state: int) -> str:
        return read(path)

    @functools.wraps(read)
    def checked(path: Any) -> str:
        try:
            status = os.stat(path)
        except OSError:  # such as a link to a file that is not there
            return read(path)
        return cached(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    return checked
