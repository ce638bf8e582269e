"""The package's own source text, as the laws of its structure read it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from helpers.paths import ROOT

PACKAGE = ROOT / "monai_saliency"


@dataclass(frozen=True)
class Module:
    """A module of the package.

    Attributes:
        name: dotted, ``monai_saliency.masks`` for a folder's ``__init__.py``.
        path: of its file.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def room(self) -> str:
        """The room that it stands in; "" for the package's own ``__init__.py``."""
        return [*self.name.split("."), ""][1]

    def at(self, node: ast.AST) -> str:
        """Where a node stands, and what it says."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}"  # type: ignore[attr-defined]

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, str]]:
        """Each import, wherever it stands: the node, the module, and the name that is taken from it, or ""."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name, ""
            elif isinstance(node, ast.ImportFrom):
                package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    yield node, source, alias.name

    def uses(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, Module]]:
        """The modules of the package that it imports."""
        for node, source, name in self.imports():
            found = modules().get(f"{source}.{name}") or modules().get(source)
            if found:
                yield node, found

    def defined(self) -> set[str]:
        """The names that it defines: of functions, classes, variables and attributes."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
        return names


@lru_cache(maxsize=1)
def modules() -> dict[str, Module]:
    """All modules of the package, by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    length = (function.end_lineno or 0) - function.lineno + 1
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0)
