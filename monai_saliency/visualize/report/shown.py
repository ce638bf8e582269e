"""The content of a case's page: its scan, maps, standard errors and label as volumes, and small pictures."""

from __future__ import annotations

import base64
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.utils.arguments import require
from monai_saliency.visualize.colours import COLD, WARM, blended, coloured_voxels, focus_voxel, gray_window
from monai_saliency.visualize.legend import Legend, rounded_up
from monai_saliency.visualize.report.cases import CaseFiles, class_words
from monai_saliency.visualize.report.kept_scan import KeptScan

__all__ = ["Shown"]

_THUMBNAIL = 112  # rows of pixels
_MOST_THUMBNAILS = 12
_LEVELS = 1000
#: below this a CT has air, above that bone
_AIR, _BONE = -900, 200


@dataclass(frozen=True)
class _Layer:
    """One map in the voxels that are shown: arrays ``(*spatial)``, and the largest value of its colours."""

    name: str
    values: np.ndarray
    error: np.ndarray | None
    legend: Legend
    scale: float

    @property
    def coloured(self) -> np.ndarray:
        return coloured_voxels(self.values, self.error, self.legend)

    @property
    def focus(self) -> tuple[int, ...]:
        return focus_voxel(self.values, self.coloured)


@dataclass(frozen=True)
class Shown:
    """The maps of a case over its scan; without a scan, ``kept`` holds only the places of the voxels."""

    case: str
    kept: KeptScan
    has_scan: bool
    layers: Sequence[_Layer]

    @classmethod
    def of(cls, case: CaseFiles, scales: Mapping[str, float]) -> Shown:
        """Read the maps of a case; ``scales`` are the largest values, by the meaning of the values."""
        file, error_file = case.open_maps()
        legends, kept = case.legends(), case.kept
        has_scan = kept is not None and kept.lies_on(file.shape, file.affine)
        if kept is None or not has_scan:
            nothing = np.zeros(file.shape, np.float32)
            layers = file.count * (1 if error_file is None else 2)
            kept = KeptScan.of(case.case, nothing, file.read(), file.affine, legends, layers=layers)
        maps = np.nan_to_num(file.read(kept.part), posinf=0, neginf=0)
        errors = None if error_file is None else np.nan_to_num(error_file.read(kept.part), posinf=0, neginf=0)
        found = []
        for place, (row, legend) in enumerate(zip(case.rows, legends, strict=True)):
            error = None if errors is None else errors[place]
            scale = scales.get(legend.words, legend.scale)
            found.append(_Layer(class_words(row), maps[place], error, legend, scale))
        return cls(case.case, kept, has_scan, found)

    def data(self) -> dict[str, Any]:
        """The data of ``assets/case.js``."""
        kept = self.kept
        return _place(kept) | {
            "case": self.case,
            "scan": _embedded(kept, kept.codes, kept.step, kept.low) if self.has_scan else None,
            "window": list(map(float, self._window())),
            "gray": self.has_scan and kept.codes.ndim == len(kept.shape),
            "hounsfield": self.has_scan and _is_ct(kept),
            "label": None if kept.label is None else _embedded(kept, kept.label),
            "maps": [self._map_data(layer) for layer in self.layers],
            "colours": {"cold": COLD, "warm": WARM},
        }

    def thumbnails(self) -> list[bytes]:
        """PNG files, one for each of the first maps."""
        low, high = self._window()
        gray = (self.kept.values - low) / (high - low)
        found = []
        for layer in self.layers[:_MOST_THUMBNAILS]:
            file = io.BytesIO()
            image = require("PIL.Image", extra="bundle").fromarray(_thumbnail(self.kept, gray, layer))
            image.save(file, format="png")
            found.append(file.getvalue())
        return found

    def _window(self) -> tuple[float, float]:
        return gray_window(self.kept.values) if self.has_scan else (0.0, 1.0)

    def _map_data(self, layer: _Layer) -> dict[str, Any]:
        error, legend = layer.error, layer.legend
        return {
            "name": layer.name,
            "words": legend.words,
            "volume": _encoded(self.kept, layer.values),
            "error": None if error is None else _encoded(self.kept, error),
            "scale": layer.scale,
            "own": rounded_up(float(np.abs(layer.values).max(initial=0))),
            "ownError": 1 if error is None else rounded_up(float(error.max(initial=0))),
            "floor": min(legend.floor(error is not None), layer.scale),
            "signed": legend.signed,
            "focus": list(layer.focus),
        }


