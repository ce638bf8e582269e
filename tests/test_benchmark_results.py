"""Figures that benchmarks measured, kept with the machine's description, and what keeps them."""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import resource
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers import fork_server
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
    assert {"doubling", "precision_light"} <= {path.stem for path in RESULTS}
    assert "tests/benchmarks/results/" in (ROOT / "tutorials" / "pages" / "cost.md").read_text()


def test_what_is_kept(record: dict[str, Any], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    record["add_options"](parser)
    rows = [{"case": "a", "ratio": 1.23456}, {"case": "b", "ratio": None, "setting": {"size": 4}}]
    assert record["keep"](parser.parse_args([]), "doubling", rows) == []
    given = parser.parse_args(["--json", str(tmp_path / "further" / "some.json"), "--csv", str(tmp_path / "some.csv")])
    (path,) = record["keep"](given, "doubling", rows, ["captum"])
    found = json.loads(path.read_text())
    assert (found["benchmark"], found["settings"], found["rows"]) == ("doubling", {"rounds": 3}, rows)
    assert found["machine"]["captum"]
    for name in (socket.gethostname(), platform.node()):
        assert f'"{name}"' not in path.read_text()
    lines = record["tables"](folder=path.parent).splitlines()
    assert lines[0] == "## some"
    assert lines[2] == "rounds 3"
    assert lines[-4:] == ["| case | ratio | setting |", "|---|---|---|", "| a | 1.235 | - |", "| b | - | size 4 |"]
    assert record["tables"](["some"], folder=path.parent).splitlines() == lines


def test_the_peak_is_of_what_this_program_held(record: dict[str, Any]) -> None:
    before = record["resident_peak"]()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = pages * resource.getpagesize() / 2**20
    assert before >= 0.99 * held > 50
    with mmap.mmap(-1, int((before - held + 50) * 2**20)) as block:  # new memory, whatever was freed before
        for start in range(0, len(block), 2**10):
            block[start] = 1
    assert before + 40 < record["resident_peak"]() < before + 200


def rows_of(script: str, path: Path, *arguments: object) -> list[dict[str, Any]]:
    fork_server.run([BENCHMARKS / script, *arguments, "--json", path], check=True)
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


@pytest.mark.timing
@pytest.mark.slow
def test_twice_the_masks_or_images_take_twice_the_time(tmp_path: Path) -> None:
    arguments = ("--num_masks", 127, "--size", 24)
    rows = rows_of("doubling.py", tmp_path / "doubling.json", *arguments, "--rounds", 7, "--no-memory")
    assert len(rows) == 14
    for row in rows:
        # Windows between patches change more patches than those on their grid.
        assert 1 < row["time ratio"] <= 1.1 * max(2, row["forwards then"] / row["forwards"]), row
        assert row["masks then"] <= 2.05 * row["masks"], row
        if not row["case"].startswith("patches"):
            assert row["forwards then"] <= 2.05 * row["forwards"], row
    # And as much memory: of what grows with masks or images, were anything kept.
    rows = rows_of("doubling.py", tmp_path / "memory.json", *arguments, "--cases", "patches_3d", "--rounds", 1)
    assert all(row["memory ratio"] < 1.05 for row in rows), rows


@pytest.mark.slow
def test_peers_are_plotted_against_masks_and_size(tmp_path: Path) -> None:
    plot = tmp_path / "peers.png"
    sizes = ("--tiles", 2, 4, "--sizes", 8, 16, "--batch_size", 8, "--rounds", 1)
    rows = rows_of("peers.py", tmp_path / "peers.json", *sizes, "--questions", "occlusion", "rise", "--plot", plot)
    assert {(row["setting"]["size"], row["setting"]["tiles"]) for row in rows} == {(8, 2), (8, 4), (16, 2), (16, 4)}
    assert all(row["ratio"] > 0 for row in rows)
    assert max(row["difference"] for row in rows) < 1e-3
    from matplotlib.image import imread

    picture = imread(plot)[..., :3]
    assert min(picture.shape[:2]) > 300
    colours = {tuple(colour) for colour in picture.reshape(-1, 3)[::7].round(1).tolist()}
    assert len(colours) > 5  # a line a tool
