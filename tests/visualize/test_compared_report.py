"""The report of several runs: agreement, differences, and what is not compared."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.reports import Page, blobs, head, page_of, volume_of, write_case, write_failure
from helpers.scans import LPS, OBLIQUE

from monai_saliency.__main__ import main
from monai_saliency.metrics import map_agreement
from monai_saliency.visualize.report import write_comparison
from monai_saliency.visualize.report.comparison import Runs

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


def test_the_difference_map_is_the_difference(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """In the score's unit and on the maps' scale."""
    write_comparison(runs, tmp_path / "both")
    page = Page(page_of(tmp_path / "both", "ct/one"))
    names = [each["name"] for each in page.data["maps"]]
    both = [f"{run}: class {k}" for run in "ab" for k in (0, 1)]
    assert names == [*both, *(f"class {k}: b minus a" for k in (0, 1))]
    assert [each["error"] is not None for each in page.data["maps"]] == [True, True, *[False] * 4]
    assert {each["scale"] for each in page.data["maps"]} == {1.0}
    volumes = [volume_of(each["volume"]) for each in page.data["maps"]]
    index = np.moveaxis(np.indices(volumes[4].shape), 0, -1)
    places = np.rint(nib.affines.apply_affine(np.linalg.inv(OBLIQUE) @ volumes[4].affine, index)).astype(int)
    expected = (OTHER[0] - MAPS[0])[tuple(np.moveaxis(places, -1, 0))]
    assert np.abs(volumes[4].get_fdata() - expected).max() <= 1e-3 * np.abs(expected).max()
    assert np.abs(expected).max() > 0.2
    assert not volumes[5].get_fdata().any()  # the second class is equal
    assert "Agreement with a" in page.text


def test_what_is_not_compared_says_why(runs: tuple[Path, Path], tmp_path: Path) -> None:
    index = write_comparison(runs, tmp_path / "both")
    found = {name: Runs(runs).case(name) for name in Runs(runs).cases}
    problems = {name: [line.problem for line in case.lines] for name, case in found.items()}
    assert problems["ct/one"] == ["", ""]
    assert problems["only a"] == ["not in b"]
    assert problems["failed"] == ["failed in b: 5 < 6"]
    assert "the affines differ" in problems["moved"][0]
    assert "the grids differ: (26, 30, 22) voxels in a, (25, 30, 22) in b" in problems["cut"][0]
    assert "of different scans of this name: `scan` is 0123abcd in a, ffff0000 in b" in problems["other scan"][0]
    assert "a explains the quantity 'softmax probability', b 'logit'" in problems["unit"][0]
    page = Page(index)
    for each in problems.values():
        assert each[0] in page.text
    pages = {path.stem for path in (tmp_path / "both" / "report" / "cases").glob("*.html")}
    assert pages == {found[name].files.id for name in ("ct/one", "unit")}
    unit = Page(page_of(tmp_path / "both", "unit"))  # both maps, and no difference
    assert [each["name"] for each in unit.data["maps"]] == ["a: class 0", "b: class 0"]
    for address in [*(each["src"] for each in page.all("img")), *(each["href"] for each in page.all("a"))]:
        assert (index.parent / str(address).partition("#")[0]).is_file()


def test_three_runs_and_a_class_of_one(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Each is compared with the first; a class that one run explains is named."""
    third = tmp_path / "third" / "b"
    write_case(third, "ct/one", head(SHAPE, 0, 1000), OTHER[:1], OBLIQUE)
    case = Runs([*runs, third]).case("ct/one")
    assert [(line.words, line.run) for line in case.lines] == [
        ("class 0", f"{tmp_path.name}/b"),
        ("class 1", f"{tmp_path.name}/b"),
        ("class 0", "third/b"),
        ("class 1", "third/b"),
    ]
    assert case.lines[2].agreement == case.lines[0].agreement
    assert case.lines[3].agreement is None
    assert case.lines[3].problem == f"only {tmp_path.name}/a explains class 1"


def test_the_command(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, runs)
    main(["report", a, b, "--output_dir", str(tmp_path / "both")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both" / "report" / "index.html")
    wrong = {
        "give --output_dir": [a, b],
        "is for several runs": [a, "--output_dir", str(tmp_path / "x")],
        "must be given once": [a, a, "--output_dir", str(tmp_path / "x")],
        "is the output folder of a run": [a, b, "--output_dir", a],
    }
    for words, arguments in wrong.items():
        with pytest.raises(SystemExit, match=words):
            main(["report", *arguments])
