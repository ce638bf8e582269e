"""A made oblique CT series, whose files lie in no order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.scans import rotation
from monai_saliency.storage.dicom import find_series

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")

ROWS, COLUMNS, SLICES = 5, 6, 4
STEP = 2.5  # mm
SPACING = (0.7, 0.9)  # between rows, between columns, mm
CORNER = np.array([-31.0, 12.5, 40.25])
PATIENT = "Doe^Jane"


def turned() -> np.ndarray:
    """Three unit vectors at right angles: along a row, down a column, from slice to slice."""
    return rotation(0.4, 0.3).T


def stored() -> np.ndarray:
    return np.arange(SLICES * ROWS * COLUMNS, dtype=np.int16).reshape(SLICES, ROWS, COLUMNS)


def made_slice(number: int, series: str, voxels: np.ndarray | None = None) -> Any:
    """One slice of a series of these stored values ``(slices, rows, columns)``, :func:`stored` by default."""
    voxels = stored() if voxels is None else voxels
    along, down, normal = turned()
    made = pydicom.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID = f"{series}.{number + 1}"
    made.PatientName, made.PatientID, made.PatientBirthDate, made.PatientSex = PATIENT, "42", "", ""
    made.StudyInstanceUID, made.SeriesInstanceUID, made.FrameOfReferenceUID = "1.2.1", series, "1.2.9"
    made.StudyDate, made.StudyTime, made.AccessionNumber, made.StudyID = "20200102", "030405", "", ""
    made.ReferringPhysicianName, made.PositionReferenceIndicator, made.SeriesNumber = "", "", 1
    made.Modality, made.ImageType, made.Manufacturer = "CT", ["ORIGINAL", "PRIMARY", "AXIAL"], "made"
    made.InstanceNumber = 1 + (number * 3) % 17  # not in the order of the positions
    made.ImageOrientationPatient = [f"{each:.10f}" for each in (*along, *down)]
    made.ImagePositionPatient = [f"{each:.8f}" for each in CORNER + STEP * number * normal]
    made.PixelSpacing, made.SliceThickness = list(SPACING), STEP
    made.RescaleSlope, made.RescaleIntercept = 2, -1024
    (made.Rows, made.Columns), made.SamplesPerPixel = voxels.shape[1:], 1
    made.PhotometricInterpretation = "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 16
    made.HighBit, made.PixelRepresentation = 15, 1
    made.PixelData = voxels[number].astype(np.int16).tobytes()
    return made


def write(
    folder: Path,
    series: str = "1.2.3",
    change: Callable[[int, Any], Any] | None = None,
    voxels: np.ndarray | None = None,
) -> list[Path]:
    """Write a series; ``change`` gets the number and the slice, and gives what is written, or None for nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(SLICES if voxels is None else len(voxels)):
        made = made_slice(number, series, voxels)
        made = change(number, made) if change else made
        if made is not None:
            made.save_as(folder / f"{series}-{(number * 5) % 17}.dcm", enforce_file_format=True)
    return find_series(folder)[series]


def expected_affine() -> np.ndarray:
    """From (column, row, slice) to scanner mm, RAS."""
    along, down, normal = turned()
    affine = np.eye(4)
    affine[:3] = np.column_stack([along * SPACING[1], down * SPACING[0], normal * STEP, CORNER])
    return np.diag([-1.0, -1, 1, 1]) @ affine


def check_parametric_map(path: Path, values: np.ndarray) -> Any:
    """A Parametric Map of the series has these values ``(column, row, slice)`` at their places, for two readers."""
    flip = np.diag([-1.0, -1, 1, 1])  # between DICOM's LPS and RAS
    made = pydicom.dcmread(path)
    frames = np.frombuffer(made.FloatPixelData, "<f4").reshape(values.T.shape)
    for frame, group in zip(frames, made.PerFrameFunctionalGroupsSequence, strict=True):
        place = [*map(float, group.PlanePositionSequence[0].ImagePositionPatient), 1]
        column, row, number = np.linalg.solve(expected_affine(), flip @ place)[:3]
        assert max(abs(column), abs(row), abs(number - round(number))) < 1e-3
        assert np.array_equal(frame.T, values[:, :, round(number)])
    assert (made.FrameOfReferenceUID, made.StudyInstanceUID, made.PatientName) == ("1.2.9", "1.2.1", PATIENT)
    volume = hd.imread(path).get_volume(dtype=np.float64)
    for corner in np.ndindex(2, 2, 2):
        i, j, k = corner * (np.array(values.shape) - 1)
        place = flip @ expected_affine() @ [i, j, k, 1]
        at = np.rint(np.linalg.solve(volume.affine, place)[:3]).astype(int)
        assert np.allclose(volume.affine @ [*at, 1], place, rtol=0, atol=1e-3)
        assert volume.array[tuple(at)] == values[i, j, k]
    return made
