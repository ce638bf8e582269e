"""Maps as DICOM: a Parametric Map on the grid of the series that was explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.storage.dicom import sorted_series, volume_of
from monai_saliency.storage.files import atomic_path
from monai_saliency.utils.arguments import require
from monai_saliency.version import __version__

__all__ = ["OnSeries", "fix_dates", "save_parametric_map"]

_NAME = "monai-saliency"
_SERIES_NUMBER = 9100


def save_parametric_map(
    path: str | Path, saliency: MetaTensor, files: Sequence[str | Path], unit: str = "1", label: str = "saliency map"
) -> None:
    """Write one map as a DICOM Parametric Map, whole or not at all.

    It refers to the series' slices and has its frame of reference, and so its patient too. The same map and series
    give the same UIDs and the same bytes. Of several classes each has its own file.

    Args:
        path: the file to write, ``*.dcm``.
        saliency: the map ``(1, columns, rows, slices)`` on the series' own grid, in float32 or float64, which stays.
        files: the series that was explained.
        unit: the map's unit as a UCUM code: ``"1"``, or the score's unit.
        label: what the map shows, at most 64 characters.

    Raises:
        AdviceError: when the series is refused, as by :func:`monai_saliency.storage.dicom.sorted_series`, when the map
            does not lie on its grid to 1e-3 mm, or has NaN or infinite values.
        OutputError: when the file cannot be written.
        OptionalImportError: when highdicom is not installed. It gives the pip command.

    Example::

        save_parametric_map("map.dcm", saliency, sorted(folder.glob("*.dcm")), label="tumour")
    """
    hd, codes = (require(name, "dicom") for name in ("highdicom", "pydicom.sr.coding"))
    found = OnSeries.of(saliency, files)
    slices, frames = found.slices, found.frames

    def uid(what: str) -> str:
        return found.uid(what, label, unit)

    code = codes.Code(unit, "UCUM", "no units" if unit == "1" else unit)
    low, high = float(frames.min()), float(frames.max())
    mapping = hd.pm.RealWorldValueMapping(label[:16], label, code, (low, high), slope=1.0, intercept=0.0)
    window = hd.VOILUTTransformation(window_center=(low + high) / 2, window_width=max(high - low, 1e-6))
    made = hd.pm.ParametricMap(
        *(slices, frames, uid("series"), _SERIES_NUMBER, uid("object"), 1, _NAME, _NAME, __version__, "0", False),
        real_world_value_mappings=[mapping],
        content_label="SALIENCY",
        content_description=label,
        voi_lut_transformations=[window],
    )
    fix_dates(made, slices[0])
    for each in (*made.DimensionOrganizationSequence, *made.DimensionIndexSequence):
        each.DimensionOrganizationUID = uid("dimensions")  # a random one otherwise
    with atomic_path(path) as temporary:
        made.save_as(temporary)


@dataclass(frozen=True)
class OnSeries:
    """A map on the grid of the series that was explained: pydicom's slices, and arrays ``(slices, rows, columns)``."""

    slices: Sequence[Any]
    scan: np.ndarray
    frames: np.ndarray
    turn: np.ndarray

    @staticmethod
    def of(saliency: MetaTensor, files: Sequence[str | Path]) -> OnSeries:
        """The map ``(1, columns, rows, slices)`` on the series of these files."""
        slices = sorted_series(files)
        volume = volume_of(slices)
        values = saliency.detach().cpu().numpy()
        values = values if values.dtype == np.float64 else values.astype(np.float32)
        affine, turn = saliency.affine.cpu().numpy(), np.array([[0, 1], [1, 1], [2, 1]])
        if values.ndim == 4 and affine.shape == (4, 4):
            turn = nib.io_orientation(np.linalg.inv(volume.affine.numpy()) @ affine)
            affine = affine @ nib.orientations.inv_ornt_aff(turn, values.shape[1:])
            values = nib.apply_orientation(values[0], turn)[None]
        if values.shape != (1, *volume.shape):
            raise AdviceError(f"the map must have the series' shape {(1, *volume.shape)}, got {values.shape}")
        corners = np.array([[i, j, k, 1] for i in (0, 1) for j in (0, 1) for k in (0, 1)], float)
        corners[:, :3] *= np.array(volume.shape) - 1
        apart = np.abs(corners @ (affine - volume.affine.cpu().numpy()).T).max()
        if not apart <= 1e-3:
            raise AdviceError(
                f"the map lies up to {apart:.4g} mm off the series' grid, 1e-3 is allowed: invert it first"
            )
        if not np.isfinite(values).all():
            raise AdviceError("the map has NaN or infinite values, which a Parametric Map cannot show")
        scan, frames = (np.ascontiguousarray(each.transpose(2, 1, 0)) for each in (volume.numpy(), values[0]))
        return OnSeries(slices, scan, frames, turn)

    def as_frames(self, values: np.ndarray) -> np.ndarray:
        """An array on the map's grid ``(1, *spatial)``, such as its standard error, turned to the frames."""
        return np.ascontiguousarray(nib.apply_orientation(values[0], self.turn).transpose(2, 1, 0))

    def uid(self, *made_of: str) -> str:
        """A UID that is the same for the same map, series and words."""
        pydicom = require("pydicom", "dicom")
        of = [*made_of, __version__, sha256(self.frames.tobytes()).hexdigest()]
        return str(pydicom.uid.generate_uid(entropy_srcs=[*of, *(str(each.SOPInstanceUID) for each in self.slices)]))


def fix_dates(made: Any, source: Any) -> None:
    """Replace today's dates by those of the scan, so that two runs give the same bytes."""
    date = source.get("ContentDate") or source.get("StudyDate") or "19000101"
    time = source.get("ContentTime") or source.get("StudyTime") or "000000"
    for word in ("Content", "InstanceCreation"):
        setattr(made, f"{word}Date", date)
        setattr(made, f"{word}Time", time)
    for each in made.get("ContributingEquipmentSequence", ()):
        each.ContributionDateTime = f"{date}{time}"
