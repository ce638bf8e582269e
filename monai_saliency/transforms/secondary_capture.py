"""Maps over their scan as colour pictures in DICOM, for archives that show nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import MetaTensor

from monai_saliency.storage.files import atomic_path
from monai_saliency.transforms.dicom import OnSeries, fix_dates
from monai_saliency.utils.arguments import require
from monai_saliency.visualize.colours import blended, coloured_voxels, gray_window
from monai_saliency.visualize.legend import Legend, default_legends

__all__ = ["save_secondary_capture"]

_NAME = "monai-saliency"
_SERIES_NUMBER = 9200
_TOWARDS = (("L", "R"), ("P", "A"), ("H", "F"))  # of DICOM's axes, up and down


def save_secondary_capture(
    folder: str | Path,
    saliency: MetaTensor,
    files: Sequence[str | Path],
    label: str = "saliency map",
    legend: Legend | None = None,
    standard_error: np.ndarray | None = None,
) -> list[Path]:
    """Write the scan with one map over it as a series of colour Secondary Captures, one a slice.

    Colours are chosen as by :func:`~monai_saliency.visualize.plot_saliency`. The scan is gray in
    the window that its headers give, else in that of the pictures. The same map and series give the same bytes.

    Args:
        folder: the folder to write: ``0001.dcm`` and so on, each whole or not at all. Other ``*.dcm`` files in it are
            removed.
        saliency: the map ``(1, columns, rows, slices)`` on the series' own grid.
        files: the series that was explained.
        label: what the map shows, at most 64 characters.
        legend: what the colours mean; by default the largest absolute value is the last colour.
        standard_error: of the map, of its shape; None where there is none.

    Returns:
        the files, in the order of the slices.

    Raises:
        AdviceError: as for :func:`~monai_saliency.transforms.save_parametric_map`.
        OutputError: when a file cannot be written.
        OptionalImportError: when highdicom is not installed. It gives the pip command.

    Example::

        save_secondary_capture("captures", saliency, sorted(folder.glob("*.dcm")), label="tumour")
    """
    hd, pydicom = (require(name, "dicom") for name in ("highdicom", "pydicom"))
    found = OnSeries.of(saliency, files)
    legend = legend or default_legends([found.frames])[0]
    error = None if standard_error is None else found.as_frames(np.asarray(standard_error))
    coloured = coloured_voxels(found.frames, error, legend)
    low, high = _window(found)
    series, place = found.uid("captures", label, repr(legend)), Path(folder)
    written = []
    for number, (source, gray, frame, part) in enumerate(
        zip(found.slices, found.scan, found.frames, coloured, strict=True), 1
    ):
        picture = blended(np.clip((gray - low) / (high - low), 0, 1), frame, part, legend.scale)
        made = hd.sc.SCImage.from_ref_dataset(
            source,
            picture,
            "RGB",
            8,
            "PATIENT",
            series,
            _SERIES_NUMBER,
            found.uid("capture", label, repr(legend), str(number)),
            number,
            _NAME,
            pixel_spacing=tuple(map(float, source.PixelSpacing)),
            patient_orientation=_towards(source),
            transfer_syntax_uid=pydicom.uid.ExplicitVRLittleEndian,
        )
        made.SeriesDescription = label
        fix_dates(made, source)
        made.DateOfSecondaryCapture, made.TimeOfSecondaryCapture = made.ContentDate, made.ContentTime
        path = place / f"{number:04d}.dcm"
        with atomic_path(path) as temporary:
            made.save_as(temporary)
        written.append(path)
    for other in set(place.glob("*.dcm")) - set(written):
        other.unlink()
    return written


def _window(found: OnSeries) -> tuple[float, float]:
    """The scan's values that are drawn black and white."""
    middle, width = (found.slices[0].get(word) for word in ("WindowCenter", "WindowWidth"))
    if middle is None or width is None or found.slices[0].get("Modality") != "CT":
        return gray_window(found.scan)
    # Several windows are listed in the order of their use.
    middle, width = (float(np.atleast_1d(np.asarray(each, float))[0]) for each in (middle, width))
    return (middle - width / 2, middle + width / 2) if width > 0 else gray_window(found.scan)


def _towards(source: Any) -> tuple[str, str]:
    """Where a slice's rows and columns lead, in DICOM's letters."""
    along = np.array(source.ImageOrientationPatient, float).reshape(2, 3)
    axes = np.abs(along).argmax(axis=1)
    first, second = (_TOWARDS[axis][int(each[axis] < 0)] for each, axis in zip(along, axes, strict=True))
    return first, second
