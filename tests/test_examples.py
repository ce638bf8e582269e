"""Every example of a docstring, marked by ``>>>``, gives what it shows; and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
from helpers.paths import ROOT

import monai_saliency as ms

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "monai_saliency").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def public() -> dict[str, Any]:
    """The public names of the package and of its rooms, by their path."""
    names = {f"monai_saliency.{name}": getattr(ms, name) for name in [*ms.__all__, "attach"]}
    for each in pkgutil.iter_modules(ms.__path__, "monai_saliency."):
        room = importlib.import_module(each.name)
        names |= {f"{each.name}.{name}": getattr(room, name) for name in getattr(room, "__all__", [])}
    return names


def examples(value: Any) -> list[doctest.Example]:
    """The examples in the docstring of a class or a function, or in those of a class's own methods."""
    own = [each for name, each in vars(value).items() if callable(each)] if inspect.isclass(value) else []
    docs = [each.__doc__ or "" for each in [value, *own]]
    return [example for doc in docs for example in doctest.DocTestParser().get_examples(doc)]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


def test_every_public_name_has_an_example() -> None:
    """One that is not skipped, in a module that the test above runs."""
    missing = []
    for path, value in public().items():
        if all(each.options.get(doctest.SKIP) for each in examples(value)):
            missing.append(path)
        elif value.__module__ not in MODULES:
            missing.append(f"{path}, whose module {value.__module__} is not run")
    assert not missing, "\n".join(missing)


def test_a_name_without_an_example_is_found() -> None:
    def without() -> None:
        """Nothing to see."""

    def skipped() -> None:
        """Nothing that runs.

        >>> 1 + 1  # doctest: +SKIP
        2
        """

    def run() -> None:
        """A sum.

        >>> 1 + 1
        2
        """

    kept = [
        [each for each in examples(value) if not each.options.get(doctest.SKIP)] for value in (without, skipped, run)
    ]
    assert [len(each) for each in kept] == [0, 0, 1]
