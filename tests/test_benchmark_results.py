"""Figures that benchmarks measured, kept with the machine's description, and what keeps them."""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT, TESTS

BENCHMARKS = TESTS / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "record.py"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kept_results_say_what_they_were_measured_on(path: Path) -> None:
    found = json.loads(path.read_text())
    assert (BENCHMARKS / f"{found['benchmark']}.py").is_file()
    assert path.stem == found["benchmark"] or path.stem.startswith(found["benchmark"] + "_")
    assert found["rows"]
    assert {"device", "cpu", "cores", "threads", "python", "torch", "monai", "numpy"} <= set(found["machine"])
    assert not {"host", "hostname", "node", "user"} & set(found["machine"])
    assert "/" not in "".join(str(value) for value in found["settings"].values())


def test_there_are_results_and_a_page_names_them() -> None:
    assert {"localization", "overhead"} <= {path.stem for path in RESULTS}
    assert "tests/benchmarks/results/" in (ROOT / "tutorials" / "pages" / "measured.md").read_text()


def test_what_is_kept(record: dict[str, Any], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    record["add_options"](parser)
    rows = [{"case": "a", "ratio": 1.23456}, {"case": "b", "ratio": None, "setting": {"size": 4}}]
    assert record["keep"](parser.parse_args([]), "overhead", rows) == []
    given = parser.parse_args(["--json", str(tmp_path / "further" / "some.json"), "--csv", str(tmp_path / "some.csv")])
    (path,) = record["keep"](given, "overhead", rows, ["captum"])
    found = json.loads(path.read_text())
    assert (found["benchmark"], found["settings"], found["rows"]) == ("overhead", {"rounds": 3}, rows)
    assert found["machine"]["captum"]
    for name in (socket.gethostname(), platform.node()):
        assert f'"{name}"' not in path.read_text()
    lines = record["tables"](folder=path.parent).splitlines()
    assert lines[0] == "## some"
    assert lines[2] == "rounds 3"
    assert lines[-4:] == ["| case | ratio | setting |", "|---|---|---|", "| a | 1.235 | - |", "| b | - | size 4 |"]
    assert record["tables"](["some"], folder=path.parent).splitlines() == lines
