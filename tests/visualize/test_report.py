"""The report of an output folder: what its pages hold, and what they leave out."""

import base64
import hashlib
import json
import math
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import rows_of
from helpers.own_bundle import run
from helpers.reports import Page, blobs, head, page_of, row, volume_of, write_case, write_failure, write_regions
from helpers.scans import LPS, OBLIQUE, PERMUTED, write_scan
from monai.inferers import SlidingWindowInferer
from PIL import Image

import monai_saliency as ms
from monai_saliency.__main__ import main
from monai_saliency.errors import AdviceError, SettingError
from monai_saliency.handlers.run_settings import described, note_settings
from monai_saliency.metrics import map_agreement
from monai_saliency.storage.tables import LABEL_REGION_COLUMNS, CaseTable
from monai_saliency.transforms import SaveRegionsd
from monai_saliency.visualize.legend import CHANCE, Legend
from monai_saliency.visualize.report import KeptScan, build, write_comparison, write_report
from monai_saliency.visualize.report.cases import read_cohort
from monai_saliency.visualize.report.compared import Runs
from monai_saliency.visualize.report.kept_scan import case_id, kept_path
from monai_saliency.visualize.report.plots import cohort_plots, curve_charts

SHAPE = (26, 30, 22)
MAPS = np.stack([blobs(SHAPE, ((0.4, 0.6, 0.5), 0.5), ((0.6, 0.4, 0.5), -0.25)), blobs(SHAPE, ((0.5, 0.3, 0.6), 0.3))])
HOSTILE = 'a/<img src=x onerror="alert(1)"> & "</script><b>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cohort of two cases with maps, and one without."""
    out = tmp_path / "out"
    scan = head(SHAPE, 0, 1000)
    label = (MAPS[0] > 0.2).astype(np.uint8)
    write_case(out, "ct/one", scan, MAPS, OBLIQUE, errors=0.05 * np.abs(MAPS) + 0.01, label=label, peak_in_label="True")
    write_case(out, "two", scan, MAPS[:1], LPS, peak_in_label="")
    write_failure(out, "broken", "three.nii.gz could not be loaded: 5 < 6")
    return out


