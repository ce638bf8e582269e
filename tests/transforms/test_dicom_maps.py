"""A made oblique CT series, its Parametric Map, and series that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.dicom_series import (
    COLUMNS,
    CORNER,
    PATIENT,
    ROWS,
    SLICES,
    check_parametric_map,
    expected_affine,
    made_slice,
    stored,
    turned,
    write,
)
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError, CaseError
from monai_saliency.storage.dicom import find_series, read_series, series_id
from monai_saliency.storage.scans import load_image
from monai_saliency.transforms import (
    SaveDicomd,
    case_writers,
    save_parametric_map,
    save_secondary_capture,
    save_segmentation,
)
from monai_saliency.visualize.legend import Legend, blended

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")
nicom = pytest.importorskip("nibabel.nicom.dicomwrappers")


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
    made = check_parametric_map(paths[0], saliency[0].numpy())
    references = made.ReferencedSeriesSequence[0]
    assert (references.SeriesInstanceUID, len(references.ReferencedInstanceSequence)) == ("1.2.3", SLICES)
    mapping = made.SharedFunctionalGroupsSequence[0].RealWorldValueMappingSequence[0]
    unit = mapping.MeasurementUnitsCodeSequence[0]
    assert (mapping.RealWorldValueSlope, unit.CodeValue, unit.CodingSchemeDesignator) == (1, "1", "UCUM")


def test_a_map_off_the_grid_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path)
    image = read_series(files)
    moved = np.asarray(image.affine).copy()
    moved[0, 3] += 0.01
    with pytest.raises(AdviceError, match="does not lie on the series' grid"):
        save_parametric_map(tmp_path / "map.dcm", MetaTensor(image[None].as_tensor(), affine=moved), files)
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
        (on_second(PhotometricInterpretation="MONOCHROME1"), "mixed photometric interpretations"),
        (on_second(ModalityLUTSequence=[pydicom.Dataset()]), "a table .ModalityLUTSequence., .* convert it to NIfTI"),
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
    affine = np.array(read_series(write(tmp_path / "whole", "1.2.3", at_rounded(step, along, decimals), voxels)).affine)
    for number in range(17):
        place = np.diag([-1, -1, 1]) @ (CORNER + step * number * along)
        assert np.abs(affine[:3] @ [0, 0, number, 1] - place).max() <= 0.5 * 10.0**-decimals + 1e-9
    for number in (1, 8, 15):
        files = write(tmp_path / str(number), "1.2.3", at_rounded(step, along, decimals, number), voxels)
        with pytest.raises(AdviceError, match=f"a gap of .* mm after slice {number} of 16, .* copy the missing"):
            read_series(files)
    if decimals > 1:  # else it may have been rounded by as much
        moved = at_rounded(step, along, decimals, moved=0.2 * step + 0.07)
        files = write(tmp_path / "moved", "1.2.3", moved, voxels)
        with pytest.raises(AdviceError, match=r"slice 4 of 17 lies 0\.\d* mm off the line .*: resample the scan"):
            read_series(files)


# Maps of DICOM series as DICOM: what is written, in which colours, and what is removed.
def on_series(folder: Path, maps: int = 1) -> tuple[list[Path], MetaTensor]:
    files = write(folder, "1.2.3")
    image = load_image(image_only=True, ensure_channel_first=True)(str(files[0]))
    generator = torch.Generator().manual_seed(0)
    return files, MetaTensor(torch.randn(maps, *image.shape[1:], generator=generator), meta=image.meta)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def dicom_writers(folder: Path) -> list[SaveDicomd]:
    return [each for each in case_writers(folder).transforms if isinstance(each, SaveDicomd)]


def test_each_map_has_its_files_and_others_are_removed(tmp_path: Path) -> None:
    _, saliency = on_series(tmp_path / "in", 2)
    out = tmp_path / "out"
    save = SaveDicomd("saliency", out)
    save({"saliency": saliency, "case": "a"})
    assert names(out) == ["a_saliency_1.dcm", "a_saliency_1_colour", "a_saliency_2.dcm", "a_saliency_2_colour"]
    for number in (1, 2):
        frames = np.frombuffer(pydicom.dcmread(out / f"a_saliency_{number}.dcm").FloatPixelData, "<f4")
        assert sorted(frames) == sorted(saliency[number - 1].flatten().tolist())
    save({"saliency": saliency[:1], "case": "a"})
    save({"saliency": saliency[:1], "case": "b"})
    assert names(out) == ["a_saliency.dcm", "a_saliency_colour", "b_saliency.dcm", "b_saliency_colour"]
    save.withdraw("a")
    assert names(out) == ["b_saliency.dcm", "b_saliency_colour"]
    (off,) = dicom_writers(out)  # which removes files of an earlier run
    off({"saliency": saliency[:1], "case": "b"})
    assert names(out) == dicom_writers(out) == []


def test_other_scans_and_maps_off_the_grid(tmp_path: Path) -> None:
    nib.save(nib.Nifti1Image(np.zeros((4, 5, 6)), np.eye(4)), tmp_path / "scan.nii.gz")
    image = load_image(image_only=True, ensure_channel_first=True)(tmp_path / "scan.nii.gz")
    save = SaveDicomd("saliency", tmp_path / "out")
    save({"saliency": image, "case": "scan"})
    assert not (tmp_path / "out").exists()
    _, saliency = on_series(tmp_path / "in")
    with pytest.raises(CaseError, match="case a: the map must have the series' shape"):
        save({"saliency": saliency[..., 1:], "case": "a"})
    assert names(tmp_path / "out") == []


def test_captures_are_the_scan_with_the_map_over_it(tmp_path: Path) -> None:
    """By the formula of the pictures, slice by slice; what is below a hundredth of the scale or 2 errors is gray."""
    files, saliency = on_series(tmp_path / "in")
    error = np.full(saliency.shape, 0.3, np.float32)
    legend = Legend(scale=2.0)
    paths = save_secondary_capture(tmp_path / "out", saliency, files, "tumour", legend, error)
    assert [path.name for path in paths] == [f"{number:04d}.dcm" for number in range(1, SLICES + 1)]
    scan = stored() * 2.0 - 1024
    low, high = np.percentile(scan, [0.5, 99.99])
    for number, path in enumerate(paths):
        made = pydicom.dcmread(path)
        values = saliency[0, :, :, number].numpy().T
        assert values.shape == (ROWS, COLUMNS)
        coloured = np.abs(values) >= 0.6
        gray = np.clip((scan[number] - low) / (high - low), 0, 1)
        assert np.array_equal(made.pixel_array, blended(gray, values, coloured, 2.0))
        channels = np.sort(made.pixel_array, axis=-1)
        assert np.array_equal(channels[..., 0] != channels[..., 2], coloured)
        assert np.array_equal(hd.imread(path).get_raw_frame(1), made.PixelData)
        assert (made.SeriesDescription, made.InstanceNumber, made.StudyInstanceUID) == ("tumour", number + 1, "1.2.1")
        assert list(made.PatientOrientation) == ["L", "P"]
    assert len({pydicom.dcmread(path).SeriesInstanceUID for path in paths}) == 1
    assert len({pydicom.dcmread(path).SOPInstanceUID for path in paths}) == SLICES


def test_a_map_that_another_reader_has_turned_is_turned_back(tmp_path: Path) -> None:
    """With its standard error, which decides what is coloured."""
    files, saliency = on_series(tmp_path / "in")
    error = torch.rand(saliency.shape, generator=torch.Generator().manual_seed(1))
    turned_affine = np.asarray(saliency.affine) @ np.array(
        [[0, -1, 0, COLUMNS - 1], [1, 0, 0, 0], [0, 0, -1, SLICES - 1], [0, 0, 0, 1]]
    )  # rows first, columns from the end, slices from the end
    turn = lambda image: torch.as_tensor(image.numpy()).flip(1, 3).transpose(1, 2).contiguous()  # noqa: E731
    turned = MetaTensor(turn(saliency), affine=turned_affine, meta={"filename_or_obj": str(files[0])})
    found = []
    for name, image, its_error in (("own", saliency, error), ("turned", turned, turn(error))):
        SaveDicomd("saliency", tmp_path / name)({"saliency": image, "standard_error": its_error, "case": "a"})
        made = [pydicom.dcmread(path) for path in sorted((tmp_path / name).rglob("*.dcm"))]
        found.append([(each.SOPInstanceUID, each.get("PixelData", each.get("FloatPixelData"))) for each in made])
    assert len(found[0]) == SLICES + 1
    assert found[0] == found[1]


def test_a_segmentation_is_the_region_of_the_largest_values(tmp_path: Path) -> None:
    """Voxel by voxel, at their places: half of the largest value or more, above twice the standard error."""
    files, saliency = on_series(tmp_path / "in")
    error = torch.full(saliency.shape, 0.1)
    error[saliency == saliency.max()] = 9.0
    item = {"saliency": saliency, "standard_error": error, "case": "a"}
    save = SaveDicomd("saliency", tmp_path / "out", dicom=False, dicom_seg=0.5)
    save(item)
    assert names(tmp_path / "out") == ["a_saliency_seg.dcm"]
    path = tmp_path / "out" / "a_saliency_seg.dcm"
    made = hd.seg.segread(path)
    before = path.read_bytes()
    save(item)
    assert path.read_bytes() == before
    threshold, found, lps = saliency.max() / 2, 0, np.diag([-1.0, -1, 1, 1])
    volume = made.get_volume(segment_numbers=[1], combine_segments=False)
    voxels = volume.array[..., 0]
    for i, j, k in np.ndindex(COLUMNS, ROWS, SLICES):
        at = np.linalg.solve(volume.affine, lps @ expected_affine() @ [i, j, k, 1])[:3]
        is_inside = all(0 <= round(each) < size for each, size in zip(at, voxels.shape, strict=True))
        value = bool(is_inside and voxels[tuple(np.rint(at).astype(int))])
        assert value == bool(saliency[0, i, j, k] >= max(threshold, 2 * error[0, i, j, k]))
        found += value
    assert 3 < found == voxels.sum()
    assert (made.FrameOfReferenceUID, made.StudyInstanceUID, made.PatientID) == ("1.2.9", "1.2.1", "42")
    references = made.ReferencedSeriesSequence[0]
    assert references.SeriesInstanceUID == "1.2.3"
    sources = {str(pydicom.dcmread(file).SOPInstanceUID) for file in files}
    assert {each.ReferencedSOPInstanceUID for each in references.ReferencedInstanceSequence} <= sources
    (segment,) = made.SegmentSequence
    assert (segment.SegmentLabel, segment.SegmentAlgorithmType) == ("saliency", "AUTOMATIC")
    assert (segment.SegmentAlgorithmName, segment.TrackingID) == ("monai-saliency", "saliency")
    (algorithm,) = segment.SegmentationAlgorithmIdentificationSequence
    assert algorithm.AlgorithmParameters == f"share of the largest value=0.5,threshold={float(threshold):.7g}"


def test_a_map_without_a_region_has_no_segmentation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor one of an earlier run."""
    files, saliency = on_series(tmp_path / "in")
    save = SaveDicomd("saliency", tmp_path / "out", dicom=False, dicom_seg=1)
    for wrong, why in ((-saliency.abs(), "nothing supports the score"), (saliency * 0, "no part of this scan")):
        save({"saliency": saliency, "case": "a"})
        assert names(tmp_path / "out") == ["a_saliency_seg.dcm"]
        save({"saliency": wrong, "case": "a"})
        assert names(tmp_path / "out") == []
        assert f"case a: a_saliency_seg.dcm is not written: {why}" in caplog.text
    error = 2 * saliency.abs().numpy()
    assert not save_segmentation(tmp_path / "a.dcm", saliency, files, standard_error=error)
    for share in (0, 1.5, True):
        with pytest.raises(ValueError, match="`dicom_seg` must be"):
            SaveDicomd("saliency", tmp_path, dicom_seg=share)
