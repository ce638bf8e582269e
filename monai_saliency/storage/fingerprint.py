"""A hash of everything that a result depends on: settings, code and files. It is the same in every process.

What counts is described at :func:`fingerprint`, which is also the one place that says what cannot be followed.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import os
import re
import struct
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from monai.data import ImageReader
from monai.transforms import Compose
from monai.transforms.inverse import TraceableTransform
from monai.transforms.traits import RandomizableTrait
from monai.utils import OptionalImportError

from monai_saliency.storage.code import (
    Unfingerprintable,
    Walk,
    feed_class,
    feed_function,
    feed_module,
    is_installed_callable,
    once,
    tag,
)
from monai_saliency.storage.installed import library_versions
from monai_saliency.utils.monai_private import is_compiled

__all__ = [
    "Outline",
    "Unfingerprintable",
    "fingerprint",
    "library_versions",
    "module_attributes",
    "module_shell",
    "outline",
]

# State of a module that changes no output of a forward in evaluation mode, or that is fed in another way.
_NO_STATE = {
    *("training", "_is_full_backward_hook", "_non_persistent_buffers_set", "_super_module_initialized"),
    *("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    # What torch.jit, torch.compile and (once imported) Lightning note on each module that they are given.
    *("__overloads__", "_is_torch_compile", "_compile_kwargs"),
}
_MODULE_STATE = {"_parameters", "_buffers", "_modules", "_compiled_call_impl"}
# What modules of MONAI write in each forward before they read it.
_WRITTEN_FIRST = {("monai.networks.nets.dynunet", name): {"heads"} for name in ("DynUNet", "DynUNetSkipLayer")}
_NOTHING: set[str] = set()
# What a decorator copies from a function, and what says nothing about what it does.
_NO_CODE = {"__doc__", "__annotations__", "__type_params__"}
_MISSING = object()
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


@dataclass(frozen=True)
class Outline:
    """What :func:`outline` finds.

    Attributes:
        digest: a hash of all but the contents of ``large``.
        large: tensors and TorchScript modules, in the order in which they were met.
        files: files that a path or text inside the value names, sorted.
        is_foreign: whether code was met that is neither Python's, MONAI's, torch's, NumPy's, nibabel's nor ours.
    """

    digest: str
    large: list[Any]
    files: list[str]
    is_foreign: bool


def fingerprint(value: Any, by_code: bool = False) -> str:
    """The sha256 of a value: numbers, strings, containers, arrays, tensors, functions, modules and whole transforms.

    The fingerprint of an object includes its class, the code of the class and of its bases, and all its attributes.
    Code of an installed package is identified by the package's version and the text of its source file (monai, torch,
    numpy, nibabel and Python itself: by the version alone). The user's own code is identified by what it does, without
    comments and docstrings, and by what it reads: functions, classes and constants of its module and of the user's
    other modules, the values in its closure, and environment variables whose names it holds as text. A function inside
    a decorator is followed too: inside ``functools.wraps``, ``cache``, ``partial`` and ``singledispatch``, and inside
    an object of a class. The order of a dictionary and of a list counts, the order of a set and of attributes does not.

    What cannot be followed: names that are put together at run time (``getattr``, ``os.environ[prefix + "X"]``), files
    and services that code opens by itself, changes that a program makes to functions of installed packages, and what an
    installed package reads. A result that depends on these has to be named by the user (``network_id``), or its cache
    emptied.

    Example::

        fingerprint([ScaleIntensity(), 3])  # a string of 64 hexadecimal digits

    Args:
        value: the value.
        by_code: identify lambdas, and functions and classes that are defined in a function, by what they do and read.
            That shows that two are not the same; by default they are refused.

    Raises:
        Unfingerprintable: when the value, or a value inside it, cannot be identified. It names that value.
    """
    hasher = hashlib.sha256()
    Walk(_feed, by_code=by_code).feed(hasher, value)
    return hasher.hexdigest()


def outline(value: Any, contents: bool = False) -> Outline:
    """A fingerprint without the contents of tensors, for values whose tensors are many and seldom change.

    Args:
        value: the value. Other than for :func:`fingerprint`, it may hold TorchScript modules.
        contents: read the tensors too, as :func:`fingerprint` does, for the sake of the files that are found.

    Raises:
        Unfingerprintable: as for :func:`fingerprint`.
    """
    hasher, walk = hashlib.sha256(), Walk(_feed, large=None if contents else [])
    walk.feed(hasher, value)
    return Outline(hasher.hexdigest(), walk.large or [], sorted(walk.files), walk.is_foreign)


def module_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that may decide its output, without its parameters, buffers, modules and hooks."""
    if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule) or is_compiled(module):
        return {}
    left_out = _NO_STATE | _MODULE_STATE | _WRITTEN_FIRST.get(_name_of(type(module)), _NOTHING)
    return {name: value for name, value in vars(module).items() if name not in left_out}