def values_and_places(volume: nib.Nifti1Image, path: Path, number: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The values of an embedded volume, and those of a file at the same places of the scanner."""
    whole = nib.load(path)
    voxels = np.asarray(whole.dataobj) if number is None else np.asarray(whole.dataobj)[..., number]
    mm = nib.affines.apply_affine(volume.affine, np.indices(volume.shape).reshape(3, -1).T)
    places = nib.affines.apply_affine(np.linalg.inv(whole.affine), mm)
    assert np.abs(places - np.rint(places)).max() < 1e-3
    return volume.get_fdata().reshape(-1), voxels[tuple(np.rint(places).astype(int).T)]


@pytest.mark.parametrize("affine", [OBLIQUE, LPS, PERMUTED], ids=["oblique", "LPS", "permuted"])
def test_embedded_volumes_are_the_files(affine: np.ndarray, tmp_path: Path) -> None:
    """Each voxel of the page's map, error and scan has the file's value at its place, to the precision that is said."""
    scan, errors = head(SHAPE, -1000, 1200), 0.1 * np.abs(MAPS)
    label = (MAPS[0] > 0.2).astype(np.uint8)
    write_case(tmp_path, "one", scan, MAPS, affine, errors=errors, label=label)
    for name, voxels in (("scan", scan), ("label", label)):
        nib.save(nib.Nifti1Image(voxels, affine), tmp_path / f"{name}.nii.gz")
    write_report(tmp_path)
    data = Page(page_of(tmp_path, "one")).data
    for number in (0, 1):
        for key, ending in (("volume", "saliency"), ("error", "standard_error")):
            volume = volume_of(data["maps"][number][key])
            ours, theirs = values_and_places(volume, tmp_path / f"one_{ending}.nii.gz", number)
            assert np.abs(ours - theirs).max() <= np.abs(theirs).max() * 5.1e-4
            assert np.abs(theirs).max() == pytest.approx(np.abs(MAPS[number]).max() * (0.1 if key == "error" else 1))
    ours, theirs = values_and_places(volume_of(data["scan"]), tmp_path / "scan.nii.gz")
    assert np.abs(ours - theirs).max() <= data["step"] / 2 * 1.001
    assert data["step"] <= 2
    assert data["hounsfield"] == (data["step"] >= 1)
    ours, theirs = values_and_places(volume_of(data["label"]), tmp_path / "label.nii.gz")
    assert np.array_equal(ours, theirs)
    assert ours.sum() == label.sum()  # and none was cut off


def test_large_scans_are_thinned_and_the_peak_stays() -> None:
    shape = (150, 160, 140)
    saliency = blobs(shape, ((0.41, 0.63, 0.52), 0.5))
    saliency[97, 101, 77] = 1.0
    kept = KeptScan.of("a", np.full(shape, 7, np.float32), saliency[None], np.diag([1, 1, 3, 1]), [])
    assert kept.codes.size <= 2_000_000
    assert kept.stride == (2, 1, 1) or kept.stride == (1, 2, 1)  # the thick slices stay
    assert saliency[kept.part].max() == 1.0
    assert np.array_equal(kept.values, np.full(kept.codes.shape, 7.0))


def test_a_kept_scan_is_read_back(tmp_path: Path) -> None:
    label = np.arange(np.prod(SHAPE)).reshape(SHAPE) % 5
    kept = KeptScan.of(HOSTILE, head(SHAPE, 0, 1), MAPS, OBLIQUE, [Legend(2.0, None, "w")] * 2, label, key="why")
    kept.save(tmp_path)
    again = KeptScan.load(kept_path(tmp_path, HOSTILE))
    assert np.array_equal(again.values, kept.values)
    assert np.array_equal(again.label, label[kept.part])
    assert np.array_equal(again.affine, OBLIQUE)
    assert (again.case, again.key, again.legends, again.start, again.stride, again.shape) == (
        *(HOSTILE, "why", kept.legends, kept.start, kept.stride, SHAPE),
    )


def test_the_cohort_page_lists_all_cases(folder: Path) -> None:
    page = Page(write_report(folder))
    rows = [attributes for attributes in page.all("tr") if "data-kind" in attributes]
    assert [each["data-kind"] for each in rows] == ["failed", "explained inside", "explained inside", "explained"]
    assert "three.nii.gz could not be loaded: 5 < 6" in page.text
    assert "2 cases explained" in page.text
    assert "1 failed" in page.text
    links = {each["href"] for each in page.all("a")}
    assert links == {
        f"cases/{case_id('ct/one')}.html",
        f"cases/{case_id('ct/one')}.html#map=1",
        f"cases/{case_id('two')}.html",
        "../summary.csv",
        "#reading",
    }
    for address in [*links - {"#reading"}, *(each["src"] for each in page.all("img"))]:
        assert (folder / "report" / str(address).partition("#")[0]).is_file()
    assert len(page.all("img")) == 3
    assert {"class 0", "class 1"} <= {*[each["value"] for each in page.all("option")]}


def test_names_are_text(tmp_path: Path) -> None:
    """A case's name, its class and its error reach the reader as they are, and do nothing."""
    write_case(tmp_path, HOSTILE, head(SHAPE, 0, 1), MAPS[:1], OBLIQUE, prediction="<u>", **{"class": "<i>liver"})
    write_failure(tmp_path, "<script>alert(2)</script>", "</td><script>alert(3)</script>")
    write_regions(tmp_path, HOSTILE, {"<em>spleen": 0.25, "liver": -0.5})
    index = Page(write_report(tmp_path))
    page = Page(page_of(tmp_path, HOSTILE))
    for words in (HOSTILE, "<u>", "<i>liver"):
        assert words in index.text
        assert words in page.text
    assert "<script>alert(2)</script>" in index.text
    assert "</td><script>alert(3)</script>" in index.text
    assert "<em>spleen" in page.text
    assert page.data["case"] == HOSTILE
    assert [each.get("src") for each in index.all("script")] == ["assets/ratings.js", "assets/cohort.js"]
    assert not [each for read in (index, page) for name in ("b", "i", "u", "em") for each in read.all(name)]


def test_regions_are_bars(tmp_path: Path) -> None:
    write_case(tmp_path, "a", head(SHAPE, 0, 1), MAPS[:1], OBLIQUE)
    age = {"name": "age", "saliency": 0.125, "value": 71.0, "baseline": 62.0}
    write_regions(tmp_path, "a", {"spleen": 0.25, "liver": -0.5, "spine": 0.0}, age)
    write_report(tmp_path)
    page = Page(page_of(tmp_path, "a"))
    bars = [each for each in page.all("span") if each.get("class") in ("warm", "cold")]
    assert [(each["class"], each["style"]) for each in bars] == [
        ("cold", "left:0.00%;width:50.00%"),  # the largest first, towards the left from the middle
        ("warm", "left:50.00%;width:25.00%"),
        ("warm", "left:50.00%;width:12.50%"),
        ("warm", "left:50.00%;width:0.00%"),
    ]
    assert "71 instead of 62" in page.text


@pytest.mark.parametrize("damaged", [False, True])
def test_without_a_kept_scan_the_page_says_what_to_do(folder: Path, damaged: bool) -> None:
    kept_path(folder, "two").write_bytes(b"not one") if damaged else kept_path(folder, "two").unlink()
    index = Page(write_report(folder))
    page = Page(page_of(folder, "two"))
    assert page.data is None
    assert "its scan was not kept (report: false), so explain it again with report: true" in page.text
    assert f"cases/{case_id('two')}.html" in {each["href"] for each in index.all("a")}


def test_colours_of_a_photograph(tmp_path: Path) -> None:
    """A 2D image keeps its colours, each pixel its place."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3)).astype(np.float32)
    saliency = blobs((40, 30), ((0.5, 0.2), 0.5))
    peak = {"peak_x_mm": "12.0", "peak_y_mm": "5.0", "peak_z_mm": "0.0"}
    write_case(tmp_path, "photo", pixels, saliency[None], np.eye(4), rows_down=True, **peak)
    write_report(tmp_path)
    page = Page(page_of(tmp_path, "photo"))
    assert np.array_equal(volume_of(page.data["scan"]).get_fdata(), pixels)
    assert [each.get("src") for each in page.all("script")][1:] == [
        f"../assets/{name}.js" for name in ("ratings", "picture", "case")
    ]
    assert page.data["rowsDown"] is True
    assert "12, 5" in page.text  # a pixel, without a height
    assert "voxel" not in page.text
    assert np.abs(volume_of(page.data["maps"][0]["volume"]).get_fdata() - saliency).max() <= 5e-4


def test_a_report_is_made_anew(folder: Path) -> None:
    write_report(folder)
    CaseTable(folder / "summary.csv").replace({"two"})
    write_report(folder)
    assert page_of(folder, "ct/one").is_file()
    assert not page_of(folder, "two").exists()
    assert not list((folder / "report" / "thumbnails").glob(f"{case_id('two')}*"))


@pytest.mark.parametrize("name", ["report/cases/a.html", "report/index.html", "report/assets/a.css"])
def test_pages_of_somebody_else_stay(name: str, folder: Path) -> None:
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(AdviceError, match=r"report has a .* move the folder away"):
        write_report(folder)
    assert path.read_text() == "mine"


def test_a_table_of_regions_of_somebody_else_stays(tmp_path: Path) -> None:
    write_case(tmp_path, "one", head(SHAPE, 0, 1), MAPS, OBLIQUE)
    (tmp_path / "cohort_regions.csv").write_text("patient,volume\n")
    with pytest.raises(SettingError, match=r"cohort_regions.csv is not a table"):
        write_report(tmp_path)
    assert (tmp_path / "cohort_regions.csv").read_text() == "patient,volume\n"


@pytest.mark.parametrize("made", [True, False])
def test_a_run_ends_with_its_report(made: bool, tmp_path: Path, capfd: Any, caplog: Any, monkeypatch: Any) -> None:
    """Its path is the last line. Where it cannot be made, the run has ended well all the same, and the log says why."""
    write_scan(tmp_path / "scans" / "a.nii.gz", (13, 12, 14), LPS)
    if not made:
        monkeypatch.setattr(build, "read_cohort", lambda folder: {}["the reason"])
    assert len(run(tmp_path / "scans", tmp_path / "out", "none", report=True)) == 1
    index = tmp_path / "out" / "report" / "index.html"
    assert (capfd.readouterr().out.strip().splitlines()[-1] == str(index)) == made
    assert index.is_file() == made
    assert ("'the reason'" in caplog.text) == (not made)
    if made:
        ours, theirs = values_and_places(
            volume_of(Page(page_of(tmp_path / "out", "a")).data["scan"]), tmp_path / "scans" / "a.nii.gz"
        )
        assert np.abs(ours - theirs).max() <= 0.1
        assert ours.max() > 100


def test_the_vendored_viewer_is_the_released_one() -> None:
    """Its sum, version and licence stand beside it."""
    here = Path(build.__file__).parent / "vendored"
    notes = (here / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256((here / "niivue.umd.js").read_bytes()).hexdigest() in notes
    assert "0.69.0" in notes
    assert "BSD 2-Clause License" in (here / "niivue.LICENSE").read_text(encoding="utf-8")


# What is known of a run.
def test_how_the_maps_were_made(tmp_path: Path) -> None:
    """The cohort's page and the case's page have the settings, the last run, the files and a paragraph with sources."""
    method = ms.rise(50, 4, seed=7, fill=ms.ConstantFill(-1.5), target=ms.ClassScore([1], "softmax"))
    table = CaseTable(tmp_path / "summary.csv")
    mark = note_settings(table, described(method, torch.nn.Linear(4, 2)))
    write_case(tmp_path, "a", head(SHAPE, 0, 1), MAPS[:1], OBLIQUE, settings=mark)
    index = Page(write_report(tmp_path))
    page = Page(page_of(tmp_path, "a"))
    for each, up in ((index, "../"), (page, "../../")):
        for words in (
            *("rise, num_masks 50, grid_size 4", "seed 7", "the value -1.5 in the network's input space", "ClassScore"),
            *(f"monai-saliency {ms.__version__}", f"torch {version('torch')}", "RISE: Randomized Input"),
            *("softmax probability", "Linear ", "arXiv 2211.02701"),
        ):
            assert words in each.text, words
        assert f"{up}summary.csv" in {link["href"] for link in each.all("a")}
    assert "../../a_saliency.nii.gz" in {link["href"] for link in page.all("a")}


@pytest.mark.parametrize("name", sorted({*ms.methods.__all__} - {"explain"}))
def test_each_method_has_its_source(name: str) -> None:
    """White-box methods and methods of other packages are described by their settings alone."""
    needed = {"grad_cam": {"target_layer": "0"}, "patch_windows": {"inferer": SlidingWindowInferer((4, 4))}}
    regions = {"regions": ms.Supervoxels(6)} if name in ("region_occlusion", "shapley") else {}
    known = described(getattr(ms.methods, name)(**needed.get(name, regions)), torch.nn.Linear(4, 2))
    template = (Path(build.__file__).parent / "templates" / "base.html").read_text()
    assert known["estimator"] == "None" or f'"{known["estimator"]}": (' in template
    assert known["masks"] == "None" or f'"{known["masks"]}": "' in template


def test_classes_have_their_names(tmp_path: Path) -> None:
    write_case(tmp_path, "a", head(SHAPE, 0, 1), MAPS, OBLIQUE, names={"0": "healthy", "1": "<b>lesion"})
    index = Page(write_report(tmp_path))
    assert [each["value"] for each in index.all("option")][-2:] == ["<b>lesion (class 1)", "healthy (class 0)"]
    page = Page(page_of(tmp_path, "a"))
    assert [each["name"] for each in page.data["maps"]] == ["healthy (class 0)", "<b>lesion (class 1)"]
    assert "predicted <b>lesion" in page.text


def test_a_case_where_nothing_matters(tmp_path: Path) -> None:
    """It says so in its header, its badge and its filter, has no place of a peak, and nothing is coloured."""
    words = "no part of this scan changes the score by more than 0.004"
    places = {"peak_x_mm": "12.5", "peak_y_mm": "5.25", "peak_z_mm": "7.75"}
    for case, more in (("nothing", {"verdict": words}), ("chance", {"verdict": CHANCE}), ("peak", {})):
        write_case(tmp_path, case, head(SHAPE, 0, 1), MAPS[:1], OBLIQUE, **places, **more)
    index = Page(write_report(tmp_path))
    kinds = [each["data-kind"] for each in index.all("tr") if "data-kind" in each]
    assert kinds == ["explained chance", "explained nothing", "explained"]
    verdicts = [Page(page_of(tmp_path, case)).data["maps"][0]["nothing"] for case in ("nothing", "chance", "peak")]
    assert verdicts == [words, CHANCE, ""]
    for case, verdict in zip(("nothing", "chance"), verdicts, strict=False):
        page = Page(page_of(tmp_path, case))
        assert f"class 0: {verdict}" in page.text
        assert "Peak at" not in page.text
    assert "12.5, 5.25, 7.75" in Page(page_of(tmp_path, "peak")).text
    assert index.text.count("12.5, 5.25, 7.75") == 1
    folder = tmp_path / "report" / "thumbnails"
    colours = [np.ptp(np.asarray(Image.open(path)).astype(int), axis=-1).max() for path in sorted(folder.iterdir())]
    assert [colour > 20 for colour in colours] == [False, False, True]  # chance, nothing, peak


def test_a_map_with_cold_colours_only(tmp_path: Path) -> None:
    """Its page and its picture say so: no place of a peak helps a reader there."""
    cold = MAPS[:1].clip(max=0)
    write_case(tmp_path, "cold", head(SHAPE, 0, 1), cold, OBLIQUE)
    write_report(tmp_path)
    words = "no place supports the score: all that is coloured speaks against it"
    assert f"class 0: {words}" in Page(page_of(tmp_path, "cold")).text
    heading = ms.visualize.plot_saliency(head(SHAPE, 0, 1), cold, OBLIQUE, scale=1).get_suptitle()
    assert heading.replace("\n", " ") == words


@pytest.mark.parametrize("words", ["", "score change, summed over 3 window sizes (softmax probability)"])
def test_a_value_above_the_scores_range_is_explained(words: str, tmp_path: Path) -> None:
    write_case(tmp_path, "a", head(SHAPE, 0, 1), 2.6 * MAPS[:1], OBLIQUE, **({"words": words} if words else {}))
    write_case(tmp_path, "b", head(SHAPE, 0, 1), 2.6 * MAPS[:1], OBLIQUE, unit="log-odds")
    assert Page(write_report(tmp_path)).text.count("above 1") == 1
    page, other = (Page(page_of(tmp_path, case)).text for case in "ab")
    assert f"values up to {2.6 * MAPS[0].max():.3g}" in page
    assert "no place supports the score" not in page
    assert ("This map adds up the score's changes" in page) == bool(words)
    assert "values up to" not in other


def test_points_of_the_plots_lie_where_their_figures_do(tmp_path: Path) -> None:
    """A plot whose points lie on a line across or up, such as of one price for all cases, shows nothing."""
    for case, score, peak, seconds in (("a", 0.2, 0.1, 2.0), ("b", 0.6, 0.5, 4.0), ("c", 0.4, 0.2, 3.0)):
        values = {"score": score, "seconds": seconds, "forwards": 10 * seconds, "peak_in_label": "True"}
        write_case(tmp_path, case, head(SHAPE, 0, 1), 2 * peak * MAPS[:1], OBLIQUE, **values)
    write_report(tmp_path)
    peaks, cost = cohort_plots(read_cohort(tmp_path))
    assert [(point.x, point.y) for point in peaks.points] == [
        (0, 0), (1, 1), (pytest.approx(0.5), pytest.approx(0.25, abs=0.01))
    ]  # fmt: skip
    assert [point.y for point in cost.points] == [0, 1, 0.5]
    assert [point.address for point in peaks.points] == [f"cases/{case_id(case)}.html" for case in "abc"]
    assert [words for _, words in peaks.ticks[0]] == ["0.2", "0.4", "0.6"]
    assert peaks.across == "probability"


# Insertion and deletion curves.
OWN, RANDOM = [[0, 0.5, 1], [0.0, 0.75, 1.0]], [[0, 0.5, 1], [0.0, 0.25, 1.0]]


def test_the_page_has_a_drawing_of_the_curves(tmp_path: Path) -> None:
    curves = {"insertion": {"": OWN, "random": RANDOM}}
    figures = {"trust_insertion": 0.625, "trust_insertion_random": 0.375}
    write_case(tmp_path, "one", head(SHAPE, 0, 1000), MAPS[:1], LPS, trust_curves=json.dumps(curves), **figures)
    write_case(tmp_path, "two", head(SHAPE, 0, 1000), MAPS[:1], LPS)
    write_report(tmp_path)
    (drawing,) = Page(page_of(tmp_path, "one")).all("img")
    svg = base64.b64decode(str(drawing["src"]).removeprefix("data:image/svg+xml;base64,")).decode()
    for words in ("this map  0.625", "random map  0.375", "softmax probability", "Insertion (higher is better)"):
        assert words in svg
    assert "voxels shown, the map's highest first (%)" in svg
    assert "Deletion (lower" not in svg
    assert not Page(page_of(tmp_path, "two")).all("img")


def test_a_row_without_curves_has_no_charts() -> None:
    assert curve_charts([row("a", trust_curves="")]) == []


# The report of several runs: agreement, differences, and what is not compared.
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


def positive_top(values: np.ndarray) -> set[int]:
    """The places of the largest 5 % of a flat map's values, without those that are not positive."""
    count = math.ceil(0.05 * values.size)
    largest = np.argsort(values)[-count:]
    return {int(place) for place in largest if values[place] > 0}


def peak_of(values: np.ndarray) -> np.ndarray:
    """Where a flat map is largest, in mm on the oblique grid: x, y and z."""
    voxel = np.unravel_index(values.argmax(), SHAPE)
    return nib.affines.apply_affine(OBLIQUE, np.array(voxel))


def test_agreement_by_hand() -> None:
    """Against numpy, and peaks apart in mm on an oblique grid."""
    agreement = map_agreement(MAPS[0], OTHER[0], OBLIQUE)
    first, second = MAPS[0].ravel().astype(float), OTHER[0].ravel().astype(float)
    assert agreement.pearson == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-9)
    both = positive_top(first) & positive_top(second)
    # Which of equal values are among the largest is left open.
    assert agreement.overlap == pytest.approx(len(both) / len(positive_top(first)), abs=2e-3)
    assert agreement.peak_distance == pytest.approx(np.linalg.norm(peak_of(first) - peak_of(second)))
    assert agreement.difference == pytest.approx(np.abs(first - second).max())


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


