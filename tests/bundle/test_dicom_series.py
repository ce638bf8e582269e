"""Our own bundle on DICOM series: in, and as Parametric Maps and Secondary Captures out."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
from helpers.dicom_series import PATIENT, expected_affine, write
from helpers.own_bundle import forwards, launch, settings

from monai_saliency.storage.dicom import series_id

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")

WHOLE, GAP = series_id("1.2.3"), series_id("1.2.5")
FOLDER = "doe_jane"
FLIP = np.diag([-1.0, -1, 1, 1])  # between DICOM's LPS and RAS


def voxels() -> np.ndarray:
    """Stored values ``(slices, rows, columns)``."""
    return np.random.default_rng(0).integers(900, 1100, (9, 13, 12)).astype(np.int16)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def same_map(path: Path, nifti: Path) -> None:
    """A Parametric Map has the values and the place of the NIfTI map, as pydicom and as highdicom read it."""
    saved = nib.load(nifti)
    values = np.asarray(saved.dataobj)
    assert values.std() > 0
    np.testing.assert_allclose(saved.affine, expected_affine(), atol=1e-4)

    made = pydicom.dcmread(path)
    frames = np.frombuffer(made.FloatPixelData, "<f4").reshape(len(values.T), made.Rows, made.Columns)
    for frame, group in zip(frames, made.PerFrameFunctionalGroupsSequence, strict=True):
        place = [*map(float, group.PlanePositionSequence[0].ImagePositionPatient), 1]
        column, row, number = np.linalg.solve(expected_affine(), FLIP @ place)[:3]
        assert max(abs(column), abs(row), abs(number - round(number))) < 1e-3
        assert np.array_equal(frame.T, values[:, :, round(number)])
    assert made.FrameOfReferenceUID == "1.2.9"
    assert made.PatientName == PATIENT

    volume = hd.imread(path).get_volume(dtype=np.float64)
    for corner in np.ndindex(2, 2, 2):
        i, j, k = corner * (np.array(values.shape) - 1)
        place = FLIP @ expected_affine() @ [i, j, k, 1]
        at = np.linalg.solve(volume.affine, place)[:3]
        assert np.allclose(volume.affine @ [*np.rint(at), 1], place, rtol=0, atol=1e-3)
        assert volume.array[tuple(np.rint(at).astype(int))] == values[i, j, k]


@pytest.mark.slow
def test_series_go_in_and_maps_come_out(tmp_path: Path) -> None:
    """One whole series of unsorted files, and one with a gap beside it in its folder; and the run once more."""
    write(tmp_path / "cohort" / FOLDER, "1.2.3", voxels=voxels())
    write(tmp_path / "cohort" / FOLDER, "1.2.5", lambda number, made: None if number == 4 else made, voxels())
    dicom = {"dicom": True, "picture": True, "report": True, "picture_scale": 1e-3}
    first = launch(tmp_path, "out", **dicom)
    text = "".join(filter(None, first.communicate()))
    assert first.returncode == 1, text
    out = tmp_path / "out"
    assert [row["case"] for row in rows_of(out / "summary.csv")] == [WHOLE]
    (failed,) = rows_of(out / "failures.csv")
    assert failed["case"] == GAP
    assert "a gap of 5 mm after slice 4 of 8" in failed["error"]

    same_map(out / f"{WHOLE}_saliency.dcm", out / f"{WHOLE}_saliency.nii.gz")
    pictures = [pydicom.dcmread(path) for path in sorted((out / f"{WHOLE}_saliency_colour").iterdir())]
    assert [each.InstanceNumber for each in pictures] == [*range(1, 10)]
    shown = np.stack([each.pixel_array for each in pictures])
    assert (shown.max(axis=-1) != shown.min(axis=-1)).any()  # colours
    assert {(each.StudyInstanceUID, each.SOPClassUID.name) for each in pictures} == {
        ("1.2.1", "Secondary Capture Image Storage")
    }

    for path in out.rglob("*"):
        assert "doe" not in path.name.lower()
        if path.is_file() and path.suffix != ".dcm":
            content = path.read_bytes().lower()
            assert PATIENT.encode().lower() not in content, path
            assert FOLDER.encode() not in content, path
    assert "a gap of 5 mm" in text
    assert PATIENT.lower() not in text.lower()
    assert FOLDER not in text

    before = {path: path.read_bytes() for path in [*out.glob("*.dcm"), *out.glob("*_colour/*")]}
    assert len(before) == 10
    count = forwards(tmp_path, "out")
    shutil.rmtree(out / "cache")
    with pytest.raises(SystemExit, match="1 case without a map"):
        monai.bundle.run(**settings(tmp_path, "out", **dicom))
    assert count > 0
    assert forwards(tmp_path, "out") == count + 1  # the batch that holds the unperturbed image
    assert {path: path.read_bytes() for path in [*out.glob("*.dcm"), *out.glob("*_colour/*")]} == before


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
