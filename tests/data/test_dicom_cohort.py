"""DICOM series as cases of a cohort."""

import shutil
from pathlib import Path

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
from helpers.dicom_series import PATIENT, SLICES, check_parametric_map, expected_affine, stored, write
from helpers.files import rows_of
from helpers.own_bundle import forwards, launch, settings
from monai.data import MetaTensor

from monai_saliency.data import find_cases
from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.errors import CaseError
from monai_saliency.handlers.run_settings import scan_mark
from monai_saliency.storage.dicom import series_files, series_id
from monai_saliency.storage.scans import scan_loader

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")

FOLDER = "Doe_Jane"


def cohort(root: Path) -> Path:
    """A scan, two series in one folder, a series with a gap, an empty file, and a report."""
    root.mkdir()
    nib.save(nib.Nifti1Image(np.zeros((4, 5, 6), np.float32), np.eye(4)), root / "scan.nii.gz")
    write(root / FOLDER, "1.2.3")
    write(root / FOLDER, "1.2.4")
    write(root / FOLDER / "gap", "1.2.5", lambda number, made: None if number == 2 else made)
    (root / FOLDER / "empty.dcm").touch()
    (root / FOLDER / "readme.txt").write_text("no scan")

    def report(number: int, made: pydicom.Dataset) -> pydicom.Dataset | None:
        made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = pydicom.uid.BasicTextSRStorage
        del made.PixelData, made.Rows
        return made if number == 0 else None

    write_only(root / FOLDER / "report", report)
    return root


def write_only(folder: Path, change: object) -> None:
    with pytest.raises(KeyError):  # it is written, and not found
        write(folder, "1.2.6", change)  # type: ignore[arg-type]


def test_each_series_is_a_case_that_names_no_folder(tmp_path: Path) -> None:
    cases = find_cases(cohort(tmp_path / "in"))
    empty = series_id(str(tmp_path / "in" / FOLDER / "empty.dcm"))
    assert {case["case"] for case in cases} == {"scan", empty, *map(series_id, ("1.2.3", "1.2.4", "1.2.5"))}
    by_name = {case["case"]: case["image"] for case in cases}
    assert by_name["scan"] == str(tmp_path / "in" / "scan.nii.gz")
    assert [len(by_name[series_id(uid)]) for uid in ("1.2.3", "1.2.4", "1.2.5")] == [SLICES, SLICES, SLICES - 1]
    assert [case["case"] for case in find_cases(tmp_path / "in", spatial_dims=2)] == ["scan"]


def test_a_series_is_loaded_with_nothing_but_voxels_and_place(tmp_path: Path) -> None:
    root = cohort(tmp_path / "in")
    dataset = CachedDataset(find_cases(root), scan_loader("image", dtype="float32"))
    loaded, problems = {}, {}
    for i, case in enumerate(dataset.data):
        try:
            loaded[case["case"]] = dataset[i]["image"]
        except CaseError as error:
            problems[case["case"]] = str(error)
    assert set(loaded) == {"scan", series_id("1.2.3"), series_id("1.2.4")}
    assert "a gap of 5 mm" in problems[series_id("1.2.5")]
    assert "unreadable" in problems.pop(series_id(str(root / FOLDER / "empty.dcm")))
    assert FOLDER not in str(problems)
    assert PATIENT not in str(problems)
    image: MetaTensor = loaded[series_id("1.2.4")]
    assert np.array_equal(image.numpy(), stored().transpose(2, 1, 0) * 2.0 - 1024)
    assert np.allclose(image.affine, expected_affine(), atol=1e-6)
    assert np.allclose(image.meta["original_affine"], expected_affine(), atol=1e-6)
    assert PATIENT not in str(image.meta)


