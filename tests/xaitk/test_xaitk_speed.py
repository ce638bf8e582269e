"""Faster than xaitk-saliency, in less memory: what tests/benchmarks/xaitk.py measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import fork_server
from helpers.paths import TESTS


def measured(path: Path, *arguments: object) -> list[dict[str, Any]]:
    fork_server.run([TESTS / "benchmarks" / "xaitk.py", *arguments, "--output", path], check=True)
    return json.loads(path.read_text())


@pytest.mark.timing
def test_rise_on_an_image(tmp_path: Path) -> None:
    """2000 masks on 224^2 with a light network. Seconds are of the processor, on both sides of a ratio."""
    (row,) = measured(tmp_path / "rows.json", "--only", "RISE", "--rounds", 2)
    assert row["difference"] < 1e-4
    assert row["ratio"] >= 3
    assert row["ratio_memory"] >= 5


@pytest.mark.slow
def test_every_method_agrees(tmp_path: Path) -> None:
    rows = measured(tmp_path / "rows.json", "--num_masks", 40, "--size", 40, "--rounds", 1, "--memory", "no")
    assert len(rows) == 8
    for row in rows:
        assert row["difference"] < 1e-4, row["method"]
