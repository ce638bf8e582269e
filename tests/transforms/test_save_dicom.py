"""Maps of DICOM series as DICOM: what is written, in which colours, and what is removed."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.dicom_series import COLUMNS, ROWS, SLICES, expected_affine, stored, write
from monai.data import MetaTensor

from monai_saliency.errors import CaseError
from monai_saliency.storage.files import load_image
from monai_saliency.transforms import SaveDicomd, case_writers, save_secondary_capture, save_segmentation
from monai_saliency.visualize.legend import Legend, blended

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")


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
    with pytest.raises(KeyError):
        save({"case": "a"})
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

    def turn(image: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(image.numpy()).flip(1, 3).transpose(1, 2).contiguous()

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
