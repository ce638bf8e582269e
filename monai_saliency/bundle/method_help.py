"""The help of methods, from their docstrings and signatures; read from the source where ``torch`` is not loaded."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["help_of", "read_methods"]


def help_of(method: Callable[..., Any], settings: Mapping[str, inspect.Parameter]) -> str:
    """A line of what a method is, then a line for each of its settings, with its default."""
    text = inspect.getdoc(method) or ""
    lines = [f"{method.__name__}: {text.partition(chr(10))[0]}"]
    for id, parameter in settings.items():
        found = re.search(rf"^    {id}: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE)
        needed = parameter.default is parameter.empty
        default = "(needed)" if needed else f"{'null' if parameter.default is None else parameter.default}"
        lines.append(f"  --{id} {default}: {' '.join(found[1].split()) if found else ''}".rstrip(": "))
    return "\n".join(lines)


def read_methods() -> dict[str, str]:
    """The help of each of our methods by name, without importing them, which takes seconds."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "methods").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and [ast.unparse(each) for each in node.decorator_list] == ["method"]:
                light = _light(node)
                found[node.name] = help_of(light, _settings(light))
    return found


def _light(function: ast.FunctionDef) -> Callable[..., Any]:
    """A function with its arguments, defaults and docstring alone."""
    function.body, function.decorator_list, function.returns = function.body[:1], [], None
    arguments = function.args
    for each in [*arguments.args, *arguments.kwonlyargs, arguments.kwarg]:
        if each is not None:
            each.annotation = None
    made: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "methods", "exec"), made)
    return made[function.name]


def _settings(light: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The settings that only this method has: those before the ``*``, without the inferer."""
    each = inspect.signature(light).parameters.items()
    return {id: found for id, found in each if found.kind is found.POSITIONAL_OR_KEYWORD and id != "inferer"}