def test_a_slice_leads_to_its_series(tmp_path: Path) -> None:
    root = cohort(tmp_path / "in")
    (files,) = [each["image"] for each in find_cases(root) if each["case"] == series_id("1.2.3")]
    for file in files:
        assert [*map(str, series_files(file))] == files
    by_one = scan_loader("image")({"image": files[2]})["image"]
    assert np.array_equal(by_one, scan_loader("image")({"image": files})["image"])
    before = scan_mark(files[0])
    with open(files[-1], "ab") as last:
        last.write(b"\0\0")
    assert scan_mark(files[0]) != before


def test_a_list_may_name_a_folder_of_a_series(tmp_path: Path) -> None:
    write(tmp_path / "ct", "1.2.3")
    (tmp_path / "list.csv").write_text("image\nct\n")
    (case,) = find_cases(tmp_path / "list.csv")
    assert (case["case"], len(case["image"])) == (series_id("1.2.3"), SLICES)


def test_a_changed_slice_is_preprocessed_again(tmp_path: Path) -> None:
    """Whichever slice it is."""
    write(tmp_path / FOLDER, "1.2.3")

    def read() -> np.ndarray:
        dataset = CachedDataset(find_cases(tmp_path / FOLDER), [scan_loader("image")], "disk", tmp_path / "cache")
        return np.asarray(dataset[0]["image"])

    first = read()
    assert np.array_equal(read(), first)

    def brighter(number: int, made: pydicom.Dataset) -> pydicom.Dataset:
        made.RescaleIntercept = -1024 + 100 * (number == SLICES - 1)
        return made

    write(tmp_path / FOLDER, "1.2.3", brighter)
    changed = read()
    assert np.array_equal(changed[..., :-1], first[..., :-1])
    assert np.array_equal(changed[..., -1], first[..., -1] + 100)


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cases the folder has. A file that has changed is read again."""
    series = [write(tmp_path, f"1.2.{number}") for number in range(3, 7)]
    read: list[Path] = []
    dcmread = pydicom.dcmread
    monkeypatch.setattr(pydicom, "dcmread", lambda path, **given: read.append(path) or dcmread(path, **given))
    for files in series * 2:
        assert series_files(files[0]) == files
    assert read == []
    other = dcmread(series[0][0])
    other.SeriesInstanceUID = "1.2.4"
    other.save_as(series[0][0])
    assert series_files(series[0][1]) == series[0][1:]
    assert series_files(series[1][0]) == sorted([series[0][0], *series[1]])
    assert read == [series[0][0]]


def test_localizers_are_left_out(tmp_path: Path) -> None:
    """A series of its own, and one among the slices of a volume."""

    def scout(number: int, made: pydicom.Dataset) -> pydicom.Dataset:
        made.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
        return made

    write(tmp_path / "volume", "1.2.3")
    write_only(tmp_path / "scout", scout)
    write(tmp_path / "mixed", "1.2.8", lambda number, made: scout(number, made) if number == 0 else made)
    found = {case["case"]: len(case["image"]) for case in find_cases(tmp_path)}
    assert found == {series_id("1.2.3"): SLICES, series_id("1.2.8"): SLICES - 1}


# Our own bundle on DICOM series: in, and as Parametric Maps and Secondary Captures out.
WHOLE, GAP = series_id("1.2.3"), series_id("1.2.5")
NAMED = "doe_jane"


def voxels() -> np.ndarray:
    """Stored values ``(slices, rows, columns)``."""
    return np.random.default_rng(0).integers(900, 1100, (9, 13, 12)).astype(np.int16)


@pytest.mark.slow
def test_series_go_in_and_maps_come_out(tmp_path: Path) -> None:
    """One whole series of unsorted files, and one with a gap beside it in its folder; and the run once more."""
    write(tmp_path / "cohort" / NAMED, "1.2.3", voxels=voxels())
    write(tmp_path / "cohort" / NAMED, "1.2.5", lambda number, made: None if number == 4 else made, voxels())
    dicom = {"dicom": True, "picture": True, "report": True, "picture_scale": 1e-3}
    first = launch(tmp_path, "out", **dicom)
    text = "".join(filter(None, first.communicate()))
    assert first.returncode == 1, text
    out = tmp_path / "out"
    assert [row["case"] for row in rows_of(out / "summary.csv")] == [WHOLE]
    (failed,) = rows_of(out / "failures.csv")
    assert failed["case"] == GAP
    assert "a gap of 5 mm after slice 4 of 8" in failed["error"]
    assert "a gap of 5 mm" in text
    check_map(out)
    check_pictures(out)
    check_that_nobody_is_named(out, text)
    before = made_dicom(out)
    assert len(before) == 1 + 9  # the map, and a picture of each slice
    count = forwards(tmp_path, "out")
    assert count > 0
    shutil.rmtree(out / "cache")
    with pytest.raises(SystemExit, match="1 case without a map"):
        monai.bundle.run(**settings(tmp_path, "out", **dicom))
    assert forwards(tmp_path, "out") == count + 1  # the batch that holds the unperturbed image
    assert made_dicom(out) == before


def made_dicom(out: Path) -> dict[Path, bytes]:
    paths = [*out.glob("*.dcm"), *out.glob("*_colour/*")]
    return {path: path.read_bytes() for path in paths}


def check_map(out: Path) -> None:
    saved = nib.load(out / f"{WHOLE}_saliency.nii.gz")
    values = np.asarray(saved.dataobj)
    assert values.std() > 0
    np.testing.assert_allclose(saved.affine, expected_affine(), atol=1e-4)
    check_parametric_map(out / f"{WHOLE}_saliency.dcm", values)


def check_pictures(out: Path) -> None:
    pictures = [pydicom.dcmread(path) for path in sorted((out / f"{WHOLE}_saliency_colour").iterdir())]
    assert [picture.InstanceNumber for picture in pictures] == [*range(1, 10)]
    assert {picture.StudyInstanceUID for picture in pictures} == {"1.2.1"}
    assert {picture.SOPClassUID.name for picture in pictures} == {"Secondary Capture Image Storage"}
    pixels = np.stack([picture.pixel_array for picture in pictures])
    has_colours = (pixels.max(axis=-1) != pixels.min(axis=-1)).any()
    assert has_colours


def check_that_nobody_is_named(out: Path, text: str) -> None:
    """In what the command printed, in a file's name, or in a file that is not DICOM."""
    assert PATIENT.lower() not in text.lower()
    assert NAMED not in text
    for path in out.rglob("*"):
        assert "doe" not in path.name.lower()
        if path.is_file() and path.suffix != ".dcm":
            content = path.read_bytes().lower()
            assert PATIENT.encode().lower() not in content, path
            assert NAMED.encode() not in content, path