def module_shell(module: torch.nn.Module) -> list[Any]:
    """A module's class, and the hooks of its forward with their options."""
    state, found = vars(module), []
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        options = [state.get(f"{kind}_{option}", {}) for option in ("with_kwargs", "always_called")]
        hooks = state.get(kind) or {}
        found.append([[hook, [number in option for option in options]] for number, hook in hooks.items()])
    is_code = isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule) or is_compiled(module)
    return [None if is_code else type(module), *found]


def _feed(hasher: Any, value: Any, walk: Walk) -> None:
    kind = type(value)
    if kind not in _by_type:
        _by_type[kind] = next((feed for kinds, feed in _FEEDERS if issubclass(kind, kinds)), _feed_object)
    _by_type[kind](hasher, value, walk)


def _digest(value: Any, walk: Walk) -> bytes:
    hasher = hashlib.sha256()
    walk.feed(hasher, value)
    return hasher.digest()


def _feed_plain(hasher: Any, value: Any, walk: Walk) -> None:
    if isinstance(value, str | PurePath) and _may_be_file(str(value)) and os.path.isfile(value):
        walk.files.add(str(value))
    tag(hasher, type(value).__name__, value if isinstance(value, bytes) else repr(value) if value is None else value)


def _may_be_file(text: str) -> bool:
    return len(text) < 4096 and "\0" not in text and ("." in text or os.sep in text)


def _feed_float(hasher: Any, value: float, walk: Walk) -> None:
    tag(hasher, "float", struct.pack("<d", value))


def _feed_enum(hasher: Any, value: Enum, walk: Walk) -> None:
    feed_class(hasher, type(value), walk)
    tag(hasher, "member", value.name)


def _feed_dict(hasher: Any, value: dict, walk: Walk) -> None:
    tag(hasher, "dict", len(value))
    _feed_subclass(hasher, value, dict, walk)
    if isinstance(value, collections.defaultdict):
        walk.feed(hasher, value.default_factory)
    # In their order, which is that of a loop over it: of layers, of steps, of sums.
    for key, content in value.items():
        walk.feed(hasher, key)
        walk.feed(hasher, content)


def _feed_attributes(hasher: Any, state: dict[str, Any], walk: Walk) -> None:
    """Add attributes by their names, in whichever order they were set."""
    tag(hasher, "attributes", len(state))
    for name in sorted(state):
        tag(hasher, "attribute", name)
        walk.feed(hasher, state[name])


def _feed_sequence(hasher: Any, value: list | tuple, walk: Walk) -> None:
    base = list if isinstance(value, list) else tuple
    tag(hasher, base.__name__, len(value))
    _feed_subclass(hasher, value, base, walk)
    for content in value:
        walk.feed(hasher, content)


def _feed_set(hasher: Any, value: set | frozenset, walk: Walk) -> None:
    tag(hasher, "set", len(value))
    _feed_subclass(hasher, value, set if isinstance(value, set) else frozenset, walk)
    for digest in sorted(_digest(content, walk) for content in value):
        hasher.update(digest)


def _feed_subclass(hasher: Any, value: Any, base: type, walk: Walk) -> None:
    if type(value) is not base:
        feed_class(hasher, type(value), walk)
        _feed_attributes(hasher, getattr(value, "__dict__", {}), walk)


def _feed_array(hasher: Any, value: np.ndarray | np.generic, walk: Walk) -> None:
    tag(hasher, "array", f"{value.dtype.str if value.dtype.names is None else value.dtype.descr}{value.shape}")
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        _feed_subclass(hasher, value, np.ndarray, walk)
    if value.dtype.hasobject:
        return walk.feed(hasher, value.tolist())
    return tag(hasher, "voxels", np.ascontiguousarray(value).tobytes())


