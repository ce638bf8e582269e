"""What a case is called and where its files lie, apart from what they hold.

Preprocessing reads a scan's voxels and header, not its name. So a cohort whose folder was moved, or a case that was
renamed, is not computed again: its cached item is kept without these names, and gets those that the case has now.

This holds for code of MONAI and of this package alone. Any other code may look at a name, or at what lies beside a
file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from monai.data import MetaTensor

__all__ = ["CaseNames"]

_CASE = "case"


class CaseNames:
    """The names of a case: paths of its files and folders under any key, and what it is called under ``"case"``.

    Args:
        case: the case.
        contents: its files, each with the sha256 of its content
            (:func:`monai_saliency.storage.input_files.input_files`).

    Attributes:
        names: the names alone.
        unnamed: the case without its names, and what its files hold: equal for a case that was moved or renamed.
    """

    def __init__(self, case: dict[Any, Any], contents: Sequence[Sequence[str]]) -> None:
        self._case = case
        self._paths = [text for text in dict.fromkeys(_texts(_without_name(case))) if text and _is_path(text)]
        self.names = [case.get(_CASE), self._paths]
        self._tokens = {path: f"\0path {number}" for number, path in enumerate(self._paths)}
        # Readers go by a file's suffix.
        by_suffix = {path: f"{token}{_suffix(path)}" for path, token in self._tokens.items()}
        held = [[self._below(file), content] for file, content in contents]
        self.unnamed = [_replaced(_without_name(case), by_suffix, meta=False), _CASE in case, held]

    def _below(self, file: str) -> str:
        """A file by the path that it is or lies below, and its place there."""
        for path, token in self._tokens.items():
            if file == path or file.startswith(path.rstrip(os.sep) + os.sep):
                return f"{token}{file[len(path) :] or _suffix(file)}"
        return _suffix(file)  # the other file of a format with two

    def take_out(self, item: Any) -> Any | None:
        """An item without the names; None where it holds them in places from which they cannot be taken.

        Args:
            item: a result of this case. Its meta data are changed in place, unless None is returned.
        """
        parts = [part for path in self._paths for part in (path, os.path.basename(path), os.path.dirname(path)) if part]
        found = isinstance(item, dict)
        if found and ((_CASE in item) != (_CASE in self._case) or item.get(_CASE) != self._case.get(_CASE)):
            return None
        if found and any(self._is_copied_name(*each) for each in item.items()):
            return None
        for text in _texts(_without_name(item) if found else item):
            if text is None or (text not in self._tokens and any(part in text for part in parts)):
                return None
        item = _replaced(item, self._tokens)
        return {**item, _CASE: None} if found and _CASE in item else item

    def _is_copied_name(self, key: Any, value: Any) -> bool:
        """Whether a transform has put what the case is called under another key."""
        name = self._case.get(_CASE)
        return key not in self._case and isinstance(value, str | int) and value == name

    def put_in(self, item: Any) -> Any:
        """An item with the names that the case has now.

        Args:
            item: what :meth:`take_out` gave for this case, or for one that differs in its names alone.
        """
        item = _replaced(item, {token: path for path, token in self._tokens.items()})
        return {**item, _CASE: self._case[_CASE]} if isinstance(item, dict) and _CASE in item else item


def _without_name(case: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in case.items() if key != _CASE}


def _suffix(path: str) -> str:
    return "".join(Path(path).suffixes[-2:]).lower()


def _is_path(text: str) -> bool:
    return "\0" not in text and os.sep in text and len(text) < 4096 and os.path.exists(text)


def _texts(value: Any) -> Iterator[str | None]:
    """All text in a value; None for what may hold text that is not looked at."""
    if isinstance(value, str | PurePath):
        yield str(value)
    elif type(value) is dict:
        yield from _texts([*value, *value.values()])
    elif type(value) in (list, tuple):
        for content in value:
            yield from _texts(content)
    elif isinstance(value, MetaTensor):
        yield from _texts([value.meta, value.applied_operations])
    elif isinstance(value, bytes | dict | list | tuple | set | frozenset) or _is_of_text(value):
        yield None


def _is_of_text(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biufc"


def _replaced(value: Any, names: Mapping[str, str], meta: bool = True) -> Any:
    """A value whose texts are replaced; those of meta data in place."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, PurePath):
        return type(value)(names[str(value)]) if str(value) in names else value
    if type(value) is dict:
        return {key: _replaced(content, names, meta) for key, content in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(content, names, meta) for content in value)
    if meta and isinstance(value, MetaTensor):
        value.meta = _replaced(value.meta, names)
        value.applied_operations = _replaced(value.applied_operations, names)
    return value
