"""What identifies code: installed packages by their version, the user's own code by what it does and what it reads.

A function of the user's own is its bytecode and its constants, without comments, docstrings and line numbers: the code
that runs here, which need not be the text that its file holds by now. `_names_read` gives the names of the module
that it reads, so that :mod:`monai_saliency.storage.fingerprint` can follow them to other functions, classes, modules,
constants, and variables of the environment.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from monai_saliency.storage.installed import is_installed, is_installed_name, is_versioned, package_version

__all__ = [
    "Unfingerprintable",
    "Walk",
    "feed_class",
    "feed_function",
    "feed_module",
    "is_installed_callable",
    "once",
    "tag",
]

# What a class has beside its code and its settings.
_NO_MEMBERS = {
    *("__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__slots__", "__hash__"),
    "__slotnames__",  # what copy and pickle note on a class
    *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl", "__orig_bases__"),
    *("__parameters__", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotate__"),
    *("__annotations_cache__", "__annotate_func__", "__type_params__"),
}
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_CACHED = type(functools.cache(len))
# What `functools` notes on what it makes of a function.
_NOTED = {"__wrapped__", "cache_parameters", "register", "dispatch", "registry", "_clear_cache"}


class Unfingerprintable(TypeError):
    """A value that cannot be identified: a lambda, a local function, an object of an extension module."""


@functools.lru_cache(maxsize=4096)
def _installed_code(module: str, owner: Any) -> str:
    """What identifies a class or function of an installed package: its version and the hash of its source file.

    Raises:
        Unfingerprintable: when there is no source.
    """
    top = module.partition(".")[0]
    if is_versioned(module):
        return top
    version = str(getattr(sys.modules.get(top), "__version__", ""))
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        source = Path(file).read_bytes() if file else inspect.getsource(owner).encode()
    except (OSError, TypeError) as error:
        raise Unfingerprintable(f"{module}.{owner.__qualname__}, whose source cannot be read") from error
    return f"{version}-{hashlib.sha256(source).hexdigest()}"


@functools.lru_cache(maxsize=4096)
def _code_digest(code: types.CodeType) -> bytes:
    """The hash of what a code object does, and of the code inside it. Comments and docstrings do not count."""
    hasher = hashlib.sha256()
    used = {each.arg for each in dis.get_instructions(code) if each.opcode in dis.hasconst}
    constants = [_constant(value) for place, value in enumerate(code.co_consts) if place in used]
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    table = getattr(code, "co_exceptiontable", b"")
    hasher.update(repr((sys.version_info[:2], shape, names, _instructions(code), table, constants)).encode())
    return hasher.digest()


def _instructions(code: types.CodeType) -> list[Any]:
    """The bytecode, with constants by their place among those that are used: a docstring takes a place, too."""
    places = sorted({each.arg or 0 for each in dis.get_instructions(code) if each.opcode in dis.hasconst})
    return [
        (each.opcode, places.index(each.arg or 0) if each.opcode in dis.hasconst else each.arg)
        for each in dis.get_instructions(code)
        if each.opname not in {"EXTENDED_ARG", "CACHE"}
    ]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code_digest(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, map(_constant, value)))
    return type(value).__name__, repr(value)


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _inside(value)


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The names that code reads from its module, with the attributes that follow: ``("helper", "scale")``."""
    found = set()
    for each in _inside(code):
        chain: list[str] = []
        for instruction in dis.get_instructions(each):
            if chain and instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
                chain.append(instruction.argval)
                continue
            if chain and instruction.opname not in {"CACHE", "EXTENDED_ARG"}:
                found.add(tuple(chain))
                chain = []
            if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
                chain = [instruction.argval]
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def _imported_names(code: types.CodeType, package: str) -> tuple[str, ...]:
    """The modules that code of a package imports when it runs, and what it takes from them, by their whole names."""
    found = set()
    for inner in _inside(code):
        constants: list[Any] = []
        for each in dis.get_instructions(inner):
            if each.opname == "LOAD_CONST":
                constants.append(each.argval)
            elif each.opname == "IMPORT_NAME":
                level, taken = constants[-2:]
                with suppress(ImportError):  # beyond the top-level package: it cannot run either
                    name = util.resolve_name("." * level + each.argval, package)
                    found |= {name, *(f"{name}.{part}" for part in taken or ())}
    return tuple(sorted(found))


