"""DICOM series: which files belong together, whether they are one whole volume, and how they are read.

MONAI's ``PydicomReader`` sorts slices by ``InstanceNumber``, skips those without one, only warns where slices differ in
spacing or shape, and does not see gaps. So a series is checked and sorted by position here.
Errors name no patient and no file, whose name may be a patient's: they name the series by :func:`series_id`. A series
is the files of one UID in one folder, so that one of its files leads to all of them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.storage.files import files_below, while_unchanged
from monai_saliency.utils.arguments import require

__all__ = [
    "find_series",
    "group_series",
    "holds_series",
    "is_dicom",
    "order_problem",
    "read_series",
    "series_files",
    "series_id",
    "sorted_series",
    "volume_of",
]

_FAR, _ROUNDED = 0.1, 0.05  # a slice may lie off its place by this share of the distance between slices, and these mm
_SAME = 1e-4  # of direction cosines and pixel spacings

_SUFFIXES = (".dcm", ".dicom", ".ima")
_STORAGE = "1.2.840.10008.5.1.4.1.1"
# Secondary captures and their kinds, parametric maps, segmentations.
_NO_SCANS = (f"{_STORAGE}.7.", f"{_STORAGE}.30.", f"{_STORAGE}.66.4.")
# What all slices of a volume have the same: numbers, and texts where they are given.
_SAME_NUMBERS = {
    "orientations": ("ImageOrientationPatient",),
    "pixel spacings": ("PixelSpacing",),
    "shapes": ("Rows", "Columns"),
}
_SAME_TEXTS = {
    "patients": "PatientID",
    "frames of reference": "FrameOfReferenceUID",
    "photometric interpretations": "PhotometricInterpretation",
}
_PLACE = ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing")
_TAGS = ["SOPClassUID", "SeriesInstanceUID", "Rows", "ImageType"]


def series_id(uid: str) -> str:
    """The name of a series: a hash of its UID, which reveals nothing about the patient."""
    return f"series-{sha256(uid.encode()).hexdigest()[:12]}"


def _pydicom() -> Any:
    """pydicom, without its warnings: they quote values of headers, such as a birth date that is written in another way,
    to the log.
    """
    warnings.filterwarnings("ignore", module=r"pydicom\.")
    logging.getLogger("pydicom").setLevel(logging.ERROR)
    return require("pydicom", "dicom")


def find_series(folder: str | Path) -> dict[str, list[Path]]:
    """The sorted DICOM files in a folder or below it, by their series UID. Other files are left out."""
    return group_series(files_below(folder))


def group_series(files: Iterable[str | Path]) -> dict[str, list[Path]]:
    """The DICOM files among some files, by their series UID. Other files are left out, and so are files that hold no
    scan: reports, plans, segmentations, parametric maps, secondary captures and localizers.
    """
    by_uid: dict[str, list[Path]] = {}
    for path in map(Path, files):
        if uid := _series_of(path):
            by_uid.setdefault(uid, []).append(path)
    return {uid: sorted(by_uid[uid]) for uid in sorted(by_uid)}


@while_unchanged
def _series_of(path: Path) -> str:
    """The UID of the series of a file; its path if it is cut, or was never DICOM; "" for no scan."""
    if not is_dicom(path):
        return ""
    pydicom = _pydicom()
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
        uid, kind = str(header.get("SeriesInstanceUID", "")), str(header.get("SOPClassUID", ""))  # a DICOMDIR has none
        is_localizer = "LOCALIZER" in (header.get("ImageType") or ())
    except Exception:  # whatever pydicom raises
        return str(path)
    return uid if "Rows" in header and not is_localizer and not f"{kind}.".startswith(_NO_SCANS) else ""


def is_dicom(path: str | Path) -> bool:
    """Whether a file is DICOM by how it begins, or by its suffix, which an empty file keeps. Needs no extra."""
    if os.path.isdir(path):
        return False
    if Path(path).suffix.lower() in _SUFFIXES:
        return True
    with suppress(OSError), open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM"
    return False


def holds_series(path: str | Path) -> bool:
    """Whether a path is a DICOM file, or a folder with one in it or below it. Needs no extra."""
    return any(map(is_dicom, files_below(path) if os.path.isdir(path) else [path]))


def series_files(path: str | Path) -> list[Path]:
    """The sorted files of the series that a file is of, in its folder; or all series' files in a folder or below it."""
    path = Path(path)
    if path.is_dir():
        return [file for files in find_series(path).values() for file in files]
    for files in group_series(path.parent.iterdir()).values():
        if path in files:
            return files
    return [path]


