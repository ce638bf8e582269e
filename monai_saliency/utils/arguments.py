"""Checks of arguments. Each error names the argument."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.utils import look_up_option

__all__ = [
    "a_path",
    "callable_network",
    "check_option",
    "finite_numbers",
    "flag",
    "indices",
    "instance",
    "number",
    "per_axis",
    "positive_numbers",
    "positive_or_none",
    "probability",
    "torch_device",
    "voxels_of_mm",
    "whole_number",
    "whole_numbers",
]


def check_option(name: str, value: Any, options: Collection[str]) -> Any:
    """Look up a choice among named options."""
    try:
        return look_up_option(value, options)
    except (ValueError, TypeError):
        # MONAI's own error does not name the parameter, and must not be the one that a user is shown as the cause.
        raise ValueError(f"`{name}` must be one of {sorted(options)}, got {value!r}") from None


def whole_numbers(name: str, value: Any, least: int) -> np.ndarray:
    """Check that a value is one or several whole numbers of at least ``least``."""
    numbers = _numbers(value)
    if numbers is None or numbers.dtype.kind not in "iu" or numbers.min() < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}")
    return numbers


def whole_number(name: str, value: Any, least: int) -> int:
    """One whole number of at least ``least``, as an ``int``."""
    numbers = whole_numbers(name, value, least)
    if isinstance(value, (list, tuple, range)) or len(numbers) != 1:
        raise ValueError(f"`{name}` must be one whole number of at least {least}, got {value!r}")
    return int(numbers[0])


def positive_numbers(name: str, value: Any) -> None:
    """Check that a value is one or several finite numbers above 0."""
    numbers = _numbers(value)
    if numbers is None or not bool((numbers > 0).all()):
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}")


def positive_or_none(name: str, value: float | None) -> float | None:
    """A number above 0, or None for what is found otherwise."""
    if value is not None:
        positive_numbers(name, value)
    return value


def finite_numbers(name: str, value: Any) -> None:
    """Check that a value is one or several finite numbers."""
    if _numbers(value) is None:
        raise ValueError(f"`{name}` must be one or several finite numbers, got {value!r}")


def number(name: str, value: Any, least: float | None = None) -> float:
    """One finite number, as a ``float``."""
    numbers = _numbers(value)
    if isinstance(value, (list, tuple)) or numbers is None or numbers.size != 1:
        raise ValueError(f"`{name}` must be a finite number, got {value!r}")
    if least is not None and numbers[0] < least:
        raise ValueError(f"`{name}` must be at least {least:g}, got {value}")
    return float(numbers[0])


def probability(name: str, value: Any) -> None:
    """Check that a number is in [0, 1]."""
    numbers = _numbers(value)
    if isinstance(value, (list, tuple)) or numbers is None or numbers.size != 1 or not 0 <= numbers[0] <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value if isinstance(value, (int, float)) else repr(value)}")


def indices(name: str, value: Any, what: str, words: str = "") -> list[int]:
    """One or several indices, as a list of ``int``. Whether they are in range is not checked."""
    found = _numbers(value)
    if found is None or found.dtype.kind not in "iu":
        empty = isinstance(value, Sized) and not isinstance(value, str) and not len(value)
        wrong = (
            f"name at least one {what}, got an empty list"
            if empty
            else f"be an index or a list of indices, got {value!r}"
        )
        raise ValueError(f"`{name}` must {wrong}" + (f"; or write {words}" if words else ""))
    return [int(each) for each in found]


def _numbers(value: Any) -> np.ndarray | None:
    """Finite numbers ``(n,)``, n at least 1; None for anything else: words, truth values, nested lists, None."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    try:
        found = np.atleast_1d(np.asarray(value))
    except (ValueError, TypeError, RuntimeError):  # ragged lists; tensors that numpy cannot take
        return None
    if found.dtype.kind not in "iuf" or found.ndim != 1 or not found.size or _holds_truth(value):
        return None
    return found if bool(np.isfinite(found).all()) else None


def _holds_truth(value: Any) -> bool:
    """Whether a list mixes truth values with numbers, which NumPy would make numbers of."""
    return isinstance(value, (list, tuple)) and any(isinstance(each, (bool, np.bool_)) for each in value)


def flag(name: str, value: Any) -> bool:
    """A truth value."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, got {value!r}")
    return bool(value)


def instance(
    name: str, value: Any, kind: type | tuple[type, ...], words: str, *, function: bool = False, none: bool = False
) -> Any:
    """Check that an argument is an object of a kind: not its class, its name, or a number in its place."""
    if isinstance(value, type):
        raise ValueError(
            f"`{name}` must be {words}, got the class {value.__name__}: write {value.__name__}(...), which makes one"
        )
    if isinstance(value, kind) or (function and callable(value)) or (none and value is None):
        return value
    if inspect.isroutine(value):
        got = f"the function {getattr(value, '__name__', value)}"
    elif value is None or isinstance(value, (str, bool, int, float)):
        got = repr(value)
    else:
        got = f"a {type(value).__name__}"
    raise ValueError(f"`{name}` must be {words}, got {got}")


def callable_network(network: Any) -> Any:
    """Check that a network can be called."""
    return instance("network", network, (), "a network or another callable on images (B, C, *spatial)", function=True)


def torch_device(name: str, value: Any) -> torch.device | None:
    """A device, or None."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"`{name}` must be a device such as 'cpu' or 'cuda:0', got {value!r}") from None


#: what a command line makes text of where its user means nothing; a folder of that name is ./null
_NO_PATHS = {"null", "none", "true", "false"}


def a_path(name: str, value: Any) -> Path:
    """A path."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ValueError(f"`{name}` must be a path, got {value!r}")
    if str(value).lower() in _NO_PATHS:
        raise ValueError(f"`{name}` must be a path, got {str(value)!r}: where none is meant, give an empty text ''")
    return Path(value)


def per_axis(name: str, value: Any, spatial_shape: Sequence[int]) -> tuple[Any, ...]:
    """One size for each spatial axis."""
    sizes = np.atleast_1d(np.asarray(value)).tolist()
    if len(sizes) == 1:
        sizes = sizes * len(spatial_shape)
    if len(sizes) != len(spatial_shape):
        raise ValueError(
            f"`{name}` must be one number or one per spatial axis, got {value} for an image of spatial shape "
            f"{tuple(spatial_shape)}"
        )
    return tuple(sizes)


def voxels_of_mm(sizes: Sequence[float], spacing: Sequence[float] | None) -> tuple[int, ...]:
    """Convert sizes in mm to the nearest whole numbers of voxels, at least 1. Half a voxel is rounded up."""
    if spacing is None:
        raise ValueError(
            "sizes in mm need the image's voxel sizes, which are unknown: give a MetaTensor with its affine (as "
            "LoadImaged does) or `spacings`, or give the sizes in voxels"
        )
    # Rounded first, since voxel sizes in files, and voxel sizes of oblique affines, are not exact.
    return tuple(max(1, int(round(size / edge, 4) + 0.5)) for size, edge in zip(sizes, spacing, strict=True))
