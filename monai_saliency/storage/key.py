"""The key of everything that is kept: a hash of the plain values that a result depends on, equal in every process.

Objects are taken apart as pickle does it. Code is known by the name under which it is imported, and by the version of
its package, or by the content of a user's own file. A scan is known by its path, size and time, or by its checksum.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import os
import random
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata, util
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import monai
import nibabel
import numpy as np
import torch
from monai.data import ImageReader
from monai.inferers import Inferer
from monai.transforms import Compose
from monai.transforms.inverse import TraceableTransform
from monai.transforms.traits import RandomizableTrait

from monai_saliency.utils.monai_private import is_compiled, script_digest
from monai_saliency.version import __version__

__all__ = ["Unfingerprintable", "checksum_of", "fingerprint", "input_files", "library_versions", "network_layout"]
__all__ += ["network_tensors", "package_version"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_DRAWS = (RandomizableTrait, random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
# Attributes that decide no result: random state without random transforms, the file read last, where it runs.
_IDLE: tuple[tuple[type, set[str]], ...] = (
    (Compose, {"R", "log_stats"}),
    (ImageReader, {"filenames", "has_series"}),
    (Inferer, {"device", "sw_device", "progress"}),
)
# Attributes of a module that say where it runs, or that torch.compile and TorchScript add.
_PLACES = {"rank", "local_rank", "global_rank", "device_id", "device_index"}
_COMPILERS = {"_compiled_call_impl", "_is_torch_compile", "_compile_kwargs", "__overloads__"}
_LIBRARIES = {"monai": monai, "torch": torch, "numpy": np, "nibabel": nibabel}
_PYTHON = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = {"site-packages", "dist-packages"}
# Formats whose voxels may be in another file of the same name.
_TWO_FILES = {".hdr", ".img", ".mhd", ".mha", ".nhdr", ".nrrd", ".head", ".brik", ".par", ".rec"}


class Unfingerprintable(TypeError):
    """A value that cannot be identified: a lambda, a local function, an open file, an object of an extension module."""


def fingerprint(value: Any, files: bool = False) -> str:
    """The sha256 of a value: plain values, containers, arrays, tensors, networks, named functions and other objects.

    An object is known by its class and its attributes. Classes and functions are known by their importable names, and
    by the version of their package; those of the user's own by the content of their file. The order of a dictionary and
    of a list counts, the order of a set and of attributes does not. Other code that these call, the files that they
    read, and environment variables do not count: a result that depends on them needs a name, such as a ``network_id``.

    Args:
        value: the value.
        files: whether text that names a file stands for the file's content too, by its size and time.

    Returns:
        64 hexadecimal digits.

    Raises:
        Unfingerprintable: when the value, or a value inside it, cannot be identified. The text names it.
    """
    walk = _Walk(files)
    walk.feed(value)
    return walk.hasher.hexdigest()


class _Walk:
    """One walk over a value, which adds all that it meets to a hash."""

    def __init__(self, files: bool) -> None:
        self.hasher = hashlib.sha256()
        self._files = files
        self._above: list[int] = []

    def add(self, kind: str, content: object = b"") -> None:
        # With their lengths, ("ab", "c") and ("a", "bc") differ.
        content = content if isinstance(content, bytes) else str(content).encode("utf-8", "surrogatepass")
        self.hasher.update(f"{kind}:{len(content)}:".encode() + content)

    def feed(self, value: Any) -> None:
        if id(value) in self._above:
            return self.add("cycle", len(self._above) - self._above.index(id(value)))
        self._above.append(id(value))
        try:
            return self._inside(value)
        finally:
            self._above.pop()

    def _inside(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._plain(value)
        elif isinstance(value, _DRAWS) and kind is not Compose:
            raise Unfingerprintable(f"the random transform or generator {_name(kind)} inside it")
        elif kind in (list, tuple, dict):
            self._container(value)
        elif kind in (set, frozenset):
            self.add("set", sorted(fingerprint(each, self._files) for each in value))
        else:
            feed = next((feed for kinds, feed in _BY_KIND if isinstance(value, kinds)), _Walk._object)
            feed(self, value)

    def _plain(self, value: Any) -> None:
        self.add(type(value).__name__, value if isinstance(value, bytes) else repr(value))
        if self._files and isinstance(value, str | PurePath) and (os.sep in str(value) or "." in str(value)):
            self.add("file", _mark(str(value)))

    def _container(self, value: Any) -> None:
        self.add(type(value).__name__, len(value))
        # A dictionary in its order, which is the order of a loop over it.
        for each in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            self.feed(each)

    def _array(self, value: np.ndarray | np.generic) -> None:
        self.add("array", f"{value.dtype.str if value.dtype.names is None else value.dtype.descr}{value.shape}")
        if isinstance(value, np.ma.MaskedArray):
            self.feed(np.asarray(value.mask))
        if value.dtype.hasobject:
            return self.feed(value.tolist())
        return self.add("values", np.ascontiguousarray(value).tobytes())

    def _tensor(self, value: torch.Tensor) -> None:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise Unfingerprintable(f"a tensor of layout {value.layout} and type {value.dtype} on {value.device}")
        self.add("tensor", f"{value.dtype}{tuple(value.shape)}")
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        self.add("values", plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        # Meta data, without the marks of torch.compile.
        self._attributes({name: held for name, held in vars(value).items() if not name.startswith("_dynamo")})

    def _network(self, value: torch.nn.Module) -> None:
        self.feed(network_layout(value))
        self.feed({name: tensor.detach() for name, tensor in network_tensors(value).items()})

    def _code(self, value: Any) -> None:
        if isinstance(getattr(value, "__self__", None), _DRAWS):
            raise Unfingerprintable(f"the random function {value.__name__}")
        if isinstance(value, types.MethodType):
            return self.feed([value.__func__, value.__self__])
        if isinstance(value, types.ModuleType):
            return self.add("module", f"{value.__name__} {_version_of(value.__name__)}")
        return self.add("code", _code_mark(value))

    def _object(self, value: Any) -> None:
        """Add an object as pickle takes it apart: what makes it, its attributes and its items."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            taken = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception as error:
            name = _name(type(value))
            raise Unfingerprintable(f"an object of {name}, which holds more than its attributes show") from error
        if isinstance(taken, str):
            return self._code(value)
        make, arguments, state, items, pairs = (*taken, None, None, None)[:5]
        self.add("object")
        self.feed([make, arguments])
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}  # attributes in slots
        idle = {name for kind, names in _IDLE if isinstance(value, kind) for name in names}
        if isinstance(state, dict):
            self._attributes({name: held for name, held in state.items() if name not in idle})
        else:
            self.feed(state)
        # Tracing has a value for each thread, which pickle leaves out.
        self.feed([list(items or ()), list(pairs or ()), isinstance(value, TraceableTransform) and value.tracing])
        return None

    def _attributes(self, state: Mapping[str, Any]) -> None:
        """Add attributes by their names, in whichever order they were set."""
        self.feed(dict(sorted(state.items())))