def read_series(files: Sequence[str | Path]) -> MetaTensor:
    """The files of a series, in any order, as one volume, in the modality's unit (Hounsfield units in CT): the voxels
    ``(columns, rows, slices)`` with their affine to scanner mm (RAS), slices sorted by position.
    """
    return volume_of(sorted_series(files))


def volume_of(slices: Sequence[Any]) -> MetaTensor:
    """The volume, as of :func:`read_series`, of slices that :func:`sorted_series` has read."""
    voxels = np.stack([_in_unit(each) for each in slices], axis=-1)  # (rows, columns, slices)
    return MetaTensor(voxels.swapaxes(0, 1), affine=torch.from_numpy(_affine_of(slices)))


def _in_unit(made: Any) -> np.ndarray:
    """The pixels ``(rows, columns)`` of a slice in the modality's unit, float32."""
    slope = float(made.get("RescaleSlope") or 1)
    intercept = float(made.get("RescaleIntercept") or 0)
    return slope * made.pixel_array.astype(np.float32) + intercept


def _affine_of(slices: Sequence[Any]) -> np.ndarray:
    """The affine ``(4, 4)`` from column, row and slice to scanner mm (RAS) of sorted slices."""
    along_row, down_column = _directions(slices[0])
    between_rows, between_columns = map(float, slices[0].PixelSpacing)
    positions = _positions(slices)
    to_lps = np.eye(4)
    to_lps[:3, 0] = along_row * between_columns
    to_lps[:3, 1] = down_column * between_rows
    to_lps[:3, 2] = (positions[-1] - positions[0]) / (len(slices) - 1)
    to_lps[:3, 3] = positions[0]
    return np.diag([-1.0, -1, 1, 1]) @ to_lps


def _directions(made: Any) -> np.ndarray:
    """The unit vectors along a slice's rows and down its columns, ``(2, 3)``, LPS."""
    return np.array(made.ImageOrientationPatient, float).reshape(2, 3)


def _positions(slices: Sequence[Any]) -> np.ndarray:
    """The places of the slices' first voxels ``(slices, 3)`` in mm, LPS."""
    return np.array([each.ImagePositionPatient for each in slices], float)


def sorted_series(files: Sequence[str | Path]) -> list[Any]:
    """The slices of a series, as pydicom has them, sorted by their position along the normal of their plane.

    An AdviceError refuses files that cannot be read, of several series, or that are not images; slices of several
    frames, in colours or with a table of values; fewer than two slices; slices that differ in orientation, spacing,
    shape, patient or photometric interpretation; that share a position; and gaps.
    """
    slices = _read(files)
    uids = sorted({str(each.get("SeriesInstanceUID", "")) for each in slices})
    if len(uids) > 1:
        raise AdviceError(f"the files are of {len(uids)} series, 1 is expected: {', '.join(map(series_id, uids))}")
    problem = _not_images(slices) or _without_place(slices) or _mixed(slices)
    if not problem:
        normal = np.cross(*_directions(slices[0]))
        order = np.argsort(_positions(slices) @ normal, kind="stable")
        slices = [slices[number] for number in order]
        problem = _misplaced(_positions(slices), normal)
    if problem:
        raise AdviceError(f"DICOM {series_id(uids[0])}: {problem}")
    return slices


def _read(files: Sequence[str | Path]) -> list[Any]:
    """The files as pydicom has them."""
    pydicom = _pydicom()
    if not files:
        raise AdviceError("a DICOM series has no file: pass the files of one series")
    slices = []
    for number, file in enumerate(files, 1):
        try:
            slices.append(pydicom.dcmread(file))
        except (OSError, EOFError, pydicom.errors.InvalidDicomError) as error:
            raise AdviceError(
                f"file {number} of {len(files)} of a DICOM series is unreadable ({type(error).__name__}): copy it again"
            ) from None  # whose words are the file's path, in the log
    return slices