def test_cases_that_are_predicted_differently_come_first(tmp_path: Path) -> None:
    """Names of classes may be known to one run only. A map that one run alone has shows its own score and picture."""
    a, b = tmp_path / "a", tmp_path / "b"
    scan = head(SHAPE, 0, 1000)
    names = {"0": "healthy", "1": "lesion"}
    write_case(a, "first", scan, MAPS[:1], LPS, names=names, prediction=1)
    write_case(b, "first", scan, MAPS[:1], LPS, prediction=1)
    write_case(a, "second", scan, MAPS, LPS, names=names, prediction=1, score=0.625)
    write_case(b, "second", scan, MAPS[:1], LPS, prediction=0)
    write_case(a, "third", scan, MAPS[:1], LPS, names=names, prediction="")
    write_case(b, "third", scan, MAPS[:1], LPS, prediction=0)
    index = write_comparison((a, b), tmp_path / "both")
    found = [(line.case, line.words, line.predictions, line.is_flipped) for line in Runs((a, b)).compared()]
    assert found[1:3] == [("second", f"class {i}", ["lesion", "healthy"], True) for i in (0, 1)]
    assert [flipped for *_, flipped in found] == [False, True, True, False]
    page = Page(index)
    places = [page.text.index(f"\n{case}") for case in ("second", "first", "third")]
    assert places == sorted(places)
    assert "cases predicted differently: 1" in page.text
    assert "lesion → healthy" in page.text
    assert "only a explains class 1: give both runs the same list of classes" in page.text
    assert "0.625" in page.text.split("only a")[0]
    assert len(page.all("img")) == 4 * 2 - 1


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