_BY_KIND: tuple[tuple[Any, Any], ...] = (
    ((np.ndarray, np.generic), _Walk._array),
    (torch.Tensor, _Walk._tensor),
    (torch.nn.Module, _Walk._network),
    ((type, types.FunctionType, types.BuiltinFunctionType, np.ufunc), _Walk._code),
    ((types.MethodType, types.ModuleType), _Walk._code),
    ((PurePath, torch.dtype, torch.device, np.dtype), _Walk._plain),
)


def network_layout(network: torch.nn.Module) -> list[Any]:
    """All of a module but its parameters and buffers: for each part its class, its attributes and its parts."""
    if isinstance(network, torch.jit.ScriptModule):
        return ["TorchScript", script_digest(network)]
    held, parts = vars(network), vars(network)["_modules"]
    if is_compiled(network):
        return network_layout(parts["_orig_mod"])
    if isinstance(network, torch.fx.GraphModule):  # torch.export adds a hook that checks its inputs
        own: list[Any] = ["graph", network.code]
    elif held["_forward_pre_hooks"] or held["_forward_hooks"]:
        raise Unfingerprintable(f"a hook on the forward of {type(network).__name__}")
    else:
        attributes = {name: value for name, value in held.items() if not _is_idle(network, name, value)}
        own = [type(network), dict(sorted(attributes.items()))]
    # The guards of an exported graph decide no output.
    inside = [
        (name, None if part is None else network_layout(part)) for name, part in parts.items() if name != "_guards_fn"
    ]
    return [*own, inside]


