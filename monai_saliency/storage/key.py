"""The key of everything that is kept: a hash of the plain values that a result depends on, equal in every process.

Code is known by the name under which it is imported, and by the version of its package, or by the content of a user's
own file. A scan is known by its path, size and time, or by its checksum.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from monai.data import ImageReader, MetaTensor
from monai.inferers import Inferer
from monai.transforms import Compose
from monai.transforms.traits import RandomizableTrait

from monai_saliency.cases import Case
from monai_saliency.storage.files import files_below, while_unchanged
from monai_saliency.utils.precision import chosen_arithmetic
from monai_saliency.utils.tensors import plain

__all__ = [
    "Unfingerprintable",
    "checksum_of",
    "fingerprint",
    "input_files",
    "library_versions",
    "package_version",
    "paths_of",
    "scores_key",
]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)
_DRAWS = (RandomizableTrait, random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
# Attributes that decide no result: random state without random transforms, the file read last, where it runs.
_IDLE: dict[type, set[str]] = {
    Compose: {"R", "log_stats"},
    ImageReader: {"filenames", "has_series"},
    Inferer: {"device", "sw_device", "progress"},
}
_BEGUN = time.time()  # the user's code is imported later
_COMPILED = {"_compiled_call_impl", "_is_torch_compile", "_compile_kwargs"}  # attributes that torch.compile adds
_WRITTEN = {"monai.networks.nets.dynunet": {"heads"}}  # what a forward writes before it reads it
_LIBRARIES = ("monai_saliency", "monai", "torch", "numpy", "nibabel", "scikit-image")  # the last makes supervoxels


class Unfingerprintable(TypeError):
    """A value that cannot be identified: a lambda, a local function, an open file, an object of an extension module."""


def fingerprint(value: Any, files: bool = False) -> str:
    """The sha256 of a value: plain values, containers, arrays, tensors, networks, named functions and other objects.

    An object is known by its class and its attributes. Classes and functions are known by their importable names, and
    by the version of their package; the user's own code by the content of its file. The order of a dictionary and
    of a list counts, the order of a set and of attributes does not. Other code that these call, variables of their
    module, the files that they read, and environment variables do not count: a result that depends on them needs a
    name, such as a ``network_id``.

    With ``files``, text that names a file includes the file's content, by its size and time. Unidentified values, and
    code whose file has changed since the process began, raise :class:`Unfingerprintable`.
    """
    try:
        content = repr(_taken_apart(value, files))
    except RecursionError as error:
        raise Unfingerprintable(f"an object of {_name(type(value))}, which holds itself") from error
    return hashlib.sha256(content.encode()).hexdigest()


def scores_key(network: str, settings: Sequence[Any], case: Case, reads_file: bool = False) -> str:
    """The key under which the scores of a case are stored: a hash of all that decides them."""
    given = case.image, plain(case.labels), case.spacing, plain(case.within)
    decides = [library_versions(), network, list(settings), *given, chosen_arithmetic()]
    return fingerprint([*decides, [input_files(case.file), case.affine] if reads_file else []], files=True)[:32]


def _taken_apart(value: Any, files: bool) -> Any:
    """A value as nested lists of text."""
    kind = type(value)
    apart = functools.partial(_taken_apart, files=files)
    if kind in _PLAIN or isinstance(value, PurePath | torch.dtype | np.dtype):
        return [kind.__name__, repr(value), _mark(value) if files and isinstance(value, str | PurePath) else ""]
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, _DRAWS) and kind is not Compose:
        raise Unfingerprintable(f"the random transform or generator {_name(kind)} inside it")
    if kind in (list, tuple):
        return [kind.__name__, *map(apart, value)]
    if kind is dict:
        return ["dict", *([apart(key), apart(content)] for key, content in value.items())]
    if kind in (set, frozenset):
        return ["set", *sorted(repr(apart(member)) for member in value)]
    if isinstance(value, np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value, apart)
    if isinstance(value, torch.nn.Module):
        return _network(value, apart)
    if isinstance(value, _CODE):
        return _code(value)
    return _object(value, apart)


def _array(value: np.ndarray | np.generic) -> Any:
    if value.dtype.hasobject:
        raise Unfingerprintable("an array of objects")
    return ["array", str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()]


def _tensor(value: torch.Tensor, apart: Callable[[Any], Any]) -> Any:
    try:
        bare = value.detach().as_subclass(torch.Tensor)
        flat = bare.cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise Unfingerprintable(f"a tensor of layout {value.layout} and type {value.dtype}") from error
    meta = apart([value.meta, value.applied_operations]) if isinstance(value, MetaTensor) else ""
    return ["tensor", str(value.dtype), tuple(value.shape), hashlib.sha256(content.data).hexdigest(), meta]


def _network(network: torch.nn.Module, apart: Callable[[Any], Any]) -> Any:
    """The class of each part, its parameters and buffers, and its other attributes."""
    parts = []
    for name, part in network.named_modules(remove_duplicate=False):
        if not name.endswith("_guards_fn"):  # of an exported graph, which decide no output
            parts.append([name, apart(_part(part))])
    return parts


def _part(part: torch.nn.Module) -> list[Any]:
    """What decides the output of a module, its submodules apart."""
    attributes: dict[str, Any] = vars(part)
    tensors = {name: attributes.get(name) for name in ("_parameters", "_buffers")}
    if isinstance(part, torch.fx.GraphModule):  # torch.export adds a hook that checks its inputs
        return [part.code, tensors]
    if attributes.get("_forward_pre_hooks") or attributes.get("_forward_hooks"):
        raise Unfingerprintable(f"a hook on the forward of {type(part).__name__}")
    kind: Any = type(part)
    idle = _frame(kind) | _COMPILED | _WRITTEN.get(kind.__module__, set())
    others = {name: attributes[name] for name in sorted(attributes) if name not in idle}
    return [kind, tensors, others]


@functools.cache
def _frame(kind: Any) -> frozenset[str]:
    """The attributes that torch, and Lightning where it is used, keep on every module."""
    bases = [base for base in kind.__mro__ if base.__name__ == "LightningModule"]
    return frozenset(name for base in (torch.nn.Module, *bases) for name in vars(base()))


def _code(value: Any) -> Any:
    if isinstance(getattr(value, "__self__", None), _DRAWS):
        raise Unfingerprintable(f"the random function {value.__name__}")
    return _code_mark(value)


def _object(value: Any, apart: Callable[[Any], Any]) -> Any:
    """An object as pickle takes it apart: what makes it, its attributes and its items."""
    try:
        taken = value.__reduce_ex__(2)
    except Exception as error:
        words = f"an object of {_name(type(value))}, which holds more than its attributes show"
        raise Unfingerprintable(words) from error
    if isinstance(taken, str):  # a function, such as NumPy's
        return _code(value)
    make, arguments, state, items, pairs = (*taken, None, None, None)[:5]
    if isinstance(state, dict):
        state = dict(sorted(state.items()))
        for kind, idle in _IDLE.items():
            if isinstance(value, kind):
                state = {name: content for name, content in state.items() if name not in idle}
    return ["object", *map(apart, [make, arguments, state, list(items or ()), list(pairs or ())])]


@functools.lru_cache(maxsize=4096)
def _code_mark(value: Any) -> str:
    """What identifies a class or function: its importable name, the version of its code and the versions of its
    bases.
    """
    bare = value.__name__
    name = getattr(value, "__qualname__", None) or bare
    module, name = _place(value, name, bare)
    if not module:
        function = "a lambda" if "<lambda>" in name else "a local function"
        kind = "the local class" if isinstance(value, type) else function
        raise Unfingerprintable(f"{kind} ({name}), which no module holds under its name")
    homes = [base.__module__ for base in value.__mro__[:-1]] if isinstance(value, type) else [module]
    return f"{module}.{name} {[*map(_version_of, homes)]}"


def _place(value: Any, *names: str) -> tuple[str, str]:
    """The module that holds a class or function, and under which of some names; no module where none does."""
    # Functions written in C often name no module, or a module that does not hold them.
    for module in (getattr(value, "__module__", None), "torch", "torch.nn.functional", "numpy"):
        for name in names:
            if module and _held(module, name) is value:
                return module, name
    return "", names[0]


def _held(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _version_of(module: str) -> str:
    """The version of an installed module's package, or the hash of any other module's file."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    if not file and top in sys.stdlib_module_names:
        return f"python {sys.version_info[:2]}"
    if not file:
        raise Unfingerprintable(f"code of {module}, which is in no file")
    is_installed = top == "monai_saliency" or {"site-packages", "dist-packages"} & {*Path(file).parts}
    version = package_version(top) if is_installed else ""
    if version:
        return f"{top} {version}"
    if os.path.getmtime(file) > _BEGUN:  # what runs may be the older content
        raise Unfingerprintable(f"code of {module}, whose file has changed since this process began")
    return checksum_of(file)


