"""Running a tutorial in a copy of its folder."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.paths import ROOT


def run_notebook(name: str, folder: Path, run_from: str = "tutorials", smaller: Mapping[str, str] = {}) -> None:
    """Execute a notebook, in a copy, so that whatever it writes beside itself does not stay.

    Args:
        name: the notebook's file name.
        folder: an empty folder, for the copy.
        run_from: where it runs, in the copy.
        smaller: what replaces a text of its code, so that it takes less long.

    Raises:
        CellExecutionError: with the traceback of a cell that fails.
    """
    nbformat = pytest.importorskip("nbformat", reason='needs pip install "monai-saliency[test]"')
    nbclient = pytest.importorskip("nbclient", reason='needs pip install "monai-saliency[test]"')
    for each in ("tutorials", "bundle"):
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("eval", "demo", "train_data"))
    notebook = nbformat.read(folder / "tutorials" / name, as_version=4)
    for text, other in smaller.items():
        places = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert places, f"{name} has no {text!r}"
        for cell in places:
            cell.source = cell.source.replace(text, other)
    resources = {"metadata": {"path": str(folder / run_from)}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMP_NUM_THREADS", "1")  # two run side by side, and threads of both would wait for each other
        client.execute()
