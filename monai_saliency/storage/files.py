"""Read scans, and write files that appear whole or not at all."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import nibabel as nib
from filelock import FileLock, Timeout
from nibabel.spatialimages import SpatialImage

from monai_saliency.errors import AdviceError, OutputError

__all__ = ["atomic_path", "is_running", "load_scan", "locked", "remove_stale", "temporary_path", "this_process"]

logger = logging.getLogger(__name__)

_PROCESS = re.compile(r"\d+(\.\d+)?")
_LONGEST_NAME = 255  # bytes, of file systems in use
# What the file system says of one name. Other names may do.
_BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EISDIR}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def atomic_path(path: str | Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path next to ``path`` to write to. It is renamed to ``path`` at the end, and removed on any error."""
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if durable:
                _sync(temporary)
            os.replace(temporary, path)
            if durable:
                _sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Some systems cannot do it for folders."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    number = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError:
        if not is_folder:
            raise
    finally:
        os.close(number)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into errors that name the file and say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _BAD_NAME:  # a matter of this one case
            raise AdviceError(
                f"cannot write {path}: {error.strerror or error}. Rename the scan, or choose another folder"
            ) from error
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}. What was written before is whole; free space, mend the "
            "permissions or choose another folder, and run again"
        ) from error


def temporary_path(path: Path) -> Path:
    """A name next to ``path`` that no other thread, process or machine uses."""
    prefix, name = f"{_temporary_prefix(this_process())}{uuid4().hex[:8]}-", path.name
    while len(os.fsencode(prefix + name)) > _LONGEST_NAME:
        name = name[1:]
    return path.with_name(prefix + name)


def _temporary_prefix(process: str) -> str:
    return f".tmp-{re.sub('[^A-Za-z0-9]', '', socket.gethostname())}-{process}-"


def remove_stale(folder: str | Path, below: str = "**") -> None:
    """Remove the temporary files of processes of this machine that were killed. (On Windows none are removed.)"""
    for path in Path(folder).glob(f"{below}/{_temporary_prefix('*')}*"):
        process = path.name.split("-")[2]
        with suppress(OSError):  # a folder that cannot be written fails at its first file, with a message
            if _PROCESS.fullmatch(process) and not is_running(process):
                path.unlink(missing_ok=True)


def this_process() -> str:
    """The number of this process and, on Linux, its start time, since numbers are used again."""
    return ".".join(filter(None, [str(os.getpid()), _started(os.getpid())]))


def is_running(process: str) -> bool:
    """Whether this machine still runs a process, as :func:`this_process` names it. Always True on Windows."""
    if os.name == "nt":  # where `os.kill` with 0 sends Ctrl-C
        return True
    number, _, started = process.partition(".")
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not started or _started(int(number)) in ("", started)


def _started(process: int) -> str:
    """The start time of a process in ticks of the system's clock; "" on systems that do not report it."""
    try:
        # The 20th field after the command, which may hold spaces and brackets.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def load_scan(path: str | Path) -> SpatialImage:
    """A scan or label map with its header and affine. Its voxels are read when they are used."""
    image = nib.load(path)
    if not isinstance(image, SpatialImage):
        raise ValueError(f"{path} is not a scan that nibabel reads, but a {type(image).__name__}")
    return image


@contextmanager
def locked(path: str | Path, wait: bool = True) -> Iterator[str | None]:
    """Hold a lock on a file that exists only for this lock, and write into the file who holds it.

    The operating system ends the lock with the process, even when the process is killed. The file stays. Where the
    file system has no locks, as on some network file systems, the block runs without a lock, and one warning is logged.

    Args:
        path: the file.
        wait: wait while somebody else holds the lock. Otherwise the block runs at once.

    Yields:
        None when this process holds the lock, otherwise who holds it.

    Raises:
        OutputError: when the file cannot be made or opened.
        ValueError: when the file system does not take the file's name.
    """
    path, holder = Path(path), None
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path, timeout=-1 if wait else 0))
            with suppress(OSError):  # the text is for people: a full disk must not cost the lock
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except Timeout:
            with suppress(OSError):  # on SMB nobody can read a locked file
                holder = path.read_text(errors="replace").strip()
            holder = holder or "another run"
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