def _feed_tensor(hasher: Any, value: torch.Tensor, walk: Walk) -> None:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise Unfingerprintable(f"a tensor of layout {value.layout} and type {value.dtype} on {value.device}")
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unfingerprintable(f"a tensor of {type(value).__qualname__}, which holds its values elsewhere")
    tag(hasher, "tensor", f"{value.dtype}{tuple(value.shape)}{value.device.type}")
    if walk.large is None:
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        tag(hasher, "voxels", plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        _feed_place(hasher, value, walk.large)
    if type(value) is not torch.Tensor:
        feed_class(hasher, type(value), walk)
        # torch.compile marks the tensors that it has seen.
        held = {key: content for key, content in value.__dict__.items() if not key.startswith("_dynamo")}
        _feed_attributes(hasher, held, walk)


def _feed_place(hasher: Any, value: Any, large: list[Any]) -> None:
    tag(hasher, "large", len(large))
    large.append(value)


def _feed_torch_module(hasher: Any, value: torch.nn.Module, walk: Walk) -> None:
    once(hasher, value, walk, _feed_module_state)


def _feed_module_state(hasher: Any, value: torch.nn.Module, walk: Walk) -> None:
    state = vars(value)
    if isinstance(value, torch.jit.ScriptModule) and walk.large is not None:
        tag(hasher, "TorchScript")
        _feed_place(hasher, value, walk.large)
        return
    if is_compiled(value):
        tag(hasher, "compiled")
        walk.feed(hasher, state["_modules"])
        return
    if isinstance(value, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise Unfingerprintable(f"an object of {type(value).__name__}, which holds more than its attributes show")
    tag(hasher, "module")
    feed_class(hasher, type(value), walk)
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        if hooks := state.get(kind):
            options = [state.get(f"{kind}_{option}", {}) for option in ("with_kwargs", "always_called")]
            tag(hasher, kind, len(hooks))
            for number, hook in hooks.items():
                tag(hasher, "options", [number in option for option in options])
                walk.feed(hasher, hook)
    for key in sorted(state.keys() - _NO_STATE - _WRITTEN_FIRST.get(_name_of(type(value)), _NOTHING)):
        if key not in _MODULE_STATE or state[key]:
            tag(hasher, "attribute", key)
            walk.feed(hasher, state[key])


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _feed_partial(hasher: Any, value: functools.partial, walk: Walk) -> None:
    tag(hasher, "partial")
    _feed_subclass(hasher, value, functools.partial, walk)
    walk.feed(hasher, (value.func, value.args, value.keywords))


def _feed_text(hasher: Any, value: Any, walk: Walk) -> None:
    """What its text identifies: a pattern, a logger, a type in an annotation. A lock holds nothing."""
    tag(hasher, type(value).__name__, "" if isinstance(value, _LOCKS) else repr(value))


def _feed_logger(hasher: Any, value: logging.Logger, walk: Walk) -> None:
    tag(hasher, "logger", value.name)


def _feed_object(hasher: Any, value: Any, walk: Walk) -> None:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, RandomizableTrait) and kind is not Compose:
        raise Unfingerprintable(f"the random transform {name} inside it")
    try:
        is_named = callable(value) and hasattr(value, "__name__")
    except OptionalImportError as error:  # what MONAI puts in the place of a package
        raise Unfingerprintable(str(error).partition("\n")[0]) from error
    if is_named and is_installed_callable(value):
        feed_function(hasher, value, walk)
        return
    if kind.__module__ == "typing":
        _feed_text(hasher, value, walk)
        return
    slots = [slot for base in kind.__mro__ for slot in _slots(base)]
    # As pickle does: an object with more memory than its slots, a dictionary and weak references need holds more than
    # its attributes.
    places = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if kind.__basicsize__ > object.__basicsize__ + places * struct.calcsize("P") or kind.__itemsize__:
        raise Unfingerprintable(f"an object of {name}, which holds more than its attributes show")
    if not hasattr(value, "__dict__") and not slots:
        raise Unfingerprintable(f"an object of {name}, which shows no state")
    tag(hasher, "object")
    feed_class(hasher, kind, walk)
    state = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | getattr(value, "__dict__", {})
    if kind is Compose:
        # Only random transforms, which are refused, use its random state. Its log changes no result.
        state = {key: content for key, content in state.items() if key not in {"R", "log_stats"}}
    if isinstance(value, ImageReader):
        # Some readers keep the name of the last file, and whether it was a series.
        state = {key: content for key, content in state.items() if key not in {"filenames", "has_series"}}
    if isinstance(value, TraceableTransform):
        # This attribute exists for each thread, and only after its first use.
        state = {**state, "_tracing": bool(value.tracing)}
    without = {key for key, content in state.items() if isinstance(content, threading.local)}
    if "__wrapped__" in state:
        copied = getattr(state["__wrapped__"], "__dict__", {})
        without |= _NO_CODE | {key for key, content in state.items() if copied.get(key, _MISSING) is content}
        without.discard("__wrapped__")
    _feed_attributes(hasher, {key: content for key, content in state.items() if key not in without}, walk)


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    slots = [slots] if isinstance(slots, str) else slots
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        f"{private}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        for slot in slots
        if slot not in {"__dict__", "__weakref__"}
    ]


_by_type: WeakKeyDictionary[type, Callable[[Any, Any, Walk], None]] = WeakKeyDictionary()
_FEEDERS: tuple[tuple[Any, Callable[[Any, Any, Walk], None]], ...] = (
    (Enum, _feed_enum),
    ((np.ndarray, np.generic), _feed_array),
    (float, _feed_float),
    ((type(None), bool, int, str, bytes, complex, range, slice, type(Ellipsis), type(NotImplemented)), _feed_plain),
    ((PurePath, torch.dtype, torch.device, np.dtype), _feed_plain),
    (torch.Tensor, _feed_tensor),
    (torch.nn.Module, _feed_torch_module),
    (dict, _feed_dict),
    ((list, tuple), _feed_sequence),
    ((set, frozenset), _feed_set),
    (functools.partial, _feed_partial),
    (type, feed_class),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ufunc), feed_function),
    (type(functools.cache(len)), feed_function),
    (types.ModuleType, feed_module),
    ((re.Pattern, types.GenericAlias, types.UnionType, *_LOCKS), _feed_text),
    (logging.Logger, _feed_logger),
)