@functools.cache
def package_version(package: str) -> str:
    """The version of an installed package, by the name that is imported, or that pip has; "" where there is none."""
    if version := getattr(sys.modules.get(package), "__version__", None):
        return str(version)
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def library_versions() -> dict[str, str]:
    """The versions of this package and of the packages that compute a result."""
    return {package: package_version(package) for package in _LIBRARIES}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def input_files(case: Any, checksum: bool = False) -> list[list[str]]:
    """The files of a case, and all in its folders, each with its size and time, or its checksum.

    A case is a path, or dictionaries and lists of them. A path that does not exist is left out, and so is the value of
    the key ``case``: the name of a case, such as "sub-01", may also be a folder in the working directory.
    """
    files = sorted({file for path in paths_of(case) for file in _files_of(path)})
    return [[file, checksum_of(file) if checksum else _mark(file)] for file in files]


@while_unchanged
def checksum_of(file: str | Path) -> str:
    """The sha256 of a file, which is read once while it stays as it is; "" where it cannot be read."""
    hasher = hashlib.sha256()
    try:
        with open(file, "rb") as content:
            while block := content.read(1 << 20):
                hasher.update(block)
    except OSError:
        return ""
    return hasher.hexdigest()


def _mark(file: str | PurePath) -> str:
    """The size and time of a file; "" where there is none."""
    if not os.path.isfile(file):
        return ""
    status = os.stat(file)
    return f"{status.st_size}-{status.st_mtime_ns}"


def paths_of(case: Any) -> Iterator[str]:
    """The texts in a case that may be paths."""
    if isinstance(case, Mapping):
        case = [value for key, value in case.items() if key != "case"]
    if isinstance(case, list | tuple):
        for value in case:
            yield from paths_of(value)
    elif isinstance(case, str | PurePath) and str(case):
        yield os.path.expanduser(case)


def _files_of(path: str) -> Iterator[str]:
    """The files of a path: itself, or all in a folder; not a named pipe, which would be waited for."""
    return filter(os.path.isfile, map(str, files_below(path)) if os.path.isdir(path) else [path])
