"""A made oblique CT series, its Parametric Map, and series that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.dicom_series import (
    COLUMNS,
    CORNER,
    PATIENT,
    ROWS,
    SLICES,
    expected_affine,
    made_slice,
    stored,
    turned,
    write,
)
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.storage.dicom import find_series, read_series, series_id
from monai_saliency.transforms import save_parametric_map

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")
nicom = pytest.importorskip("nibabel.nicom.dicomwrappers")


def test_an_oblique_series_in_any_order_lies_where_its_headers_say(tmp_path: Path) -> None:
    image = read_series(write(tmp_path)[::-1])
    assert np.allclose(image.affine, expected_affine(), atol=1e-6)
    assert np.array_equal(image.numpy(), stored().transpose(2, 1, 0) * 2.0 - 1024)


def test_left_and_right_are_as_nibabel_has_them(tmp_path: Path) -> None:
    image = read_series(write(tmp_path))
    for number in range(SLICES):
        theirs = nicom.wrapper_from_data(made_slice(number, "1.2.3"))
        point = theirs.affine @ [2, 3, 0, 1]  # row 2, column 3, LPS
        ours = np.asarray(image.affine) @ [3, 2, number, 1]
        assert np.allclose(np.diag([-1, -1, 1, 1]) @ point, ours, atol=1e-6)


def test_a_map_comes_out_with_the_same_geometry_and_values(tmp_path: Path) -> None:
    files = write(tmp_path)
    image = read_series(files)
    saliency = MetaTensor(torch.randn(1, *image.shape, generator=torch.Generator().manual_seed(0)), affine=image.affine)
    paths = [tmp_path / "maps" / name for name in ("a.dcm", "b.dcm")]
    for path in paths:
        save_parametric_map(path, saliency, files, label="tumour")
    assert pydicom.dcmread(paths[0]).SOPInstanceUID == pydicom.dcmread(paths[1]).SOPInstanceUID
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["a.dcm", "b.dcm"]

    made = pydicom.dcmread(paths[0])
    frames = np.frombuffer(made.FloatPixelData, "<f4").reshape(SLICES, ROWS, COLUMNS)
    for frame, group in zip(frames, made.PerFrameFunctionalGroupsSequence, strict=True):
        point = np.diag([-1.0, -1, 1]) @ np.array(group.PlanePositionSequence[0].ImagePositionPatient, float)
        number = round(np.linalg.solve(expected_affine(), [*point, 1])[2])
        assert np.array_equal(frame, saliency[0, :, :, number].numpy().T)
    assert (made.FrameOfReferenceUID, made.StudyInstanceUID, made.PatientName) == ("1.2.9", "1.2.1", PATIENT)
    references = made.ReferencedSeriesSequence[0]
    assert (references.SeriesInstanceUID, len(references.ReferencedInstanceSequence)) == ("1.2.3", SLICES)
    mapping = made.SharedFunctionalGroupsSequence[0].RealWorldValueMappingSequence[0]
    unit = mapping.MeasurementUnitsCodeSequence[0]
    assert (mapping.RealWorldValueSlope, unit.CodeValue, unit.CodingSchemeDesignator) == (1, "1", "UCUM")

    volume = hd.imread(paths[0]).get_volume(dtype=np.float64)
    down_first = volume.affine @ np.eye(4)  # (slice, row, column), LPS
    for i, j, k in ((0, 0, 0), (COLUMNS - 1, 1, 2), (3, ROWS - 1, SLICES - 1)):
        place = np.diag([-1.0, -1, 1, 1]) @ expected_affine() @ [i, j, k, 1]
        at = np.rint(np.linalg.solve(down_first, place)[:3]).astype(int)
        assert np.allclose(down_first @ [*at, 1], place, atol=1e-3)
        assert volume.array[tuple(at)] == saliency[0, i, j, k]


def test_a_map_off_the_grid_or_not_finite_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path)
    image = read_series(files)
    moved = np.asarray(image.affine).copy()
    moved[0, 3] += 0.01
    with pytest.raises(AdviceError, match="does not lie on the series' grid"):
        save_parametric_map(tmp_path / "map.dcm", MetaTensor(image[None].as_tensor(), affine=moved), files)
    with pytest.raises(AdviceError, match="NaN"):
        save_parametric_map(tmp_path / "map.dcm", image[None] * float("nan"), files)
    assert not (tmp_path / "map.dcm").exists()


def test_series_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, "1.2.4")
    write(tmp_path)
    found = find_series(tmp_path)
    assert {uid: len(files) for uid, files in found.items()} == {"1.2.3": SLICES, "1.2.4": SLICES}
    with pytest.raises(AdviceError, match="2 series"):
        read_series([file for files in found.values() for file in files])


def on_second(**values: Any) -> Callable[[int, Any], Any]:
    def change(number: int, made: Any) -> Any:
        for name, value in values.items() if number == 1 else ():
            setattr(made, name, value)
        return made

    return change


def without(word: str) -> Callable[[int, Any], Any]:
    def change(number: int, made: Any) -> Any:
        if number == 1:
            delattr(made, word)
        return made

    return change


@pytest.mark.parametrize(
    "change",
    [without("PatientName"), without("PatientID"), on_second(PatientName=""), on_second(PatientName="DOE^JANE^ ^")],
)
def test_one_patient_whose_headers_are_not_alike(tmp_path: Path, change: Any) -> None:
    assert np.array_equal(read_series(write(tmp_path, change=change)), 2.0 * stored().transpose(2, 1, 0) - 1024)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda number, made: made if number != 2 else None, "a gap of 5 mm after slice 2 of 3"),
        (on_second(ImagePositionPatient=[*CORNER]), "where another lies"),
        (on_second(ImageOrientationPatient=[1, 0, 0, 0, 1, 0]), "mixed orientations"),
        (on_second(PixelSpacing=[1, 1]), "mixed pixel spacings"),
        (on_second(FrameOfReferenceUID="1.2.8"), "mixed frames of reference"),
        (on_second(NumberOfFrames=2), "several frames"),
        (on_second(PatientID="43"), "mixed patients"),
        (on_second(PatientName="Roe^Richard"), "mixed patients"),
        (on_second(PhotometricInterpretation="MONOCHROME1"), "mixed photometric interpretations"),
        (on_second(ModalityLUTSequence=[pydicom.Dataset()]), "a table .ModalityLUTSequence., .* convert it to NIfTI"),
        (without("RescaleIntercept"), "1 of its 4 slices lack RescaleIntercept, so their values are of another unit"),
        (on_second(RescaleSlope=None), "1 of its 4 slices lack RescaleSlope"),
        (without("PixelData"), "hold no image"),
        (lambda number, made: made if number == 0 else None, "it has 1 slice"),
    ],
)
def test_wrong_series_are_refused_by_name(tmp_path: Path, change: Any, words: str) -> None:
    files = write(tmp_path, change=change)
    with pytest.raises(AdviceError, match=words) as raised:
        read_series(files)
    assert series_id("1.2.3") in str(raised.value)
    assert not any(name in str(raised.value) for name in (PATIENT, "Roe", "43"))
    assert str(tmp_path) not in str(raised.value)


def at_rounded(step: float, along: np.ndarray, decimals: int, without: int = -1, moved: float = 0) -> Any:
    """Slices at these places of a line, rounded; one of them may be left out, and the fourth moved by mm."""

    def change(number: int, made: Any) -> Any:
        place = CORNER + (step * number + moved * (number == 3)) * along
        made.ImagePositionPatient = [f"{each:.{decimals}f}" for each in place]
        return None if number == without else made

    return change


@pytest.mark.parametrize("along", [turned()[2], np.array([0.0, 0, 1])], ids=["oblique", "tilted"])
@pytest.mark.parametrize(("step", "decimals"), [(0.625, 2), (0.4, 2), (0.4, 1), (2.5, 4)])
def test_slices_at_rounded_places(step: float, decimals: int, along: np.ndarray, tmp_path: Path) -> None:
    """They lie where they were before their places were rounded. A missing slice is a gap, whichever it is."""
    voxels = np.zeros((17, ROWS, COLUMNS))
    affine = np.asarray(
        read_series(write(tmp_path / "whole", "1.2.3", at_rounded(step, along, decimals), voxels)).affine
    )
    for number in range(17):
        place = np.diag([-1, -1, 1]) @ (CORNER + step * number * along)
        assert np.abs(affine[:3] @ [0, 0, number, 1] - place).max() <= 0.5 * 10.0**-decimals + 1e-9
    for number in (1, 8, 15):
        files = write(tmp_path / str(number), "1.2.3", at_rounded(step, along, decimals, number), voxels)
        with pytest.raises(AdviceError, match=f"a gap of .* mm after slice {number} of 16, .* copy the missing"):
            read_series(files)
    if decimals > 1:  # else it may have been rounded by as much
        far, near = max(0.08, 0.2 * step), max(0.03, 0.05 * step)
        files = write(tmp_path / "moved", "1.2.3", at_rounded(step, along, decimals, moved=far), voxels)
        with pytest.raises(AdviceError, match=r"slice 4 of 17 lies 0\.\d* mm off the line .*: resample the scan"):
            read_series(files)
        files = write(tmp_path / "near", "1.2.3", at_rounded(step, along, decimals, moved=near), voxels)
        with pytest.warns(UserWarning, match=r"slice 4 of 17 lies 0\.\d* mm off the line .*, and its maps as well"):
            close = np.asarray(read_series(files).affine)
        assert np.abs((close - affine) @ [0, 0, 8, 1]).max() < near