def _feed_import(hasher: Any, name: str, walk: Walk) -> None:
    """Add one of the user's own modules, or what a module holds under a name, as code that imports it finds it."""
    module, _, part = name.rpartition(".")
    held = getattr(sys.modules.get(module), part, None) if module else None
    if held is None or isinstance(held, types.ModuleType):
        try:
            held = importlib.import_module(name)  # as the code would do in a moment
        except Exception:
            return tag(hasher, "missing")
    return _feed_member(hasher, held, walk)


# Shells take identifiers only, `env` and os.environ also other names.
_VARIABLE = re.compile(r"[\w.\-]{1,100}")


@functools.lru_cache(maxsize=4096)
def _strings(code: types.CodeType) -> tuple[str, ...]:
    """The _strings in code that can be the name of an environment variable."""
    found = {value for each in _inside(code) for value in each.co_consts if isinstance(value, str)}
    return tuple(sorted(filter(_VARIABLE.fullmatch, found)))


def _module_digest(module: types.ModuleType) -> bytes:
    """The hash of the code of one of the user's own modules; ``b""`` where there is none."""
    try:
        file = getattr(module, "__file__", None)
        return _code_digest(compile(Path(file).read_bytes(), "module", "exec")) if file else b""
    except (OSError, SyntaxError, ValueError):
        return b""


@dataclass
class Walk:
    """One walk over a value.

    Attributes:
        feed_any: adds a value of any kind to a hash.
        large: tensors and TorchScript modules, which are then not read; None to read them.
        files: files that are named.
        above: the ids of the containers around the current value, to cut cycles.
        known: the digests of classes, functions and modules by id, which are walked once.
        is_foreign: whether code was met that is neither Python's, MONAI's, torch's, NumPy's, nibabel's nor ours.
        by_code: whether lambdas and what is defined in a function are identified by what they do.
    """

    feed_any: Callable[[Any, Any, Walk], None]
    large: list[Any] | None = None
    files: set[str] = field(default_factory=set)
    above: list[int] = field(default_factory=list)
    known: dict[int, bytes] = field(default_factory=dict)
    is_foreign: bool = False
    by_code: bool = False

    def meet(self, module: str) -> None:
        """Note whose code it is that a module holds."""
        if not is_versioned(module) and module.partition(".")[0] not in {"monai_saliency", "builtins"}:
            self.is_foreign = True

    def feed(self, hasher: Any, value: Any) -> None:
        """Add a value to a hash."""
        if id(value) in self.above:
            tag(hasher, "cycle", len(self.above) - self.above.index(id(value)))
            return
        self.above.append(id(value))
        try:
            self.feed_any(hasher, value, self)
        finally:
            self.above.pop()


def tag(hasher: Any, kind: str, content: object = b"") -> None:
    # With their lengths, ("ab", "c") and ("a", "bc") differ.
    content = content if isinstance(content, bytes) else str(content).encode("utf-8", "surrogatepass")
    hasher.update(f"{kind}:{len(content)}:".encode() + content)


def once(hasher: Any, value: Any, walk: Walk, feed: Callable[[Any, Any, Walk], None]) -> None:
    """Add what is walked once, however often it is met."""
    if id(value) not in walk.known:
        walk.known[id(value)] = b"being walked"
        inner = hashlib.sha256()
        try:
            feed(inner, value, walk)
        except Unfingerprintable:
            del walk.known[id(value)]
            raise
        walk.known[id(value)] = inner.digest()
    tag(hasher, "once", walk.known[id(value)])