def _encoded(kept: KeptScan, values: np.ndarray) -> str:
    """A map in int16, in steps of a thousandth of its largest absolute value."""
    step = float(np.float32(np.abs(values).max(initial=0) / _LEVELS)) or 1.0
    return _embedded(kept, np.rint(values / step).astype(np.int16), step)


def _embedded(kept: KeptScan, codes: np.ndarray, step: float = 1.0, low: float = 0.0) -> str:
    """A volume of codes, uint8 or int16, as the base64 of a packed NIfTI file: its values are ``low + step * code``."""
    dims = len(kept.shape)
    move = np.eye(4)
    move[range(dims), range(dims)] = kept.stride
    move[range(dims), 3] = kept.start
    image = nib.Nifti1Image(codes, kept.affine @ move)
    image.header.set_slope_inter(step, low)
    image.header.set_xyzt_units("mm")
    return base64.b64encode(gzip.compress(image.to_bytes(), 6, mtime=0)).decode()


def _place(kept: KeptScan) -> dict[str, Any]:
    """Where the shown voxels lie in the maps' file, and in the scanner."""
    dims = len(kept.shape)
    turn = nib.io_orientation(kept.affine if dims == 3 else np.eye(3))
    # For x, y and z: the axis of the file that is nearest, and whether it runs the other way.
    nearest = [int(np.flatnonzero(turn[:, 0] == axis)[0]) for axis in range(dims)]
    return {
        "shape": kept.shape,
        "start": kept.start,
        "stride": kept.stride,
        "affine": kept.affine.tolist(),
        "inverse": np.linalg.inv(kept.affine).tolist(),
        "spacing": np.linalg.norm(kept.affine[:3, :dims], axis=0).tolist(),
        "axes": [[axis, bool(turn[axis, 1] < 0)] for axis in nearest],
        "rowsDown": kept.rows_down,
        "step": kept.step,
    }


def _is_ct(kept: KeptScan) -> bool:
    """Whether the values are a CT's: from air to bone, in whole numbers."""
    values = kept.values
    is_wide = values.min() <= _AIR and np.percentile(values, 99.9) >= _BONE
    return bool(len(kept.shape) == 3 and kept.step >= 1 and is_wide)


def _thumbnail(kept: KeptScan, gray: np.ndarray, layer: _Layer) -> np.ndarray:
    """The plane through the focus, ``(rows, columns, 3)``: axial, from the feet's side up, or the 2D image."""
    parts = [gray, layer.values, layer.coloured]
    sizes = np.linalg.norm(kept.affine[:3, : len(kept.shape)], axis=0) * kept.stride
    if len(kept.shape) == 3:
        turn = nib.io_orientation(kept.affine)
        nearest = [int(np.flatnonzero(turn[:, 0] == axis)[0]) for axis in range(3)]
        cut = [slice(None)] * 3
        cut[nearest[2]] = slice(layer.focus[nearest[2]], layer.focus[nearest[2]] + 1)
        parts = [nib.apply_orientation(part[tuple(cut)], turn)[:, :, 0] for part in parts]
        sizes = sizes[nearest[:2]]
    # Columns to the right, rows down.
    parts = [np.swapaxes(part, 0, 1)[:: 1 if kept.rows_down else -1] for part in parts]
    rows, columns = parts[0].shape[:2]
    width = max(1, min(2 * _THUMBNAIL, round(_THUMBNAIL * columns * sizes[0] / (rows * sizes[1]))))
    row, column = np.arange(_THUMBNAIL) * rows // _THUMBNAIL, np.arange(width) * columns // width
    scan, values, coloured = (part[row][:, column] for part in parts)
    return blended(scan, values, coloured, layer.scale)
