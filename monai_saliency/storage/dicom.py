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
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.utils.arguments import require

__all__ = ["find_series", "group_series", "holds_series", "is_dicom", "order_problem", "read_series", "series_files"]
__all__ += ["series_id", "sorted_series", "volume_of"]

# What pydicom warns of quotes values of headers, such as a birth date that is written in another way, to the log.
warnings.filterwarnings("ignore", module=r"pydicom\.")
logging.getLogger("pydicom").setLevel(logging.ERROR)

_CLOSE = 1e-2  # of the distance between slices, and mm within a slice
_SAME = 1e-4  # of direction cosines and pixel spacings

_SUFFIXES = (".dcm", ".dicom", ".ima")
_STORAGE = "1.2.840.10008.5.1.4.1.1"
# Secondary captures and their kinds, parametric maps, segmentations.
_NO_SCANS = (f"{_STORAGE}.7", f"{_STORAGE}.7.", f"{_STORAGE}.30", f"{_STORAGE}.66.4")
_TAGS = ["SOPClassUID", "SeriesInstanceUID", "Rows", "ImageType"]


def series_id(uid: str) -> str:
    """What a series is called: a hash of its UID, which tells nothing about the patient."""
    return f"series-{sha256(uid.encode()).hexdigest()[:12]}"


def find_series(folder: str | Path) -> dict[str, list[Path]]:
    """The sorted DICOM files in a folder or below it, by their series UID. Other files are left out."""
    return group_series(Path(below, name) for below, _, names in os.walk(folder) for name in names)


def group_series(files: Iterable[str | Path]) -> dict[str, list[Path]]:
    """The DICOM files among some files, by their series UID. Other files are left out, and so are files that hold no
    scan: reports, plans, segmentations, parametric maps, secondary captures and localizers.
    """
    found: dict[str, list[Path]] = {}
    for path in filter(is_dicom, map(Path, files)):
        pydicom = require("pydicom", "dicom")
        try:
            header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
            uid, kind = str(header.get("SeriesInstanceUID", "")), str(header.get("SOPClassUID", ""))
            is_derived = kind in _NO_SCANS or kind.startswith(_NO_SCANS[1])
            holds_scan = "Rows" in header and not is_derived and "LOCALIZER" not in (header.get("ImageType") or ())
        except Exception:  # whatever pydicom raises on a file that is cut, or was never DICOM
            uid, holds_scan = str(path), True
        if uid and holds_scan:  # a DICOMDIR has none
            found.setdefault(uid, []).append(path)
    return {uid: sorted(found[uid]) for uid in sorted(found)}


def is_dicom(path: str | Path) -> bool:
    """Whether a file is DICOM by how it begins, or by its suffix, which an empty file keeps. Needs no extra."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            begins = file.read(132)[128:] == b"DICM"
    except OSError:
        begins = False
    return begins or (path.suffix.lower() in _SUFFIXES and not path.is_dir())


def holds_series(path: str | Path) -> bool:
    """Whether a path is a DICOM file, or a folder with one in it or below it. Needs no extra."""
    if os.path.isdir(path):
        return any(is_dicom(Path(below, name)) for below, _, names in os.walk(path) for name in names)
    return is_dicom(path)


def series_files(path: str | Path) -> list[Path]:
    """The sorted files of the series that a file is of, in its folder; or all series' files in a folder or below it."""
    path = Path(path)
    if path.is_dir():
        return [file for files in find_series(path).values() for file in files]
    return next((files for files in group_series(path.parent.iterdir()).values() if path in files), [path])


def read_series(files: Sequence[str | Path]) -> MetaTensor:
    """The files of a series, in any order, as one volume, in the modality's unit (Hounsfield units in CT): the voxels
    ``(columns, rows, slices)`` with their affine to scanner mm (RAS), slices sorted by position.
    """
    return volume_of(sorted_series(files))


def volume_of(slices: Sequence[Any]) -> MetaTensor:
    """The volume, as of :func:`read_series`, of slices that :func:`sorted_series` has read."""
    scales = [(float(each.get("RescaleSlope") or 1), float(each.get("RescaleIntercept") or 0)) for each in slices]
    arrays = [each.pixel_array.astype(np.float32) for each in slices]
    voxels = [slope * array + offset for array, (slope, offset) in zip(arrays, scales, strict=True)]
    rows, columns = _directions(slices[0])
    between_rows, between_columns = map(float, slices[0].PixelSpacing)
    first, last = (np.array(slices[i].ImagePositionPatient, float) for i in (0, -1))
    step = (last - first) / (len(slices) - 1)
    to_lps = np.vstack([np.column_stack([rows * between_columns, columns * between_rows, step, first]), [0, 0, 0, 1]])
    to_ras = torch.from_numpy(np.diag([-1.0, -1, 1, 1]) @ to_lps)
    return MetaTensor(np.stack(voxels, axis=-1).swapaxes(0, 1), affine=to_ras)


