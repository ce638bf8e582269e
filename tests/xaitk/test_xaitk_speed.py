"""Faster than xaitk-saliency, in less memory: what tests/benchmarks/xaitk.py measures, in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import fork_server
from helpers.paths import TESTS

SCRIPT = TESTS / "benchmarks" / "xaitk.py"


def measured(folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """The rows of a run of the benchmark."""
    fork_server.run([SCRIPT, *arguments, "--output", folder], check=True)
    rows: list[dict[str, Any]] = json.loads((folder / "xaitk.json").read_text())
    assert len((folder / "xaitk.csv").read_text().splitlines()) == 1 + len(rows)
    return rows


@pytest.mark.timing
def test_rise_on_an_image(tmp_path: Path) -> None:
    """2000 masks on 224^2 with a light network: here ten times faster, fourteen times without the network, in a
    thirtieth of the memory. Seconds are of the processor, on both sides of a ratio.
    """
    (row,) = measured(tmp_path, "--only", "RISE", "--num_masks", 2000, "--size", 224, "--rounds", 2)
    assert row["difference"] < 1e-4
    assert row["ratio_cpu"] >= 3
    assert row["ratio_cpu_without_network"] >= 10
    assert row["ours_memory"] <= row["theirs_memory"] / 5


@pytest.mark.timing
@pytest.mark.slow
def test_rise_on_a_volume() -> None:
    """2000 masks on 128^3 need less than 1 GB above what the network needs for a batch."""
    setting = {"num_masks": 2000, "size": 128, "batch_size": 16, "dims": 3}
    done = fork_server.run([SCRIPT, "--inside", json.dumps(["RISE 3D", "ours", setting])], check=True)
    assert 0 < float((done.stdout or "").split()[-1]) < 1000


def test_every_method_runs_and_agrees(tmp_path: Path) -> None:
    """Small, and without claims about time."""
    rows = measured(tmp_path, "--num_masks", 40, "--size", 40, "--size_3d", 16, "--rounds", 1, "--memory", "no")
    assert len(rows) >= 9
    for row in rows:
        assert row["ours_cpu"] > 0
        if row["method"] != "RISE 3D":
            assert row["difference"] < 1e-4, row["method"]
