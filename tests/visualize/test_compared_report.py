"""The report of several runs: agreement, differences, and what is not compared."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.reports import Page, blobs, head, write_case, write_failure
from helpers.scans import LPS, OBLIQUE

from monai_saliency.__main__ import main
from monai_saliency.metrics import map_agreement
from monai_saliency.visualize.report import write_comparison
from monai_saliency.visualize.report.compared import Runs

SHAPE = (26, 30, 22)
MAPS = np.stack([blobs(SHAPE, ((0.4, 0.6, 0.5), 0.5), ((0.6, 0.4, 0.5), -0.25)), blobs(SHAPE, ((0.5, 0.3, 0.6), 0.3))])
OTHER = np.stack([blobs(SHAPE, ((0.5, 0.5, 0.5), 0.4)), MAPS[1]])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that share a case with two maps, and differ in the others."""
    a, b = tmp_path / "a", tmp_path / "b"
    scan = head(SHAPE, 0, 1000)
    write_case(a, "ct/one", scan, MAPS, OBLIQUE, errors=0.05 * np.abs(MAPS) + 0.01)
    write_case(b, "ct/one", scan, OTHER, OBLIQUE)
    write_case(a, "only a", scan, MAPS[:1], LPS)
    write_case(a, "moved", scan, MAPS[:1], LPS)
    write_case(b, "moved", scan, MAPS[:1], OBLIQUE)
    write_case(a, "cut", scan, MAPS[:1], LPS)
    write_case(b, "cut", scan[1:], MAPS[:1, 1:], LPS)
    write_case(a, "unit", scan, MAPS[:1], LPS)
    write_case(b, "unit", scan, MAPS[:1], LPS, quantity="logit", unit="network output")
    write_case(a, "other scan", scan, MAPS[:1], LPS, mark="0123abcd")
    write_case(b, "other scan", scan, MAPS[:1], LPS, mark="ffff0000")
    write_case(a, "failed", scan, MAPS[:1], LPS)
    write_failure(b, "failed", "5 < 6")
    return a, b


def test_agreement_by_hand() -> None:
    """Against numpy, and peaks apart in mm on an oblique grid."""
    found = map_agreement(MAPS[0], OTHER[0], OBLIQUE)
    first, second = MAPS[0].ravel().astype(float), OTHER[0].ravel().astype(float)
    assert found.pearson == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-9)
    tops = [{*np.argsort(each)[-int(np.ceil(0.05 * each.size)) :].tolist()} for each in (first, second)]
    positive = [{i for i in top if each[i] > 0} for top, each in zip(tops, (first, second), strict=True)]
    assert found.overlap == pytest.approx(len(positive[0] & positive[1]) / len(positive[0]), abs=2e-3)
    peaks = [np.array(np.unravel_index(each.argmax(), SHAPE)) for each in (first, second)]
    places = [nib.affines.apply_affine(OBLIQUE, peak) for peak in peaks]
    assert found.peak_distance == pytest.approx(np.linalg.norm(places[0] - places[1]))
    assert found.difference == pytest.approx(np.abs(first - second).max())


def test_what_is_not_compared_says_why(runs: tuple[Path, Path], tmp_path: Path) -> None:
    index = write_comparison(runs, tmp_path / "both")
    problems: dict[str, list[str]] = {}
    for line in Runs(runs).compared():
        problems.setdefault(line.case, []).append(line.problem)
    assert problems["ct/one"] == ["", ""]
    assert problems["only a"] == ["not in b"]
    assert problems["failed"] == ["failed in b: 5 < 6"]
    assert "the affines differ" in problems["moved"][0]
    assert "the grids differ, (26, 30, 22) and (25, 30, 22) voxels" in problems["cut"][0]
    assert "the scans differ: `scan` is '0123abcd' and 'ffff0000'" in problems["other scan"][0]
    assert "`quantity` is 'softmax probability' and 'logit'" in problems["unit"][0]
    page = Page(index)
    for each in problems.values():
        assert each[0] in page.text
    pictures = page.all("img")
    assert len(pictures) == 2 * 4  # two maps of ct/one; of the other scan and the other score both maps too
    for each in pictures:
        assert (index.parent / str(each["src"])).is_file()


def test_the_command(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, runs)
    main(["report", a, b, "--output_dir", str(tmp_path / "both")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both" / "report" / "index.html")
    wrong = {
        "give --output_dir": [a, b],
        "is for several runs": [a, "--output_dir", str(tmp_path / "x")],
        "each once": [a, a, "--output_dir", str(tmp_path / "x")],
        "is the output folder of a run": [a, b, "--output_dir", a],
    }
    for words, arguments in wrong.items():
        with pytest.raises(SystemExit, match=words):
            main(["report", *arguments])
