"""The files of a case, by their content.

A file is read once. Later its content is known by what the file system says of it: its place there, size, modification
time and change time, which no program can set. A process keeps what it knows, and a cache may keep it for the next one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

__all__ = ["checksum_of", "file_state", "input_files", "known_contents"]

#: the sha256 of a file in a given state, as far as it is known from an earlier process
Recall = Callable[[tuple[int, ...]], "str | None"]

# Formats with a header file and a file of voxels, which changes alone.
_TWO_FILES = {".hdr", ".img", ".mhd", ".nhdr", ".head", ".brik", ".par", ".rec"}
# Headers that name their files of voxels, in one line, or one in each line behind it.
_NAMES_OTHERS = {".mhd", ".mha", ".nhdr", ".nrrd"}
_DATA_FILE = re.compile(r"^(?:ElementDataFile\s*=|data ?file:)[ \t]*(.*?)[ \t\r]*$", re.MULTILINE | re.IGNORECASE)
_LONGEST_HEADER = 1 << 20
_MOST_FILES = 10_000
_checksums: dict[tuple[int, ...], str] = {}


def input_files(case: Any, recall: Recall | None = None, folder_keys: Collection[Any] | None = None) -> list[list[str]]:
    """The files of a case, each with the sha256 of its content.

    Paths are found under any key. Folders (of DICOM slices, for example) are too, but under ``case`` only where
    ``folder_keys`` has it. Of a format with two files, both are listed, and so are the files that a MetaImage or NRRD
    header names. A path that does not exist is left out, so that the fingerprint changes when it appears.

    Args:
        case: paths, or dictionaries and lists of them.
        recall: gives the content of a file by its :func:`file_state`, where an earlier process has read it.
        folder_keys: the keys of the case under which a text may name a folder; any by default.
    """
    files = sorted({file for path, is_folder in _paths(case, folder_keys) for file in _files_of(path, is_folder)})
    return [[file, checksum_of(file, recall)] for file in files]


def known_contents(case: Any, folder_keys: Collection[Any] | None = None) -> list[tuple[tuple[int, ...], str]]:
    """The state and the sha256 of those files of a case that this process has read, for a ``recall``.

    Args:
        case: as for :func:`input_files`.
        folder_keys: as for :func:`input_files`.
    """
    files = {file for path, is_folder in _paths(case, folder_keys) for file in _files_of(path, is_folder)}
    return [(state, _checksums[state]) for state in map(file_state, sorted(files)) if state in _checksums]


def checksum_of(file: str, recall: Recall | None = None) -> str:
    """The sha256 of a file; "" where it cannot be read.

    Args:
        file: its path.
        recall: as for :func:`input_files`.
    """
    state = file_state(file)
    if not state:
        return ""
    found = _checksums.get(state) or (recall(state) if recall else None)
    if found is None:
        try:
            found = _read(file)
        except OSError:
            return ""
        if file_state(file) != state:  # it was written meanwhile
            return found
    _checksums[state] = found
    return found


def _read(file: str) -> str:
    hasher = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def file_state(file: str) -> tuple[int, ...]:
    """By what the file system knows a file's content: device, number, size, modification and change time in ns."""
    try:
        status = os.stat(file)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _paths(case: Any, folder_keys: Collection[Any] | None, is_folder: bool = True) -> Iterator[tuple[Path, bool]]:
    """The paths in a case, each with whether it may be a folder."""
    if isinstance(case, Mapping):
        for key, value in case.items():
            # The name of a case, such as "sub-01", may also be a folder in the working directory.
            may_be = key != "case" if folder_keys is None else key in folder_keys
            yield from _paths(value, folder_keys, is_folder and may_be)
    elif isinstance(case, list | tuple):
        for value in case:
            yield from _paths(value, folder_keys, is_folder)
    elif isinstance(case, PurePath) or (isinstance(case, str) and case and "\0" not in case and len(case) < 4096):
        yield Path(case).expanduser() if str(case).startswith("~") else Path(case), is_folder


def _files_of(path: Path, is_folder: bool) -> Iterator[str]:
    try:
        if path.is_dir():
            if is_folder:
                yield from (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        elif path.is_file():
            yield str(path)
            if path.suffix.lower() in _TWO_FILES:
                yield from (str(other) for other in path.parent.iterdir() if other.name.startswith(f"{path.stem}."))
            if path.suffix.lower() in _NAMES_OTHERS:
                yield from (str(other) for other in _named_by(path) if other.is_file())
    except (OSError, TypeError, ValueError):  # a name that no file can have, or not a pattern
        return


def _named_by(header: Path) -> Iterator[Path]:
    """The files of voxels that a MetaImage or NRRD header names: one, a list, or a pattern and its numbers."""
    with open(header, "rb") as file:
        text = file.read(_LONGEST_HEADER).decode("utf-8", "surrogateescape")
    # An NRRD header ends with an empty line, a MetaImage header with this very line; voxels may follow.
    text = text if header.suffix.lower() in {".mhd", ".mha"} else re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    found = _DATA_FILE.search(text)
    if found is None or found[1].upper() == "LOCAL":
        return
    names = [found[1]]
    words = found[1].split()
    if words and words[0].upper() == "LIST":
        names = [line.strip() for line in text[found.end() :].splitlines()]
    elif "%" in found[1] and len(words) >= 3:
        numbers = [int(word) for word in words[1:4] if word.lstrip("-").isdigit()]
        first, last, step = (*numbers, 1)[:3] if len(numbers) >= 2 else (0, -1, 1)
        names = [words[0] % number for number in range(first, last + (1 if step > 0 else -1), step or 1)[:_MOST_FILES]]
    yield from (header.parent / name for name in names if name and "\0" not in name)
