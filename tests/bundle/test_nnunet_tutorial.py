"""The tutorial on nnU-Net, which trains a small model first."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.notebooks import run_notebook


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("nnunetv2", reason="nnU-Net is not installed")
    run_notebook("nnunet.ipynb", tmp_path)
