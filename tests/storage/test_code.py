"""The user's own code is followed through decorators, classes and modules, whatever they are called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monai.transforms import Lambdad

from monai_saliency.storage.code import Unfingerprintable
from monai_saliency.storage.fingerprint import fingerprint

#: a module whose `step` decorates a function of another module; `VALUE` is what somebody edits
DECORATED = {
    "a class": """
        class timed:
            '''A decorator.'''
            def __init__(self, function):
                self.function = function
            def __call__(self, x):
                return self.function(x)
        @timed
        def step(x):
            return x * VALUE
        """,
    "a class that takes the name": """
        class timed:
            def __init__(self, function):
                self.function = function
                functools.update_wrapper(self, function)
            def __call__(self, x):
                return self.function(x)
        @timed
        def step(x):
            return x * VALUE
        """,
    "the class itself": """
        class timed:
            def __init__(self, function):
                functools.update_wrapper(self, function)
            def __call__(self, x):
                return self.__wrapped__(x) + VALUE
        @timed
        def step(x):
            return x
        """,
    "an attribute of the decorator": """
        class times:
            def __init__(self, factor):
                self.factor = factor
            def __call__(self, function):
                functools.update_wrapper(self, function)
                self.run = function
                return Run(self)
        class Run:
            def __init__(self, times):
                self.times = times
                functools.update_wrapper(self, times)
            def __call__(self, x):
                return self.times.run(x) * self.times.factor
        @times(VALUE)
        def step(x):
            return x
        """,
    "a helper inside a class": """
        class timed:
            def __init__(self, function):
                self.function = function
                functools.update_wrapper(self, function)
            def __call__(self, x):
                return self.function(x)
        def helper(x):
            return x * VALUE
        @timed
        def inner(x):
            return helper(x)
        def step(x):
            return inner(x)
        """,
    "lru_cache": """
        @functools.lru_cache
        def step(x):
            return x * VALUE
        """,
    "cache, read by a function": """
        @functools.cache
        def inner(x):
            return x * VALUE
        def step(x):
            return inner(x)
        """,
    "singledispatch": """
        @functools.singledispatch
        def step(x):
            return x * VALUE
        """,
    "singledispatch for a type": """
        @functools.singledispatch
        def step(x):
            return x
        @step.register
        def _(x: int):
            return x * VALUE
        """,
    "singledispatchmethod": """
        class Steps:
            @functools.singledispatchmethod
            def scale(self, x):
                return x * VALUE
        def step(x):
            return Steps().scale(x)
        """,
    "partialmethod": """
        class Steps:
            def scale(self, factor, x):
                return x * factor
            twice = functools.partialmethod(scale, VALUE)
        def step(x):
            return Steps().twice(x)
        """,
    "partial": """
        def scale(factor, x):
            return x * factor * VALUE
        step = functools.partial(scale, 1)
        """,
    "partial of a decorated one": """
        @functools.cache
        def scale(factor, x):
            return x * factor * VALUE
        step = functools.partial(scale, 1)
        """,
    "an own kind of partial": """
        class Twice(functools.partial):
            def __call__(self, x):
                return super().__call__(x) * VALUE
        step = Twice(operator.neg)
        """,
    "wraps": """
        def timed(function):
            @functools.wraps(function)
            def inner(x):
                return function(x)
            return inner
        @timed
        def step(x):
            return x * VALUE
        """,
    "wraps, in the wrapper": """
        def timed(function):
            @functools.wraps(function)
            def inner(x):
                return function(x) * VALUE
            return inner
        @timed
        def step(x):
            return x
        """,
    "wraps, of an installed function": """
        @functools.wraps(np.clip)
        def clip(x):
            return np.clip(x, 0, VALUE)
        def step(x):
            return clip(x)
        """,
    "vectorize": """
        @np.vectorize
        def step(x):
            return x * VALUE
        """,
    "an attribute of a function that is cached": """
        @functools.cache
        def inner(x):
            return x
        inner.factor = VALUE
        def step(x):
            return inner(x) * inner.factor
        """,
    "two decorators": """
        class timed:
            def __init__(self, function):
                functools.update_wrapper(self, function)
            def __call__(self, x):
                return self.__wrapped__(x)
        @timed
        @functools.cache
        def step(x):
            return x * VALUE
        """,
    "an attribute of a metaclass": """
        class Meta(type):
            factor = VALUE
        class Steps(metaclass=Meta):
            pass
        def step(x):
            return x * Steps.factor
        """,
    "a property of a metaclass": """
        class Meta(type):
            @property
            def factor(cls):
                return VALUE
        class Steps(metaclass=Meta):
            pass
        def step(x):
            return x * Steps.factor
        """,
    "an attribute of a class": """
        class Steps:
            factor = VALUE
        def step(x):
            return x * Steps.factor
        """,
    "an attribute of a base class": """
        class Base:
            factor = VALUE
        class Steps(Base):
            pass
        def step(x):
            return x * Steps.factor
        """,
    "the order of a table": """
        table = {2: [("a", 1), ("b", 2)], 3: [("b", 2), ("a", 1)]}[VALUE]
        STEPS = dict(table)
        del table
        def step(x):
            for _, each in STEPS.items():
                x = x * 2 + each
            return x
        """,
}


def _module(name: str, text: str, folder: Path) -> Any:
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join(line[indent:] for line in lines)
    held = "import ms_held\n" if "ms_held." in body else ""
    (folder / f"{name}.py").write_text(f"import functools, operator\nimport numpy as np\n{held}{body}\n")
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def _print(value: Any) -> str | None:
    try:
        return fingerprint(value)
    except Unfingerprintable:
        return None


@pytest.mark.parametrize("edited", ["here", "in another file"])
@pytest.mark.parametrize("name", DECORATED)
def test_what_a_decorator_holds_is_followed(name: str, edited: str, own: Path) -> None:
    """What it does changes with the edit, and so must what identifies it: alone, in a transform and in a function."""
    found, values = [], []
    for value in (2, 2, 3):
        _module("ms_held", f"VALUE = {value}", own)
        text = DECORATED[name].replace("VALUE", str(value) if edited == "here" else "ms_held.VALUE")
        step = _module("ms_decorated", text, own).step
        values.append(np.asarray(step(5)).item())
        reader = _module("ms_reader", "from ms_decorated import step\ndef read(x):\n    return step(x)\n", own).read
        found.append([_print(each) for each in (step, Lambdad("image", step), reader)])
    assert values[1] != values[2]
    assert None not in found[0]
    assert found[0] == found[1]
    assert all(first != second for first, second in zip(found[1], found[2], strict=True))


def test_a_decorated_function_that_ran_is_the_same(own: Path) -> None:
    for name in ("lru_cache", "singledispatch", "a class", "vectorize", "two decorators"):
        step = _module("ms_decorated", DECORATED[name].replace("VALUE", "2"), own).step
        before = fingerprint(step)
        step(5)
        assert fingerprint(step) == before


@pytest.mark.parametrize("name", ["profile", "calendar", "code"])
def test_an_own_module_named_like_one_of_pythons(name: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's folder comes first where Python looks for modules."""
    found = []
    monkeypatch.delitem(sys.modules, name, raising=False)
    for value in (2, 2, 3):
        monkeypatch.delitem(sys.modules, name, raising=False)
        text = (
            f"class Step:\n    def __call__(self, x):\n        return x * {value}\ndef step(x):\n    return x * {value}"
        )
        module = _module(name, text, own)
        lazy = f"def step(x):\n    import {name}\n    return {name}.step(x)"
        values = [module.Step(), module.step, _module("ms_reader", f"from {name} import step", own).step]
        found.append([fingerprint(each) for each in [*values, _module("ms_lazy", lazy, own).step]])
    assert found[0] == found[1]
    assert all(first != second for first, second in zip(found[1], found[2], strict=True))


def test_two_classes_of_one_name(own: Path) -> None:
    """MONAI's `DynUNet` writes its heads before it reads them; somebody's own class of that name need not."""
    text = "import torch\nclass DynUNet(torch.nn.Module):\n    def __init__(self, heads):\n        super().__init__()\n"
    network = _module("ms_network", f"{text}        self.heads = heads", own).DynUNet
    assert fingerprint(network(2)) != fingerprint(network(3))
    assert fingerprint(network(2)) == fingerprint(network(2))
