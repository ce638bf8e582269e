"""Reading files of ``torch.save`` without running code in them."""

from __future__ import annotations

import functools
import pathlib
from enum import Enum
from typing import Any

import monai.utils.enums
import numpy as np
import torch
from monai.data import MetaTensor


def load_plain(file: Any, **settings: Any) -> Any:
    """``torch.load`` of tensors, arrays, numbers, and the types of MONAI's items. Anything else is refused."""
    _allow_types()
    return torch.load(file, weights_only=True, **settings)


@functools.cache
def _allow_types() -> None:
    """Let torch load further types, in this process from now on."""
    # The functions make arrays and numbers.
    types: list[Any] = [np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0]]
    types += [MetaTensor, np.ndarray, np.dtype, pathlib.PosixPath, pathlib.WindowsPath]
    types += _kinds(np.dtypes) + _kinds(np, np.generic) + _kinds(monai.utils.enums, Enum)
    torch.serialization.add_safe_globals(types)


def _kinds(module: Any, base: type = object) -> list[Any]:
    """The subclasses of a class in a module."""
    return [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