def _directions(made: Any) -> np.ndarray:
    """The unit vectors along a slice's rows and down its columns, ``(2, 3)``, LPS."""
    return np.array(made.ImageOrientationPatient, float).reshape(2, 3)


def sorted_series(files: Sequence[str | Path]) -> list[Any]:
    """The slices of a series, as pydicom has them, sorted by their position along the normal of their plane.

    An AdviceError refuses files that cannot be read, of several series, or that are not images; slices of several
    frames or in colours; fewer than two slices; slices that differ in orientation, spacing or shape; that share a
    position; and gaps.
    """
    pydicom = require("pydicom", "dicom")
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
    uids = sorted({str(each.get("SeriesInstanceUID", "")) for each in slices})
    if len(uids) > 1:
        raise AdviceError(f"the files are of {len(uids)} series, 1 is expected: {', '.join(map(series_id, uids))}")
    name = f"DICOM {series_id(uids[0])}"
    if problem := _not_slices(slices):
        raise AdviceError(f"{name}: {problem}")
    normal = np.cross(*_directions(slices[0]))
    slices.sort(key=lambda each: float(normal @ np.array(each.ImagePositionPatient, float)))
    if problem := _misplaced(np.array([each.ImagePositionPatient for each in slices], float), normal):
        raise AdviceError(f"{name}: {problem}")
    return slices


def order_problem(files: Sequence[str | Path]) -> str:
    """Why another reader may not read a series as one whole volume in our order of slices, in words; or nothing."""
    try:
        slices = sorted_series(files)
    except AdviceError as error:
        return str(error)
    numbers = [int(each.get("InstanceNumber") or 0) for each in slices]
    if numbers in (sorted(set(numbers)), sorted(set(numbers), reverse=True)):
        return ""
    name = f"DICOM {series_id(str(slices[0].SeriesInstanceUID))}"
    return f"{name}: its instance numbers do not follow its positions: renumber them, or convert it to NIfTI"


def _not_slices(slices: Sequence[Any]) -> str:
    """Why files are not the slices of one volume, in words; nothing where they are."""
    objects = sum("PixelData" not in each for each in slices)
    if objects:
        return f"{objects} of its {len(slices)} files hold no image: take them out of the folder"
    if any(int(each.get("NumberOfFrames", 1) or 1) > 1 or each.get("SamplesPerPixel", 1) != 1 for each in slices):
        return "a file holds several frames or colours, one gray slice a file is expected: convert it to NIfTI"
    for word in ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"):
        lacking = sum(not each.get(word) for each in slices)
        if lacking:
            return f"{lacking} of its {len(slices)} slices lack {word}, so they have no place in the scanner"
    alike: Iterable[tuple[str, list[Any]]] = (
        ("orientations", [each.ImageOrientationPatient for each in slices]),
        ("pixel spacings", [each.PixelSpacing for each in slices]),
        ("shapes", [(each.Rows, each.Columns) for each in slices]),
    )
    for what, values in alike:
        if not np.ptp(np.array(values, float), axis=0).max() <= _SAME:
            return f"its slices have mixed {what}: split it into one series for each"
    if len({str(each.get("FrameOfReferenceUID", "")) for each in slices}) > 1:
        return "its slices have mixed frames of reference: split it into one series for each"
    return "it has 1 slice, 2 or more are expected" if len(slices) < 2 else ""


def _misplaced(positions: np.ndarray, normal: np.ndarray) -> str:
    """What is wrong with the sorted positions ``(slices, 3)`` in mm, in words."""
    steps = np.diff(positions, axis=0)
    along = steps @ normal
    typical = float(np.sort(along)[(len(along) - 1) // 2])
    same = int((along <= _CLOSE * max(typical, _CLOSE)).sum())
    if same:
        return f"{same} of its slices lie where another lies: split it, or remove the copies"
    wide = np.flatnonzero(np.abs(along - typical) > _CLOSE * typical)
    if len(wide):
        gap = f"a gap of {along[wide[0]]:.4g} mm after slice {wide[0] + 1} of {len(positions)}"
        return f"{gap}, where slices lie {typical:.4g} mm apart: copy the missing slices, or resample the scan"
    if np.abs(steps - steps.mean(axis=0)).max() > _CLOSE:
        return "its slices are not on one line: resample the scan"
    return ""
