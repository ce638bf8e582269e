"""Which code belongs to installed packages, whose versions identify it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

import monai
import nibabel
import numpy as np
import torch

from monai_saliency.version import __version__

__all__ = [
    "gpu_versions",
    "is_installed",
    "is_installed_name",
    "is_versioned",
    "library_versions",
    "package_version",
]

# The code of these is identified by their versions.
_VERSIONED = {"monai": monai, "torch": torch, "numpy": np, "nibabel": nibabel}
_PYTHON = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")})
_PACKAGES = {"site-packages", "dist-packages"}


def library_versions() -> dict[str, str]:
    """The versions of this package, and of the packages that compute a cached result."""
    return {"monai_saliency": __version__} | {name: str(module.__version__) for name, module in _VERSIONED.items()}


def gpu_versions() -> dict[str, str]:
    """The versions of CuPy and cuCIM where they are installed: some of MONAI's transforms use them on a GPU."""
    return {name: package_version(name) for name in ("cupy", "cucim") if _file_of(name)}


@functools.cache
def package_version(package: str) -> str:
    """The version of an installed package, by the name that is imported; "" where there is none."""
    if package in sys.stdlib_module_names:
        return ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(package)
        if package in (distribution.read_text("top_level.txt") or "").split():
            return distribution.version
    for name in _providers().get(package, ()):
        return metadata.version(name)
    return ""


@functools.cache
def _providers() -> Mapping[str, list[str]]:
    """The distributions that provide each package. Slow: it looks for every file that was ever installed."""
    return metadata.packages_distributions()


def is_versioned(module: str) -> bool:
    """Whether a module is identified by its name, and by the versions of Python and of :func:`library_versions`."""
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names or top == "__main__":
        return top in _VERSIONED
    file = _file_of(module)
    return file is None or _is_python_file(file)


def _file_of(module: str) -> str | None:
    """The file of a module, or of the one that holds it, imported or not; None where there is none."""
    for name in (module, module.partition(".")[0]):
        if name in sys.modules:
            return getattr(sys.modules[name], "__file__", None)
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


@functools.lru_cache(maxsize=4096)
def _is_python_file(file: str) -> bool:
    """Whether a file is Python's own: somebody's `profile.py` is not."""
    real = os.path.realpath(file)
    return real.startswith(_PYTHON) and not _PACKAGES & {*Path(real).parts}


@functools.lru_cache(maxsize=4096)
def _is_installed_file(file: str) -> bool:
    real = os.path.realpath(file)
    return real.startswith(_INSTALLED) or bool(_PACKAGES & {*Path(real).parts})


def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package (or to this one), which is not edited between runs."""
    if is_versioned(module) or module.partition(".")[0] in {"monai_saliency", "builtins"}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file) and module != "__main__" and _is_installed_file(str(file))


def is_installed_name(name: str) -> bool:
    """Whether a name that code imports is that of an installed package, imported or not."""
    top = name.partition(".")[0]
    if is_installed(top):
        return True
    try:
        spec = util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and bool(spec.origin) and _is_installed_file(str(spec.origin))
