"""The tutorials: stored as they ran, and still running."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers.paths import ROOT

NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"/(?:work|home|tmp|root|opt|Users|private|var/folders)/|[A-Za-z]:\\\\Users")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_tutorials() -> None:
    assert NOTEBOOKS


@each_notebook
def test_stored_notebook_is_as_it_ran(path: Path) -> None:
    assert path.stat().st_size < 1_000_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # Run in one go from the top, none left out.
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


@each_notebook
def test_stored_notebook_knows_no_machine(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)  # base64 may hold anything
    assert not MACHINE_PATH.findall(json.dumps(notebook))


@pytest.mark.parametrize(
    "text", ["/private/x", "in /tmp/abc", "file:///home/me", "/root/.cache", "/opt/conda", "/Users/me/"]
)
def test_machine_paths_are_seen(text: str) -> None:
    assert MACHINE_PATH.search(json.dumps({"text": text}))


@pytest.mark.slow
@pytest.mark.parametrize(("run_from", "cells"), [("tutorials", None), (".", 6)])
@each_notebook
def test_notebook_runs(
    path: Path, run_from: str, cells: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy, so that whatever a notebook writes beside itself does not stay.

    From the tutorials' folder all of it, from the repository's root the first cells, which find the bundle.
    """
    nbformat = pytest.importorskip("nbformat", reason='needs pip install "monai-saliency[test]"')
    nbclient = pytest.importorskip("nbclient", reason='needs pip install "monai-saliency[test]"')
    for name in ("tutorials", "bundle"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("eval", "demo", "train_data"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(tmp_path / "tutorials" / path.name, as_version=4)
    notebook.cells = notebook.cells[:cells]
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path / run_from)}}
    )
    client.execute()  # raises CellExecutionError, with the cell's traceback