def feed_function(hasher: Any, value: Callable, walk: Walk) -> None:
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        tag(hasher, "method", value.__name__)
        function = getattr(value, "__func__", None)
        if isinstance(function, types.FunctionType):
            _feed_member(hasher, function, walk)
        return walk.feed(hasher, owner)
    if _feed_decorated(hasher, value, walk):
        return None
    home, name = _home(value), getattr(value, "__qualname__", value.__name__)
    # Its module holds what decorates it under its name.
    if home is None and _is_own(value) and (walk.by_code or "<" not in name):
        tag(hasher, "function", f"{value.__module__}.{name}")
        return once(hasher, value, walk, _feed_own_code)
    if home is None:
        kind = "a lambda" if "<lambda>" in name else "a local function" if "<locals>" in name else "a function"
        raise Unfingerprintable(f"{kind} ({name}), which no module holds under its name")
    tag(hasher, "function", ".".join(home))
    walk.meet(home[0])
    if _is_own(value):
        return once(hasher, value, walk, _feed_own_code)
    return tag(hasher, "code", _installed_code(home[0], value))


def _is_own(value: Any) -> bool:
    """Whether a value is a Python function that the user wrote, or that takes the name of one, as `wraps` gives it."""
    if not issubclass(type(value), types.FunctionType):
        return False
    return not (is_installed(value.__module__ or "") and is_installed(value.__globals__.get("__name__") or ""))


def _feed_decorated(hasher: Any, value: Any, walk: Walk) -> bool:
    """Add what `functools` made of functions, and whose type or code does not show them. Whether it was that."""
    if type(value) is _CACHED:
        tag(hasher, "cached")
        inside = [value.__wrapped__]
    elif getattr(value, "__globals__", None) is vars(functools) and hasattr(value, "registry"):
        tag(hasher, "dispatched", len(value.registry))
        inside = [each for pair in value.registry.items() for each in pair]
    else:
        return False
    for each in inside:
        _feed_member(hasher, each, walk)
    walk.feed(hasher, {name: each for name, each in vars(value).items() if name not in _NOTED})
    return True


def _feed_own_code(hasher: Any, function: types.FunctionType, walk: Walk) -> None:
    """Add what one of the user's own functions does, and what it reads."""
    walk.is_foreign = True
    code, known = function.__code__, function.__globals__
    tag(hasher, "code", _code_digest(code))
    noted = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    walk.feed(hasher, [function.__defaults__, function.__kwdefaults__, noted])
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            tag(hasher, "closure", name)
            _feed_cell(hasher, cell, walk)
    for chain in _names_read(code):
        if chain[0] in known:
            tag(hasher, "reads", ".".join(chain))
            _feed_read(hasher, chain, known[chain[0]], code, walk)
    for name in _imported_names(code, known.get("__package__") or ""):
        if not is_installed_name(name):
            tag(hasher, "imports", name)
            _feed_import(hasher, name, walk)


def _feed_cell(hasher: Any, cell: types.CellType, walk: Walk) -> None:
    try:
        content = cell.cell_contents
    except ValueError:  # still empty
        return
    _feed_member(hasher, content, walk)


def _feed_read(hasher: Any, chain: tuple[str, ...], value: Any, code: types.CodeType, walk: Walk) -> None:
    """Add what a name of a function's module leads to; ``chain`` is the name and the attributes behind it."""
    for name in (*chain[1:], ""):
        if value is os.environ or value is os.getenv:
            return tag(hasher, "environment", [(name, os.environ.get(name)) for name in _strings(code)])
        if not isinstance(value, types.ModuleType) or not name:
            break
        if is_installed(value.__name__) and value is not os:
            return tag(hasher, "installed", f"{value.__name__} {package_version(value.__name__.partition('.')[0])}")
        value = getattr(value, name, None)
    return _feed_member(hasher, value, walk)


