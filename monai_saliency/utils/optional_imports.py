"""Imports of optional packages."""

from __future__ import annotations

import importlib
from types import ModuleType

from monai.utils import OptionalImportError

__all__ = ["require"]


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise OptionalImportError(f'{name} is not installed: pip install "monai-saliency[{extra}]"') from error
