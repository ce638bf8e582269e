"""DICOM series: which files belong together, whether they are one whole volume, and how they are read.

MONAI's ``PydicomReader`` sorts slices by ``InstanceNumber``, skips those without one, only warns where slices differ in
spacing or shape, and does not see gaps. So a series is checked and sorted by position here.
Errors name no patient and no file, whose name may be a patient's: they name the series by :func:`series_id`. A series
is the files of one UID in one folder, so that one of its files leads to all of them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
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

_CLOSE = 1e-2  # of the distance between slices: they lie where they should
_FAR = 0.1  # of it: a map would be off by as much
_SAME = 1e-4  # of direction cosines and pixel spacings

_SUFFIXES = (".dcm", ".dicom", ".ima")
_STORAGE = "1.2.840.10008.5.1.4.1.1"
# Secondary captures and their kinds, parametric maps, segmentations.
_NO_SCANS = (f"{_STORAGE}.7", f"{_STORAGE}.7.", f"{_STORAGE}.30", f"{_STORAGE}.66.4")
# What all slices of a volume have the same.
_ONE_VALUE = {
    "patients": ("PatientID", "PatientName"),
    "frames of reference": ("FrameOfReferenceUID",),
    "photometric interpretations": ("PhotometricInterpretation",),
}
_TAGS = ["SOPClassUID", "SeriesInstanceUID", "Rows", "ImageType"]


def series_id(uid: str) -> str:
    """The name of a series: a hash of its UID, which reveals nothing about the patient."""
    return f"series-{sha256(uid.encode()).hexdigest()[:12]}"


def find_series(folder: str | Path) -> dict[str, list[Path]]:
    """The sorted DICOM files in a folder or below it, by their series UID. Other files are left out."""
    return group_series(Path(below, name) for below, _, names in os.walk(folder) for name in names)


def group_series(files: Iterable[str | Path]) -> dict[str, list[Path]]:
    """The DICOM files among some files, by their series UID. Other files are left out, and so are files that hold no
    scan: reports, plans, segmentations, parametric maps, secondary captures and localizers.
    """
    found: dict[str, list[Path]] = {}
    for path in map(Path, files):
        if uid := _series_of(path):
            found.setdefault(uid, []).append(path)
    return {uid: sorted(found[uid]) for uid in sorted(found)}


def _series_of(path: Path) -> str:
    """The UID of the series of a file, whose header is read once while the file stays as it is; "" for no scan."""
    try:
        status = os.stat(path)
    except OSError:  # a link to a file that is not there
        return _uid_of(path)
    return _uid_of(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=1 << 18)  # an archive's folder may hold many series
def _uid_of(path: Path, *state: int) -> str:
    if not is_dicom(path):
        return ""
    pydicom = require("pydicom", "dicom")
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
        uid, kind = str(header.get("SeriesInstanceUID", "")), str(header.get("SOPClassUID", ""))  # a DICOMDIR has none
        is_derived = kind in _NO_SCANS or kind.startswith(_NO_SCANS[1])
        holds_scan = "Rows" in header and not is_derived and "LOCALIZER" not in (header.get("ImageType") or ())
    except Exception:  # whatever pydicom raises on a file that is cut, or was never DICOM
        return str(path)
    return uid if holds_scan else ""


def is_dicom(path: str | Path) -> bool:
    """Whether a file is DICOM by how it begins, or by its suffix, which an empty file keeps. Needs no extra."""
    has_suffix = Path(path).suffix.lower() in _SUFFIXES
    if not os.path.isfile(path):  # a folder, or a named pipe, which nobody may ever write to
        return has_suffix and not os.path.exists(path)
    try:
        with open(path, "rb") as file:
            return has_suffix or file.read(132)[128:] == b"DICM"
    except OSError:
        return has_suffix


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
    frames, in colours or with a table of values; fewer than two slices; slices that differ in orientation, spacing,
    shape, patient or photometric interpretation; that share a position; and gaps.
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
    positions = np.array([each.ImagePositionPatient for each in slices], float)
    if problem := _misplaced(positions, normal):
        raise AdviceError(f"{name}: {problem}")
    if problem := _off_line(positions, _CLOSE):
        warnings.warn(f"{name}: {problem}, and its maps as well", stacklevel=2)
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
    if any("ModalityLUTSequence" in each for each in slices):
        return "its values are numbers of a table (ModalityLUTSequence), which is not read here: convert it to NIfTI"
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
    for what, words in _ONE_VALUE.items():
        if any(len({_bare(each.get(word)) for each in slices} - {""}) > 1 for word in words):
            return f"its slices have mixed {what}: split it into one series for each"
    for word in ("RescaleSlope", "RescaleIntercept"):
        lacking = sum(each.get(word) is None for each in slices)
        if 0 < lacking < len(slices):
            return (
                f"{lacking} of its {len(slices)} slices lack {word}, so their values are of another unit: copy them "
                "again, or complete their headers"
            )
    return "it has 1 slice, 2 or more are expected" if len(slices) < 2 else ""


def _bare(value: Any) -> str:
    """A header's value without case, spaces and the ``^`` between the parts of a name; "" where it is missing."""
    return re.sub(r"[\s^]", "", str(value or "").casefold())


def _misplaced(positions: np.ndarray, normal: np.ndarray) -> str:
    """What is wrong with the sorted positions ``(slices, 3)`` in mm, in words."""
    along = np.diff(positions, axis=0) @ normal
    typical = float(np.sort(along)[(len(along) - 1) // 2])
    same = int((along <= _CLOSE * max(typical, _CLOSE)).sum())
    if same:
        return f"{same} of its slices lie where another lies: split it, or remove the copies"
    wide = np.flatnonzero(along > 1.5 * typical)
    if len(wide):
        gap = f"a gap of {along[wide[0]]:.4g} mm after slice {wide[0] + 1} of {len(positions)}"
        return f"{gap}, where slices lie {typical:.4g} mm apart: copy the missing slices, or resample the scan"
    problem = _off_line(positions, _FAR)
    return f"{problem}: resample the scan" if problem else ""


def _off_line(positions: np.ndarray, allowed: float) -> str:
    """Which of the sorted positions is off the line of all by more than a share of their distance, in words."""
    numbers = np.arange(len(positions))
    start, step = np.polynomial.polynomial.polyfit(numbers, positions, 1)
    off = np.abs(positions - start - numbers[:, None] * step)
    # The line is fitted to rounded positions, so they lie up to twice their rounding off it.
    distance = float(np.linalg.norm(step))
    worst = int(off.max(axis=1).argmax())
    if not (off > 2 * _rounding(positions) + allowed * distance).any():
        return ""
    words = f"slice {worst + 1} of {len(positions)} lies {off[worst].max():.3g} mm off"
    return f"{words} the line on which slices are {distance:.4g} mm apart"


def _rounding(positions: np.ndarray) -> np.ndarray:
    """Half the last decimal with which positions ``(slices, 3)`` are given, by axis. Whole numbers are not rounded."""

    def decimals(values: np.ndarray) -> int:
        return next((n for n in range(1, 7) if np.abs(values - values.round(n)).max() < 1e-8), 7)

    return 0.5 * 10.0 ** -np.array([decimals(values) for values in positions.T])
