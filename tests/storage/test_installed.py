"""The versions of installed packages, by the names under which they are imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

import pytest

from monai_saliency.storage import installed
from monai_saliency.storage.installed import package_version


@pytest.fixture(scope="module")
def table() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@pytest.fixture
def asked(table: Mapping[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows each time the table is made. Nothing is known from before."""
    found: list[int] = []
    monkeypatch.setattr(metadata, "packages_distributions", lambda: found.append(1) or table)
    for function in (package_version, getattr(installed, "_providers", package_version)):
        function.cache_clear()
    yield found
    package_version.cache_clear()


def test_the_version_of_every_installed_package(table: Mapping[str, list[str]], asked: list[int]) -> None:
    """As the table of all distributions has it, wherever a name is provided by one distribution."""
    names = {name: each[0] for name, each in table.items() if len(set(each)) == 1}
    assert {"torch", "monai", "yaml", "PIL"} <= names.keys()  # the last two have distributions of other names
    found = {name: package_version(name) for name in names.keys() - sys.stdlib_module_names}
    assert found == {name: metadata.version(names[name]) for name in found}
    assert {package_version(name) for name in ("time", "posix", "no_such_package")} == {""}
    assert asked == [1]


def test_what_most_networks_use_needs_no_table(asked: list[int]) -> None:
    """It looks for every file that was ever installed: over a second at the start of every run."""
    versions = [package_version(name) for name in ("torch", "time", "posix")]
    assert versions == [metadata.version("torch"), "", ""]
    assert asked == []