def _is_idle(network: torch.nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute of a module decides no output, or is walked elsewhere."""
    # MONAI's DynUNet writes its heads in each forward before it reads them.
    kind: Any = type(network)
    is_written = name == "heads" and kind.__module__ == "monai.networks.nets.dynunet"
    return is_written or isinstance(value, torch.device) or name in _frame(kind) | _PLACES | _COMPILERS


@functools.cache
def _frame(kind: type) -> frozenset[str]:
    """The attributes that torch, and Lightning where it is used, keep on every module."""
    bases = [base for base in kind.__mro__ if base.__name__ == "LightningModule"]
    return frozenset(name for base in (torch.nn.Module, *bases) for name in vars(base()))


def network_tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, those that parts share under each of their names."""
    found = [network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False)]
    return {name.replace("_orig_mod.", ""): tensor for each in found for name, tensor in each}


@functools.lru_cache(maxsize=4096)
def _code_mark(value: Any) -> str:
    """What identifies a class or function: its importable name, and the versions of its code and of its bases."""
    bare = getattr(value, "__name__", type(value).__name__)
    name = getattr(value, "__qualname__", None) or bare
    # Functions written in C often name no module, or a module that does not hold them.
    modules = [getattr(value, "__module__", None), "torch", "torch.nn.functional", "numpy"]
    places = [(module, each) for module in modules if module for each in (name, bare)]
    module, name = next((place for place in places if _held(*place) is value), ("", name))
    if not module:
        kind = (
            "the local class" if isinstance(value, type) else "a lambda" if "<lambda>" in name else "a local function"
        )
        raise Unfingerprintable(f"{kind} ({name}), which no module holds under its name")
    homes = [each.__module__ for each in value.__mro__[:-1]] if isinstance(value, type) else [module]
    # Ours list the other packages that they compute with.
    uses = getattr(value, "packages", ()) if module.startswith("monai_saliency.") else ()
    return f"{module}.{name} {[*map(_version_of, homes), *map(package_version, uses)]}"


def _held(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _version_of(module: str) -> str:
    """The version of an installed module's package, or the hash of the file of the user's own module."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    if top == "builtins" or (top in sys.stdlib_module_names and top != "__main__" and not file):
        return f"python {sys.version_info[:2]}"
    if not file:
        raise Unfingerprintable(f"code of {module}, which is in no file")
    real = os.path.realpath(file)
    if top == "monai_saliency" or _PACKAGES & {*Path(real).parts} or real.startswith(_PYTHON):
        return f"{top} {package_version(top)}"
    return checksum_of(file)


@functools.cache
def package_version(package: str) -> str:
    """The version of an installed package, by the name that is imported; "" where there is none."""
    if package in sys.stdlib_module_names:
        return ""
    if package == "monai_saliency":
        return __version__
    if version := getattr(sys.modules.get(package), "__version__", None):
        return str(version)
    names = metadata.packages_distributions().get(package, ())
    return ", ".join(metadata.version(name) for name in names)


def library_versions() -> dict[str, str]:
    """The versions of this package and of the packages that compute a result, with CuPy and cuCIM where installed."""
    found = {"monai_saliency": __version__} | {name: str(module.__version__) for name, module in _LIBRARIES.items()}
    others = [name for name in ("cupy", "cucim") if name in sys.modules or util.find_spec(name)]
    return found | {name: package_version(name) for name in others}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def input_files(case: Any, checksum: bool = False, folder_keys: Collection[Any] | None = None) -> list[list[str]]:
    """The files of a case, and all in its folders, each with its size and time, or its checksum.

    Args:
        case: paths, or dictionaries and lists of them. A path that does not exist is left out.
        checksum: read the files, and identify them by the sha256 of their content.
        folder_keys: the keys of the case under which a text may name a folder; None for any but ``case``.
    """
    files = sorted({file for path, is_folder in _paths(case, folder_keys) for file in _files_of(path, is_folder)})
    return [[file, checksum_of(file) if checksum else _mark(file)] for file in files]


def checksum_of(file: str | Path) -> str:
    """The sha256 of a file, which is read once while it stays as it is; "" where it cannot be read."""
    try:
        status = os.stat(file)
        return _checksum(str(file), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except OSError:
        return ""


@functools.lru_cache(maxsize=65536)
def _checksum(file: str, *state: int) -> str:
    hasher = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _mark(file: str) -> str:
    """The size and time of a file; "" where there is none."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}" if os.path.isfile(file) else ""


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
        if path.is_dir() and is_folder:
            yield from (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        elif path.is_file():
            yield str(path)
            if path.suffix.lower() in _TWO_FILES:
                yield from (str(other) for other in path.parent.iterdir() if other.name.startswith(f"{path.stem}."))
    except OSError:  # a name that no file can have
        return
