"""The content of a case's page: its scan, maps, standard errors and label as volumes, and small pictures."""

from __future__ import annotations

import base64
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.utils.arguments import require
from monai_saliency.visualize.legend import (
    COLD,
    WARM,
    Legend,
    blended,
    focus_voxel,
    gray_window,
    rounded_up,
)
from monai_saliency.visualize.report.cases import CaseFiles, KeptScan, class_words

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
    coloured: np.ndarray
    focus: tuple[int, ...]
    verdict: str


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
        errors: Any = [None] * file.count
        if error_file is not None:
            errors = np.nan_to_num(error_file.read(kept.part), posinf=0, neginf=0)
        found = []
        for row, legend, values, error in zip(case.rows, legends, maps, errors, strict=True):
            scale, coloured = scales.get(legend.words, legend.scale), legend.coloured(values, error)
            coloured &= not row["verdict"]  # which is of all voxels
            focus = focus_voxel(values, coloured)
            found.append(_Layer(class_words(row), values, error, legend, scale, coloured, focus, row["verdict"]))
        return cls(case.case, kept, has_scan, found)

    def data(self) -> dict[str, Any]:
        """The data of ``assets/case.js``."""
        kept, values, dims = self.kept, self.kept.values, len(self.kept.shape)
        is_ct = dims == 3 and kept.step >= 1 and values.min() <= _AIR and np.percentile(values, 99.9) >= _BONE
        turn = nib.io_orientation(kept.affine if dims == 3 else np.eye(3))
        return {
            "case": self.case,
            "scan": _embedded(kept, kept.codes, kept.step, kept.low) if self.has_scan else None,
            "window": list(map(float, self._window)),
            "gray": self.has_scan and kept.codes.ndim == dims,
            "hounsfield": bool(self.has_scan and is_ct),
            "label": None if kept.label is None else _embedded(kept, kept.label),
            "maps": [self._map_data(layer) for layer in self.layers],
            "colours": {"cold": COLD, "warm": WARM},
            "shape": kept.shape,
            "start": kept.start,
            "stride": kept.stride,
            "affine": kept.affine.tolist(),
            "inverse": np.linalg.inv(kept.affine).tolist(),
            "spacing": np.linalg.norm(kept.affine[:3, :dims], axis=0).tolist(),
            # For x, y and z: the axis of the file that is nearest, and whether it runs the other way.
            "axes": [[axis, bool(turn[axis, 1] < 0)] for axis in np.argsort(turn[:, 0]).tolist()],
            "rowsDown": kept.rows_down,
            "step": kept.step,
        }

    def thumbnails(self) -> list[bytes]:
        """PNG files, one for each of the first maps."""
        low, high = self._window
        gray = (self.kept.values - low) / (high - low)
        return [_thumbnail(self.kept, gray, layer) for layer in self.layers[:_MOST_THUMBNAILS]]

    @cached_property
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
            "nothing": layer.verdict,
            "focus": layer.focus,
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
    return base64.b64encode(gzip.compress(image.to_bytes(), 1, mtime=0)).decode()


def _thumbnail(kept: KeptScan, gray: np.ndarray, layer: _Layer) -> bytes:
    """The plane through the focus as a PNG file: axial, from the feet's side up, or the 2D image."""
    parts = [gray, layer.values, layer.coloured]
    sizes = np.linalg.norm(kept.affine[:3, : len(kept.shape)], axis=0) * kept.stride
    if len(kept.shape) == 3:
        turn = nib.io_orientation(kept.affine)
        nearest = np.argsort(turn[:, 0])
        plane = layer.focus[nearest[2]]
        parts = [nib.apply_orientation(part.take([plane], nearest[2]), turn)[:, :, 0] for part in parts]
        sizes = sizes[nearest[:2]]
    # Columns to the right, rows down.
    scan, values, coloured = (np.swapaxes(part, 0, 1)[:: 1 if kept.rows_down else -1] for part in parts)
    image = require("PIL.Image", extra="bundle").fromarray(blended(scan, values, coloured, layer.scale))
    width = round(_THUMBNAIL * image.width * sizes[0] / (image.height * sizes[1]))
    file = io.BytesIO()
    image.resize((max(1, min(2 * _THUMBNAIL, width)), _THUMBNAIL), resample=0).save(file, format="png")
    return file.getvalue()
