"""Faster than xaitk-saliency, in less memory: what tests/benchmarks/xaitk.py measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import fork_server
from helpers.paths import TESTS


@pytest.mark.timing
def test_rise_on_an_image(tmp_path: Path) -> None:
    """2000 masks on 224^2 with a light network. Seconds are of the processor, on both sides of a ratio."""
    path = tmp_path / "rows.json"
    fork_server.run([TESTS / "benchmarks" / "xaitk.py", "--only", "RISE", "--rounds", 2, "--json", path], check=True)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["difference"] < 1e-4
    assert row["times faster"] >= 3
    assert row["times less memory"] >= 5
