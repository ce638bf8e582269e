"""Every example of a docstring, marked by ``>>>``, gives what it shows; and every name that a user calls has one."""

import doctest
import importlib
import inspect
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
    """The names that a user calls: those of the package, the methods among them."""
    return {f"monai_saliency.{name}": getattr(ms, name) for name in [*ms.__all__, "attach"]}


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