# What a cohort shows: the mean of maps in the regions of label maps, against plain loops over voxels.
SMALL = (6, 5, 4)
EXPLANATION = SimpleNamespace(explained=[(0, None, 0.9), (1, None, 0.1)], masks=SimpleNamespace(regions=None))
NAMES = {2: "liver", "7": "=spleen"}


def case(folder: Path, name: str, seed: int, labels: list[int], **values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Write a case of random maps and labels, as a run does, and return both."""
    rng = np.random.default_rng(seed)
    maps, label = rng.normal(size=(2, *SMALL)).astype(np.float32), rng.choice(labels, SMALL)
    maps[1] = -np.abs(maps[1])
    write_case(folder, name, head(SMALL, 0, 1), maps, np.eye(4), names={"1": "tumour"}, **values)
    item = {"saliency": torch.from_numpy(maps), "label_on_map": label, "case": name, "explanation": EXPLANATION}
    SaveRegionsd(folder, NAMES)(item)
    return maps, label


def slow(maps: np.ndarray, label: np.ndarray, explained: int, region: int) -> tuple[float, float, int]:
    """The mean in a region, and its share of what is above 0."""
    inside, positive, total = [], 0.0, 0.0
    for voxel in np.ndindex(*SMALL):
        value = float(maps[(explained, *voxel)])
        total += max(value, 0)
        if label[voxel] == region:
            inside.append(value)
            positive += max(value, 0)
    return sum(inside) / len(inside), positive / total if total else np.nan, len(inside)


def test_equals_plain_loops(tmp_path: Path) -> None:
    """Two cases that share one region of three; a case whose score is another one is not mixed with them."""
    cases = {"a": case(tmp_path, "a", 0, [0, 2]), "b": case(tmp_path, "b", 1, [2, 7, 7])}
    case(tmp_path, "c", 2, [2], quantity="log-odds", unit="logit")
    each = CaseTable(tmp_path / "label_regions.csv", columns=LABEL_REGION_COLUMNS).read()
    assert len([line for line in each if line["case"] != "c"]) == 8
    for line in each[:8]:
        mean, mass, voxels = slow(*cases[line["case"]], int(line["class"]), int(line["region"]))
        assert (float(line["saliency"]), int(line["voxels"])) == (pytest.approx(mean, rel=1e-5), voxels)
        assert float(line["mass"] or "nan") == pytest.approx(mass, rel=1e-5, nan_ok=True)
    page = Page(write_report(tmp_path))
    found = rows_of(tmp_path / "cohort_regions.csv")
    names = {"0": "outside", "2": "liver", "7": "'=spleen"}
    assert {(line["unit"], line["region"], line["name"]) for line in found} == {
        *(("probability", *pair) for pair in names.items()),
        ("logit", "2", "liver"),
    }
    for line in found:
        if line["unit"] == "logit":
            continue
        region, holds = int(line["region"]), {0: "a", 2: "ab", 7: "b"}[int(line["region"])]
        values = np.array([slow(*cases[name], int(line["class"]), region)[:2] for name in holds])
        assert int(line["cases"]) == len(holds)
        for place, name in enumerate(("saliency", "mass")):
            spread = np.sqrt(np.square(values[:, place] - values[:, place].mean()).sum()) if len(holds) == 2 else np.nan
            for figure, expected in (("mean", values[:, place].mean()), ("sd", spread)):
                assert float(line[f"{name}_{figure}"] or "nan") == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert {(line["class"], line["class_name"]) for line in found} == {("0", ""), ("1", "tumour")}
    shown = next(line for line in found if (line["class"], line["region"], line["cases"]) == ("0", "2", "2"))
    assert f"{float(shown['saliency_mean']):.3g} ± {float(shown['saliency_sd']):.2g}" in page.text
    for words in (
        "Mean in each region: softmax probability (probability)",
        "log-odds (logit)",
        "=spleen",
        "tumour (class 1)",
    ):
        assert words in page.text


def test_without_numbers_of_regions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Labels that are no whole numbers, or none, leave no rows, and those of an earlier run go."""
    for label in (np.full(SMALL, 0.5), None):
        case(tmp_path, "a", 0, [1])
        item = {"saliency": torch.ones(2, *SMALL), "case": "a", "explanation": EXPLANATION}
        SaveRegionsd(tmp_path)(item if label is None else item | {"label_on_map": label})
        assert not (tmp_path / "label_regions.csv").exists()
    assert "case a: its label map does not hold numbers of regions" in caplog.text
    assert "Mean in each region" not in Page(write_report(tmp_path)).text
    assert not (tmp_path / "cohort_regions.csv").exists()
