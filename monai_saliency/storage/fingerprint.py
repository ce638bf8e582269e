"""A hash of everything that a result depends on: settings, code and files. It is the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import monai
import nibabel
import numpy as np
import torch
from monai.data import ImageReader
from monai.transforms import Compose
from monai.transforms.inverse import TraceableTransform
from monai.transforms.traits import RandomizableTrait

from monai_saliency.version import __version__

__all__ = ["Unfingerprintable", "fingerprint", "input_files", "library_versions"]

# The code of these is identified by their versions, all other code by its source file.
_VERSIONED = {"monai": monai, "torch": torch, "numpy": np, "nibabel": nibabel}
# Formats with a header file and a file of voxels, which changes alone.
_TWO_FILES = {".hdr", ".img", ".mhd", ".nhdr", ".head", ".brik"}


class Unfingerprintable(TypeError):
    """A value that cannot be identified: a lambda, a local function, an object of an extension module."""


def fingerprint(value: Any) -> str:
    """The sha256 of a value: numbers, strings, containers, arrays, tensors, functions and whole transforms.

    The fingerprint of an object includes its class, the code of the class and of its bases (the version of monai,
    torch, numpy or nibabel, or the text of the source file), and all its attributes. It does not include the modules
    that its code imports.

    Example::

        fingerprint([ScaleIntensity(), 3])  # a string of 64 hexadecimal digits

    Args:
        value: the value.

    Raises:
        Unfingerprintable: when the value, or a value inside it, cannot be identified. It names that value.
    """
    hasher = hashlib.sha256()
    _feed(hasher, value, ())
    return hasher.hexdigest()


def library_versions() -> dict[str, str]:
    """The versions of this package, and of the packages that compute a cached result."""
    return {"monai_saliency": __version__} | {name: str(module.__version__) for name, module in _VERSIONED.items()}


def input_files(case: Any, checksum: bool = False) -> list[list[Any]]:
    """The files of a case, each with its size and modification time, or with its sha256.

    Paths are found under any key, folders (of DICOM slices, for example) under any key but ``case``. Of a format with
    two files, both are listed. A path that does not exist is left out, so that the fingerprint changes when it appears.

    Args:
        case: paths, or dictionaries and lists of them.
        checksum: read the files instead of trusting their size and modification time.
    """
    files = sorted({file for path in _paths(case) for file in _files_of(path)})
    return [[file, _checksum(file)] if checksum else [file, *_size_and_time(file)] for file in files]


def _paths(case: Any) -> Iterator[Path]:
    if isinstance(case, Mapping):
        for key, value in case.items():
            # The name of a case, such as "sub-01", may also be a folder in the working directory.
            if key != "case":
                yield from _paths(value)
    elif isinstance(case, list | tuple):
        for value in case:
            yield from _paths(value)
    elif isinstance(case, PurePath) or (isinstance(case, str) and case and "\0" not in case and len(case) < 4096):
        yield Path(case).expanduser() if str(case).startswith("~") else Path(case)


def _files_of(path: Path) -> Iterator[str]:
    try:
        if path.is_dir():
            yield from (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        elif path.is_file():
            yield str(path)
            if path.suffix.lower() in _TWO_FILES:
                yield from (str(other) for other in path.parent.iterdir() if other.name.startswith(f"{path.stem}."))
    except OSError:
        return


def _size_and_time(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


# A file is read again only when its change time differs. Unlike the modification time, programs cannot set it.
_checksums: dict[str, tuple[tuple[int, ...], str]] = {}


def _checksum(file: str) -> str:
    try:
        status = os.stat(file)
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known, digest = _checksums.get(file, ((), ""))
        if known != state:
            hasher = hashlib.sha256()
            with open(file, "rb") as content:
                while block := content.read(1 << 20):
                    hasher.update(block)
            digest = hasher.hexdigest()
            _checksums[file] = (state, digest)
        return digest
    except OSError:
        return ""


def _feed(hasher: Any, value: Any, above: tuple[int, ...]) -> None:
    """Add a value to the hash. ``above`` holds the ids of the containers around it, to cut cycles."""
    if id(value) in above:
        return _tag(hasher, "cycle", len(above) - above.index(id(value)))
    inside = (*above, id(value))
    for kinds, feed in _FEEDERS:
        if isinstance(value, kinds):
            return feed(hasher, value, inside)
    return _feed_object(hasher, value, inside)


def _tag(hasher: Any, kind: str, content: object = b"") -> None:
    # With their lengths, ("ab", "c") and ("a", "bc") differ.
    content = content if isinstance(content, bytes) else str(content).encode("utf-8", "surrogatepass")
    hasher.update(f"{kind}:{len(content)}:".encode() + content)


def _digest(value: Any, above: tuple[int, ...]) -> bytes:
    hasher = hashlib.sha256()
    _feed(hasher, value, above)
    return hasher.digest()


def _feed_plain(hasher: Any, value: Any, above: tuple[int, ...]) -> None:
    _tag(hasher, type(value).__name__, value if isinstance(value, bytes) else repr(value) if value is None else value)


def _feed_float(hasher: Any, value: float, above: tuple[int, ...]) -> None:
    _tag(hasher, "float", struct.pack("<d", value))


def _feed_enum(hasher: Any, value: Enum, above: tuple[int, ...]) -> None:
    _feed_class(hasher, type(value), above)
    _tag(hasher, "member", value.name)


def _feed_dict(hasher: Any, value: dict, above: tuple[int, ...]) -> None:
    _tag(hasher, "dict", len(value))
    _feed_subclass(hasher, value, dict, above)
    for pair in sorted(_digest(key, above) + _digest(content, above) for key, content in value.items()):
        hasher.update(pair)


def _feed_sequence(hasher: Any, value: list | tuple, above: tuple[int, ...]) -> None:
    base = list if isinstance(value, list) else tuple
    _tag(hasher, base.__name__, len(value))
    _feed_subclass(hasher, value, base, above)
    for content in value:
        _feed(hasher, content, above)


def _feed_set(hasher: Any, value: set | frozenset, above: tuple[int, ...]) -> None:
    _tag(hasher, "set", len(value))
    for digest in sorted(_digest(content, above) for content in value):
        hasher.update(digest)


def _feed_subclass(hasher: Any, value: Any, base: type, above: tuple[int, ...]) -> None:
    if type(value) is not base:
        _feed_class(hasher, type(value), above)
        _feed(hasher, dict(getattr(value, "__dict__", {})), above)


def _feed_array(hasher: Any, value: np.ndarray | np.generic, above: tuple[int, ...]) -> None:
    _tag(hasher, "array", f"{value.dtype.str if value.dtype.names is None else value.dtype.descr}{value.shape}")
    if value.dtype.hasobject:
        return _feed(hasher, value.tolist(), above)
    return _tag(hasher, "voxels", np.ascontiguousarray(value).tobytes())


def _feed_tensor(hasher: Any, value: torch.Tensor, above: tuple[int, ...]) -> None:
    if value.layout is not torch.strided or value.is_quantized:
        raise Unfingerprintable(f"a tensor of layout {value.layout} and type {value.dtype}")
    _tag(hasher, "tensor", f"{value.dtype}{tuple(value.shape)}{value.device.type}")
    plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    _tag(hasher, "voxels", plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    if type(value) is not torch.Tensor:
        _feed_class(hasher, type(value), above)
        _feed(hasher, value.__dict__, above)


def _feed_partial(hasher: Any, value: functools.partial, above: tuple[int, ...]) -> None:
    _tag(hasher, "partial")
    _feed(hasher, (value.func, value.args, value.keywords), above)


def _feed_function(hasher: Any, value: Callable, above: tuple[int, ...]) -> None:
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        _tag(hasher, "method", value.__name__)
        return _feed(hasher, owner, above)
    home = _home(value)
    if home is None:
        name = getattr(value, "__qualname__", value.__name__)
        kind = "a lambda" if "<lambda>" in name else "a local function" if "<locals>" in name else "a function"
        raise Unfingerprintable(f"{kind} ({name}), which no module holds under its name")
    _tag(hasher, "function", ".".join(home))
    return _tag(hasher, "code", _code(home[0], value))


def _home(function: Any) -> tuple[str, str] | None:
    """The module and name under which a function is found, which identify it. None if it is not found."""
    # Functions written in C often name no module, or a module that does not hold them.
    modules = [getattr(function, "__module__", None), "torch", "torch.nn.functional", "torch.special", "numpy"]
    names = {getattr(function, "__qualname__", function.__name__), function.__name__}
    places = ((module, name) for module in modules if module for name in sorted(names))
    return next((place for place in places if _named(*place) is function), None)


def _feed_class(hasher: Any, value: type, above: tuple[int, ...]) -> None:
    for kind in value.__mro__[:-1]:
        if "<locals>" in kind.__qualname__ and kind.__module__.partition(".")[0] not in _VERSIONED:
            raise Unfingerprintable(f"the local class {kind.__qualname__}")
        _tag(hasher, "class", f"{kind.__module__}.{kind.__qualname__}")
        _tag(hasher, "code", _code(kind.__module__, kind))


def _feed_module(hasher: Any, value: types.ModuleType, above: tuple[int, ...]) -> None:
    _tag(hasher, "module", value.__name__)


def _feed_object(hasher: Any, value: Any, above: tuple[int, ...]) -> None:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, RandomizableTrait) and kind is not Compose:
        raise Unfingerprintable(f"the random transform {name} inside it")
    if callable(value) and hasattr(value, "__name__") and _home(value):
        _feed_function(hasher, value, above)
        return
    slots = [slot for base in kind.__mro__ for slot in _slots(base)]
    # As pickle does: an object with more memory than its slots, a dictionary and weak references need holds more than
    # its attributes.
    if kind.__basicsize__ > object.__basicsize__ + (len(slots) + 2) * struct.calcsize("P") or kind.__itemsize__:
        raise Unfingerprintable(f"an object of {name}, which holds more than its attributes show")
    if not hasattr(value, "__dict__") and not slots:
        raise Unfingerprintable(f"an object of {name}, which shows no state")
    _tag(hasher, "object")
    _feed_class(hasher, kind, above)
    state = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | getattr(value, "__dict__", {})
    if kind is Compose:
        # Only random transforms, which are refused, use its random state. Its log changes no result.
        state = {key: content for key, content in state.items() if key not in {"R", "log_stats"}}
    if isinstance(value, ImageReader):
        # Some readers keep the name of the last file.
        state = {key: content for key, content in state.items() if key != "filenames"}
    if isinstance(value, TraceableTransform):
        # This attribute exists for each thread, and only after its first use.
        state = {**state, "_tracing": bool(value.tracing)}
    state = {key: content for key, content in state.items() if not isinstance(content, threading.local)}
    _feed(hasher, state, above)


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    slots = [slots] if isinstance(slots, str) else slots
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        f"{private}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        for slot in slots
        if slot not in {"__dict__", "__weakref__"}
    ]


def _named(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@functools.lru_cache(maxsize=4096)
def _code(module: str, owner: Any) -> str:
    """What identifies the code of a class or function: a version, or a hash of its source file."""
    top = module.partition(".")[0]
    if top in _VERSIONED or top in sys.stdlib_module_names:
        return top
    version = str(getattr(sys.modules.get(top), "__version__", ""))
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        source = Path(file).read_bytes() if file else inspect.getsource(owner).encode()
    except (OSError, TypeError) as error:
        raise Unfingerprintable(f"{module}.{owner.__qualname__}, whose source cannot be read") from error
    return f"{version}-{hashlib.sha256(source).hexdigest()}"


_FEEDERS: tuple[tuple[Any, Callable[[Any, Any, tuple[int, ...]], None]], ...] = (
    (Enum, _feed_enum),
    ((np.ndarray, np.generic), _feed_array),
    (float, _feed_float),
    ((type(None), bool, int, str, bytes, complex, range, slice, type(Ellipsis)), _feed_plain),
    ((PurePath, torch.dtype, torch.device, np.dtype), _feed_plain),
    (torch.Tensor, _feed_tensor),
    (dict, _feed_dict),
    ((list, tuple), _feed_sequence),
    ((set, frozenset), _feed_set),
    (functools.partial, _feed_partial),
    (type, _feed_class),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc), _feed_function),
    (types.ModuleType, _feed_module),
)