def order_problem(files: Sequence[str | Path]) -> str:
    """Why another reader may not read a series as one whole volume in our order of slices, in words; or nothing."""
    try:
        slices = sorted_series(files)
    except AdviceError as error:
        return str(error)
    steps = np.diff([int(each.get("InstanceNumber") or 0) for each in slices])
    if (steps > 0).all() or (steps < 0).all():
        return ""
    name = f"DICOM {series_id(str(slices[0].SeriesInstanceUID))}"
    return f"{name}: its instance numbers do not follow its positions: renumber them, or convert it to NIfTI"


def _not_images(slices: Sequence[Any]) -> str:
    """Which files are not gray images of one frame, in words; nothing where all are."""
    count = len(slices)
    if objects := sum("PixelData" not in each for each in slices):
        return f"{objects} of its {count} files hold no image: take them out of the folder"
    for each in slices:
        if int(each.get("NumberOfFrames") or 1) > 1 or each.get("SamplesPerPixel", 1) != 1:
            return "a file holds several frames or colours, one gray slice a file is expected: convert it to NIfTI"
        if "ModalityLUTSequence" in each:
            return (
                "its values are numbers of a table (ModalityLUTSequence), which is not read here: convert it to NIfTI"
            )
    return "it has 1 slice, 2 or more are expected" if count < 2 else ""


def _without_place(slices: Sequence[Any]) -> str:
    """Which tag that places slices in the scanner is missing, in words; nothing where all have it."""
    for tag in _PLACE:
        if lacking := sum(not each.get(tag) for each in slices):
            return f"{lacking} of its {len(slices)} slices lack {tag}, so they have no place in the scanner"
    return ""


def _mixed(slices: Sequence[Any]) -> str:
    """What differs between slices, in words; nothing where they are of one volume."""
    mixed = []
    for what, tags in _SAME_NUMBERS.items():
        numbers = np.array([np.hstack([each.get(tag) for tag in tags]) for each in slices], float)
        if np.ptp(numbers, axis=0).max() > _SAME:
            mixed.append(what)
    for what, tag in _SAME_TEXTS.items():
        if len({str(each.get(tag) or "") for each in slices} - {""}) > 1:
            mixed.append(what)
    return f"its slices have mixed {mixed[0]}: split it into one series for each" if mixed else ""


def _misplaced(positions: np.ndarray, normal: np.ndarray) -> str:
    """What is wrong with the sorted positions ``(slices, 3)`` in mm, in words; nothing where they are a volume's."""
    count = len(positions)
    steps = np.diff(positions, axis=0) @ normal
    typical = float(np.sort(steps)[(len(steps) - 1) // 2])
    if same := int((steps <= 0.01 * max(typical, 0.01)).sum()):
        return f"{same} of its slices lie where another lies: split it, or remove the copies"
    wide = np.flatnonzero(steps > 1.5 * typical)
    if not len(wide):
        return _off_the_line(positions)
    first = int(wide[0])
    gap = f"a gap of {steps[first]:.4g} mm after slice {first + 1} of {count}"
    return f"{gap}, where slices lie {typical:.4g} mm apart: copy the missing slices, or resample the scan"


def _off_the_line(positions: np.ndarray) -> str:
    """Which of the sorted positions ``(slices, 3)`` in mm is off the line of all, in words; nothing where none is."""
    count = len(positions)
    numbers = np.arange(count)
    # Where the first slice lies, and the step to the next, (3,) each.
    start, step = np.polynomial.polynomial.polyfit(numbers, positions, 1)
    expected = start + numbers[:, None] * step
    off = np.abs(positions - expected).max(axis=1)
    worst = int(off.argmax())
    distance = float(np.linalg.norm(step))
    if off[worst] <= _FAR * distance + _ROUNDED:
        return ""
    words = f"slice {worst + 1} of {count} lies {off[worst]:.3g} mm off the line"
    return f"{words} on which slices are {distance:.4g} mm apart: resample the scan"
