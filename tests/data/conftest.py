"""What the tests of cached datasets share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cached_cohort import scan
from helpers.mapped_cohort import NUM_MASKS


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """How often each case was computed since the last question."""
    log = tmp_path / "computed.txt"
    monkeypatch.setenv("COMPUTED", str(log))

    def read() -> Counter[str]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return Counter(names)

    return read


@pytest.fixture
def cohort(tmp_path: Path, computed: Any) -> Path:
    (tmp_path / "cohort").mkdir()
    for number, name in enumerate("abcd"):
        scan(tmp_path / "cohort" / f"{name}.nii.gz", number)
    return tmp_path / "cohort"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Scans preprocessed and scans explained since the last question."""
    log = tmp_path / "notes.txt"
    monkeypatch.setenv("NOTES", str(log))

    def read() -> dict[str, int]:
        found = Counter(log.read_text().split() if log.exists() else [])
        log.unlink(missing_ok=True)
        return {"scans": found["scan"], "maps": found["forward"] // (NUM_MASKS + 1)}

    return read
