"""The tutorials: stored as they ran, and still running."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.notebooks import run_notebook
from helpers.paths import ROOT

NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))

#: run by a test of its own, tests/bundle/test_nnunet_overlay.py, where nnU-Net is installed
ELSEWHERE = {"nnunet"}
#: what a test replaces, by notebook: fewer masks and runs, all cells and their assertions
SMALLER = {
    "cohort_overnight": {"num_scans=4": "num_scans=3", '"300"': '"100"'},
    "coming_from_captum": {"range(3):\n        torch": "range(1):\n        torch"},
    "coming_from_xaitk": {"1000": "200"},
    "explain_a_brain": {"window_size=16, stride=8": "window_size=16, stride=16", "125, 250, 500": "100", "500": "100"},
    "explain_your_own_bundle": {'("run", "explain",': '("run", "explain", "--saliency_num_masks", "60",'},
    "first_map": {"focused_rise(": "focused_rise(100, "},
    "is_this_map_any_good": {"focused_rise(": "focused_rise(100, "},
    "segmentation_ct": {"window_size=8, stride=4": "window_size=8, stride=8"},
    "sweep_on_slurm": {"(50, 100, 200)": "(20, 40)"},
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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


def prose(path: Path) -> list[str]:
    """The texts of a notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


@each_notebook
def test_begins_with_what_a_reader_will_have_and_ends_with_where_to_go(path: Path) -> None:
    texts = prose(path)
    first = " ".join(texts[0].split())
    assert first.startswith("# ")
    assert "At the end you will" in first
    assert "## Where to go next" in texts[-1]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [notebook["cells"][place]["cell_type"] for place in (0, -1)] == ["markdown", "markdown"]


@each_notebook
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", "\n".join(prose(path)))
    assert [link for link in links if link.endswith(".ipynb")]
    missing = [link for link in links if not link.startswith("http") and not (path.parent / link).exists()]
    assert not missing


@each_notebook
def test_finds_the_bundle_from_the_root_too(path: Path) -> None:
    """As the notebook whose first cells are run from there does."""
    code = path.read_text(encoding="utf-8")
    if "../bundle" in code:
        found = 'next(folder for folder in (Path(\\"bundle\\"), Path(\\"../bundle\\")) if folder.is_dir())'
        assert code.count("../bundle\\") == code.count(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """One from the root, as a reader may who has cloned the project."""
    run_notebook(path.name, tmp_path, "." if path.stem == "first_map" else "tutorials", SMALLER.get(path.stem, {}))
