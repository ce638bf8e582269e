"""The run ``compare_methods`` of our bundle and of the overlay."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import monai.bundle
import numpy as np
import pytest
from helpers.files import maps, rows_of
from helpers.layouts import Bundle
from helpers.own_bundle import rank, settings
from helpers.scans import LPS, volume, write_scan, write_scans

from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.method_choice import MethodChoice, next_command
from monai_saliency.errors import root_cause
from monai_saliency.metrics.which_method import Comparison, MethodComparison

METHODS: list[Any] = ["hierarchical_occlusion", {"method": "rise", "num_masks": 20, "grid_size": 3}]


def compare(folder: Path, **given: Any) -> None:
    own = settings(folder, "out", compared_methods=METHODS, compare_cases=3, **given)
    for name in ("method", "num_masks", "grid_size"):
        del own[name]
    monai.bundle.run("compare_methods", **own)


def predicted(folder: Path) -> int:
    """Images that went through the network so far."""
    return sum(map(int, (folder / "out.log").read_text().split()))


def test_table_and_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    write_scans(tmp_path, 3)
    command = ["monai.bundle", "run", "compare_methods", "--config_file", "a b.yaml", "--compare_cases", "3"]
    monkeypatch.setattr(sys, "argv", command)
    compare(tmp_path)
    out = capsys.readouterr().out
    rows = rows_of(tmp_path / "out" / "methods.csv")
    names = ["hierarchical_occlusion", "rise --num_masks 20 --grid_size 3"]
    assert [row["method"] for row in rows][:2] == names
    assert [row["method"] for row in rows][2:] == [
        f"control: {name}" for name in ("intensity", "edges", "random", "darkness")
    ]
    assert [row["cases"] for row in rows] == ["3"] * 6
    assert "The truth: " in out
    assert not (tmp_path / "out" / "summary.csv").exists()
    page = (tmp_path / "out" / "report" / "methods.html").read_text()
    assert all(row["method"] in page for row in rows)
    shown = re.findall('src="(methods/[^"]*)"', page)
    assert len(shown) == len(set(shown)) == 2 * 3  # the scan and one map: the other method is left out
    assert all((tmp_path / "out" / "report" / address).stat().st_size for address in shown)
    first = predicted(tmp_path)
    kept = (tmp_path / "out" / "methods.csv").read_bytes()
    compare(tmp_path)
    assert predicted(tmp_path) < 1.35 * first
    assert (tmp_path / "out" / "methods.csv").read_bytes() == kept


def explain(folder: Path, out: str, **given: Any) -> dict[str, bytes]:
    """The maps of a run with a setting ``method`` and no other of it."""
    own = settings(folder, out, compared_methods=METHODS, compare_cases=3)
    for name in ("num_masks", "grid_size"):
        del own[name]
    monai.bundle.run(**own | given)
    return maps(folder / out)


@pytest.mark.slow
def test_method_auto_is_the_plain_run_with_the_best(tmp_path: Path, capsys: Any) -> None:
    """In a run, in the same run again, and in two processes that share its masks."""
    write_scans(tmp_path, 4)
    with pytest.raises(RuntimeError) as caught:
        explain(tmp_path, "auto", method="auto", num_masks=3)
    assert str(root_cause(caught.value)).startswith("`method` auto chooses the settings too: leave out --num_masks, ")
    auto = explain(tmp_path, "auto", method="auto")
    kept = json.loads((tmp_path / "auto" / "method.json").read_text())["method"]
    assert auto == explain(tmp_path, "plain", **kept)
    assert len(auto) == 4
    out = capsys.readouterr().out
    assert out.count("The truth: ") == out.count("method auto: ") == 1
    assert "measured now on 3 scans (" in out
    first = sum(map(int, (tmp_path / "auto.log").read_text().split()))
    assert explain(tmp_path, "auto", method="auto") == auto
    again = capsys.readouterr().out
    assert "The truth: " not in again
    assert re.search(r"method auto: .*, measured before on 3 scans \(.*methods.csv", again)
    assert sum(map(int, (tmp_path / "auto.log").read_text().split())) < 1.2 * first
    for number in range(2):
        with suppress(FileNotFoundError):
            explain(tmp_path, "shared", method="auto", **rank(number, 2, "masks"))
    assert maps(tmp_path / "shared") == auto
    assert json.loads((tmp_path / "shared" / "method.json").read_text())["method"] == kept
    out = capsys.readouterr().out
    assert "The truth: " not in out.partition("method auto: ")[2]
    assert out.count("method auto: ") == 2


def test_the_best_of_a_comparison_is_taken_by_its_key(tmp_path: Path, monkeypatch: Any) -> None:
    """Not that of other weights; and without a best method the default."""
    write_scans(tmp_path, 3)
    found: list[Any] = []

    def run(self: Comparison, scans: Any) -> MethodComparison:
        best = None if found else "rise --num_masks 20 --grid_size 3"
        found.append(best)
        return MethodComparison(best, "nothing", "none is to be trusted", [], [], {})

    monkeypatch.setattr(Comparison, "run", run)
    explain(tmp_path, "out", method="auto")
    explain(tmp_path, "out", method="auto")
    assert len(found) == 1
    rows = rows_of(tmp_path / "out" / "summary.csv")
    assert {row["images"] for row in rows} == {"21"}
    other = {"_target_": "helpers.counting_network.CountingNetwork", "log": str(tmp_path / "log"), "seed": 1}
    explain(tmp_path, "out", method="auto", network_def=other)
    assert len(found) == 2
    for seed in range(3):
        write_scan(tmp_path / "second" / f"new{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    explain(tmp_path, "out", method="auto", network_def=other, dataset_dir=str(tmp_path / "second"))
    assert len(found) == 3  # another cohort in the same folder is measured again
    described = json.loads((tmp_path / "out" / "summary.settings.json").read_text())
    assert any("FocusedMasks" in str(settings) for settings in described.values())


def test_the_next_command(tmp_path: Path, monkeypatch: Any) -> None:
    best = 'sliding_window --window_size "[8, 8]"'
    command = "x run compare_methods --config_file a.yaml --compare_cases 3 --method rise --output_dir 'b c'"
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    words = "python -m monai.bundle run run --config_file a.yaml --output_dir 'b c' --method sliding_window"
    assert next_command(best, "") == f"{words} --window_size '[8, 8]'"
    monkeypatch.setattr(sys, "argv", shlex.split("x run compare_methods --saliency_compare_cases 4"))
    words = "python -m monai.bundle run explain --saliency_method sliding_window --saliency_window_size '[8, 8]'"
    assert next_command(best, "saliency_") == words
    monkeypatch.setattr(sys, "argv", ["notebook"])
    assert next_command("rise --num_masks 9", "") == "--method rise --num_masks 9"


@pytest.mark.parametrize(("name", "text"), [("methods.csv", "name,price\na,1\n"), ("method.json", "[1]")])
def test_files_of_others_stay(name: str, text: str, tmp_path: Path) -> None:
    write_scans(tmp_path, 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(text)
    with pytest.raises(RuntimeError) as caught:
        compare(tmp_path)
    assert f"{name} is not" in str(root_cause(caught.value))
    assert (tmp_path / "out" / name).read_text() == text


@pytest.mark.slow
def test_the_overlay_compares(make: Callable[[str], Bundle], tmp_path: Path, capsys: Any) -> None:
    """A segmentation under a sliding window, first of a cohort that is too small."""
    bundle = make("spleen_ct_segmentation")
    given = {"saliency_dir": str(tmp_path / "maps"), "saliency_compare_cases": 3, "saliency_compared_methods": METHODS}
    files = [str(bundle.config), str(overlay_path("explain"))]
    with pytest.raises(RuntimeError) as caught:
        monai.bundle.run("compare_methods", config_file=files, **bundle.settings | given)
    words = "methods are compared on at least 3 cases, the cohort has 2 to load"
    assert words in str(root_cause(caught.value))
    folder = next(iter(bundle.scans.values())).parent
    for seed in (7, 8):
        volume(folder / f"spleen_{seed}.nii.gz", (13, 12, 12), np.diag([2.0, 2.0, 2.0, 1.0]), seed)
    monai.bundle.run("compare_methods", config_file=files, **bundle.settings | given)
    rows = rows_of(tmp_path / "maps" / "methods.csv")
    assert [row["problem"] for row in rows] == [""] * 6
    assert "The truth: " in capsys.readouterr().out
    assert not list((tmp_path / "maps").rglob("*.nii.gz"))
    given = bundle.settings | given
    monai.bundle.run("explain", config_file=files, **given | {"saliency_method": "auto"})
    assert "The truth: " not in capsys.readouterr().out  # it is known
    kept = json.loads((tmp_path / "maps" / "method.json").read_text())["method"]
    given |= {f"saliency_{id}": value for id, value in kept.items()} | {"saliency_dir": str(tmp_path / "plain")}
    monai.bundle.run("explain", config_file=files, **given)
    assert len(maps(tmp_path / "maps")) == 4
    assert maps(tmp_path / "maps") == maps(tmp_path / "plain")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": ["focussed_rise"]}, "did you mean `focused_rise`"),
        ({"methods": [{"method": "rise", "num_maks": 3}]}, "rise has no setting `num_maks`: did you mean `num_masks`"),
        ({"cases": 1}, "`compare_cases` must be a whole number of at least 3, got 1"),
    ],
)
def test_misuse_is_a_sentence(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        MethodChoice(tmp_path, **given)