def test_a_fill_in_hounsfield_units(tmp_path: Path) -> None:
    """Of a series it is what it is of the same scan as NIfTI, and not what it is of another fill."""
    write(tmp_path / "cohort", "1.2.3", voxels=voxels())
    (tmp_path / "nifti").mkdir()
    scan = 2.0 * voxels().transpose(2, 1, 0) - 1024  # the series' slope and intercept
    nib.save(nib.Nifti1Image(scan.astype(np.float32), expected_affine()), tmp_path / "nifti" / "scan.nii.gz")
    maps = {}
    for name, folder, given in (
        ("series", "cohort", {"fill": 900.0}),
        ("scan", "nifti", {"fill": 900.0}),
        ("water", "cohort", {"fill": 0.0}),
    ):
        monai.bundle.run(
            **settings(tmp_path, name, dataset_dir=str(tmp_path / folder), fill_unit="scan", num_masks=60, **given)
        )
        (path,) = (tmp_path / name).glob("*_saliency.nii.gz")
        maps[name] = np.asarray(nib.load(path).dataobj)
    scale = np.abs(maps["scan"]).max()
    assert scale > 0
    np.testing.assert_allclose(maps["series"], maps["scan"], rtol=0, atol=1e-4 * scale)
    assert np.abs(maps["water"] - maps["scan"]).max() > 0.1 * scale
