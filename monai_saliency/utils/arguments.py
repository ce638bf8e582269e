"""Checks of arguments, and imports of optional packages. Each error names the argument, or the package."""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from monai.utils import OptionalImportError


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise OptionalImportError(f'{name} is not installed: pip install "monai-saliency[{extra}]"{why}') from None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one looks like: a letter or two differ. None where no name does."""
    similar = get_close_matches(name, list(known), n=1, cutoff=0.8 if len(name) > 2 else 0.6)
    return similar[0] if similar else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name: the known name that it looks like, or nothing."""
    found = nearest(name, known)
    return "" if found is None else f": did you mean `{found}`?"


def refuse_unknown(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse settings that a function does not have, by the nearest that it has."""
    for name in names:
        if name not in known:
            advice = did_you_mean(name, known) or f": it has {', '.join(known)}"
            raise TypeError(f"{owner} has no setting `{name}`{advice}")


def check_option(
    name: str, value: Any, options: Collection[str], further: str = "", elsewhere: Mapping[str, str] | None = None
) -> Any:
    """One of the named options, or what a dictionary of options holds under it. The error lists the options, what
    ``further`` is allowed in words, and the option that a misspelt one looks like; ``elsewhere`` are the names that
    other tools have for options.
    """
    if isinstance(value, str) and value in options:
        return options[value] if isinstance(options, Mapping) else value
    # Nothing but the error depends on the guess, so that of a short word another letter or two may differ.
    meant = {option: option for option in options} | dict(elsewhere or {})
    similar = get_close_matches(str(value).lower(), list(meant), n=1)
    advice = f": did you mean `{meant[similar[0]]}`?" if similar else ""
    raise ValueError(f"`{name}` must be one of {sorted(options)}{further}, got {value!r}{advice}")


def whole_numbers(name: str, value: Any, least: int) -> np.ndarray:
    """Check that a value is one or several whole numbers of at least ``least``."""
    numbers = _numbers(value)
    if numbers is None or numbers.dtype.kind not in "iu" or numbers.min() < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}")
    return numbers


def whole_number(name: str, value: Any, least: int) -> int:
    """One whole number of at least ``least``, as an ``int``."""
    numbers = whole_numbers(name, value, least)
    if len(numbers) != 1 or isinstance(value, Sequence):
        raise ValueError(f"`{name}` must be one whole number of at least {least}, got {value!r}")
    return int(numbers[0])


def positive_numbers(name: str, value: Any) -> None:
    """Check that a value is one or several finite numbers above 0."""
    numbers = _numbers(value)
    if numbers is None or numbers.min() <= 0:
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}")


def finite_numbers(name: str, value: Any, least: float = -math.inf) -> None:
    """Check that a value is one or several finite numbers of at least ``least``."""
    numbers = _numbers(value)
    if numbers is None:
        raise ValueError(f"`{name}` must be one or several finite numbers, got {value!r}")
    if numbers.min() < least:
        raise ValueError(f"`{name}` must be at least {least:g}, got {value}")


def number(name: str, value: Any, least: float | None = None) -> float:
    """One finite number, as a ``float``."""
    numbers = _numbers(value)
    if numbers is None or len(numbers) != 1 or isinstance(value, Sequence):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}")
    one = float(numbers[0])
    if least is not None and one < least:
        raise ValueError(f"`{name}` must be at least {least:g}, got {value}")
    return one


def fraction(name: str, value: Any) -> float:
    """One number above 0 and at most 1."""
    one = number(name, value)
    if not 0 < one <= 1:
        raise ValueError(f"`{name}` must be in (0, 1], got {value}")
    return one


def probability(name: str, value: Any) -> float:
    """One number in [0, 1]."""
    one = number(name, value)
    if not 0 <= one <= 1:
        raise ValueError(f"`{name}` must be in [0, 1], got {value}")
    return one


def indices(name: str, value: Any, words: str = "") -> list[int]:
    """One or several indices, as a list of ``int``. Whether they are in range is not checked."""
    numbers = _numbers(value)
    if numbers is None or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` must be an index or a list of indices, got {value!r}{words and f'; or write {words}'}"
        )
    return numbers.tolist()


def indices_or_word(name: str, value: Any, words: Sequence[str]) -> list[int] | str:
    """One or several indices, as a list of ``int``, or one of some words."""
    *others, last = map(repr, words)
    listed = f"{', '.join(others)} or {last}" if others else last
    if not isinstance(value, str):
        return indices(name, value, listed)
    if value not in words:
        numbers = "" if value.lower() in words else ". Its names are not known here: write the number, such as 1"
        raise ValueError(f"`{name}` must be a list of indices or {listed}, got {value!r}{numbers}")
    return value


def _numbers(value: Any) -> np.ndarray | None:
    """Finite numbers ``(n,)``, n at least 1; None for anything else: words, truth values, nested lists, None."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if isinstance(value, (list, tuple)) and any(isinstance(item, bool) for item in value):
        return None  # NumPy would make numbers of them
    try:
        numbers = np.atleast_1d(np.asarray(value))
    except (ValueError, TypeError, RuntimeError):  # ragged lists; tensors that numpy cannot take
        return None
    if numbers.dtype.kind not in "iuf" or numbers.ndim != 1 or not numbers.size:
        return None
    return numbers if bool(np.isfinite(numbers).all()) else None


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
    is_plain = value is None or isinstance(value, (str, bool, int, float))
    got = repr(value) if is_plain else f"a {type(value).__name__}"
    raise ValueError(f"`{name}` must be {words}, got {got}")


def written(value: Any) -> str:
    """An object as the call that makes it, with its first argument and those that are not the defaults, such as
    ``RISEMasks(num_masks=9)``: for ``__repr__`` of what keeps its arguments as attributes. Others are left out.
    """
    shown: list[str] = []
    for place, parameter in enumerate(inspect.signature(type(value)).parameters.values()):
        if parameter.kind is parameter.VAR_KEYWORD or not hasattr(value, parameter.name):
            continue
        argument = getattr(value, parameter.name)
        is_first = place == 0 and argument is not None
        if is_first or repr(argument) != repr(parameter.default):
            shown.append(f"{parameter.name}={_written_argument(argument)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def _written_argument(argument: Any) -> str:
    """An argument in one short text: a tensor by its shape, what has a long text by its name or class."""
    if isinstance(argument, torch.Tensor):
        return f"Tensor{tuple(argument.shape)}"
    text = repr(argument)
    if len(text) < 200 and " at 0x" not in text and "\n" not in text:
        return text
    return getattr(argument, "__name__", type(argument).__name__)


def sliding_inferer(inferer: Any) -> SlidingWindowInferer | None:
    """An inferer that cuts patches; None for any other, such as a wrapper around one."""
    return inferer if isinstance(inferer, SlidingWindowInferer) else None


def callable_network(network: Any, images: Any = None, call: str = "explain(images, network)") -> Any:
    """Check that a network can be called; where the images can, ``call`` shows the order of the two."""
    if callable(images) and not callable(network):
        raise ValueError(
            f"`network` is a {type(network).__name__}: the images and the network are swapped, write {call}"
        )
    return instance("network", network, (), "a network or another callable on images (B, C, *spatial)", function=True)


def torch_device(name: str, value: Any) -> torch.device | None:
    """A device, or None."""
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"`{name}` must be a device such as 'cpu' or 'cuda:0', got {value!r}") from None


def a_path(name: str, value: Any) -> Path:
    """A path."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(
            f"`{name}` must be a path, got the number {value}, as a command line makes of digits: write ./ before the "
            f"name, such as --{name} ./{value}"
        )
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ValueError(f"`{name}` must be a path, got {value!r}")
    if str(value).lower() in {"null", "none", "true", "false"}:  # as a command line makes them; a folder is ./null
        raise ValueError(f"`{name}` must be a path, got {str(value)!r}: where none is meant, give an empty text ''")
    return Path(value)


def per_axis(name: str, value: Any, spatial_dims: int) -> tuple[Any, ...]:
    """One number for each spatial axis, of one number or as many."""
    numbers = _numbers(value)
    if numbers is None or len(numbers) not in (1, spatial_dims):
        raise ValueError(f"`{name}` must be one number or one per spatial axis ({spatial_dims}), got {value!r}")
    sizes = numbers.tolist()
    return tuple(sizes if len(sizes) > 1 else sizes * spatial_dims)


def voxels_of_mm(sizes: Sequence[float], spacing: Sequence[float] | None) -> tuple[int, ...]:
    """Convert sizes in mm to the nearest whole numbers of voxels, at least 1. Half a voxel is rounded up."""
    if spacing is None:
        raise ValueError(
            "sizes in mm need the image's voxel sizes, which are unknown: give a MetaTensor with its affine (as "
            "LoadImaged does) or `spacing` in mm, or give the sizes in voxels"
        )
    # Rounded first, since voxel sizes in files, and voxel sizes of oblique affines, are not exact.
    return tuple(max(1, int(round(size / edge, 4) + 0.5)) for size, edge in zip(sizes, spacing, strict=True))