def _feed_member(hasher: Any, value: Any, walk: Walk) -> None:
    """Add a value that is identified by the name that leads to it: functions need no name of their own."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            _feed_member(hasher, part, walk)
        return None
    if isinstance(value, functools.cached_property):
        return _feed_member(hasher, value.func, walk)
    if isinstance(value, _DESCRIPTORS):
        return tag(hasher, "descriptor", value.__name__)
    module = getattr(value, "__module__", None)
    if _feed_decorated(hasher, value, walk):
        return None
    if issubclass(type(value), types.FunctionType):
        if _is_own(value):
            return once(hasher, value, walk, _feed_own_code)
        version = package_version(value.__module__.partition(".")[0])
        tag(hasher, "installed", f"{value.__module__}.{value.__qualname__} {version}")
        if value.__closure__:  # a decorator's
            for cell in value.__closure__:
                _feed_cell(hasher, cell, walk)
        return None
    if isinstance(value, type | types.BuiltinFunctionType) and isinstance(module, str) and is_installed(module):
        return tag(hasher, "installed", f"{module}.{value.__qualname__} {package_version(module.partition('.')[0])}")
    return walk.feed(hasher, value)


def _home(function: Any) -> tuple[str, str] | None:
    """The module and name under which a function is found, which identify it. None if it is not found."""
    # Functions written in C often name no module, or a module that does not hold them.
    modules = [getattr(function, "__module__", None), "torch", "torch.nn.functional", "torch.special", "numpy"]
    names = {getattr(function, "__qualname__", function.__name__), function.__name__}
    places = ((module, name) for module in modules if module for name in sorted(names))
    return next((place for place in places if _named(*place) is function), None)


def is_installed_callable(function: Any) -> bool:
    """Whether a callable is found under a name of an installed module, which identifies it."""
    home = _home(function)
    return home is not None and is_installed(home[0])


def feed_class(hasher: Any, value: type, walk: Walk) -> None:
    for kind in value.__mro__[:-1]:
        if not walk.by_code and "<locals>" in kind.__qualname__ and not is_versioned(kind.__module__):
            raise Unfingerprintable(f"the local class {kind.__qualname__}")
        tag(hasher, "class", f"{kind.__module__}.{kind.__qualname__}")
        once(hasher, kind, walk, _feed_class_code)
    if not is_installed(type(value).__module__):
        tag(hasher, "metaclass")
        feed_class(hasher, type(value), walk)


def _feed_class_code(hasher: Any, kind: type, walk: Walk) -> None:
    """Add what identifies one class, without its bases."""
    walk.meet(kind.__module__)
    if is_installed(kind.__module__):
        tag(hasher, "code", _installed_code(kind.__module__, kind))
        for package in vars(kind).get("packages", ()) if kind.__module__.startswith("monai_saliency.") else ():
            tag(hasher, "uses", f"{package} {package_version(package)}")
        # A method that the user's own code has put there.
        changed = [
            (name, member)
            for name, member in vars(kind).items()
            if type(member) is types.FunctionType and not is_installed(member.__globals__.get("__name__") or "")
        ]
    else:
        changed = [(name, member) for name, member in vars(kind).items() if name not in _NO_MEMBERS]
    for name, member in sorted(changed, key=lambda each: each[0]):
        tag(hasher, "member", name)
        _feed_member(hasher, member, walk)


def feed_module(hasher: Any, value: types.ModuleType, walk: Walk) -> None:
    tag(hasher, "module", value.__name__)
    walk.meet(value.__name__)
    if not is_installed(value.__name__):
        once(hasher, value, walk, _feed_own_module)


def _feed_own_module(hasher: Any, module: types.ModuleType, walk: Walk) -> None:
    """Add the code of one of the user's own modules, the values that it holds, and its other modules."""
    tag(hasher, "code", _module_digest(module))
    for name, value in sorted(vars(module).items()):
        home = sys.modules.get(getattr(value, "__module__", None) or "")
        # A package comes to hold its modules as they are imported, so those count where code takes them.
        if name.startswith("__") or sys.modules.get(f"{module.__name__}.{name}") is value:
            continue
        tag(hasher, "holds", name)
        if isinstance(value, types.ModuleType):
            feed_module(hasher, value, walk)
        elif isinstance(value, type | types.FunctionType):
            # Those of the module itself are its code.
            feed_module(hasher, home if home is not None else module, walk)
        else:
            inner = hashlib.sha256()
            try:
                _feed_member(inner, value, walk)
            except Unfingerprintable:
                inner.update(type(value).__qualname__.encode())
            tag(hasher, "value", inner.digest())


def _named(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
