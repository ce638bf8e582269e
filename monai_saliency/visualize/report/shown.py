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
from monai_saliency.visualize.legend import COLD, WARM, Legend, blended, finite, focus_voxel, gray_window, rounded_up
from monai_saliency.visualize.report.cases import CaseFiles, class_words
from monai_saliency.visualize.report.kept_scan import KeptScan

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
    """The maps of a case over its scan."""

    case: str
    kept: KeptScan
    layers: Sequence[_Layer]

    @classmethod
    def of(cls, case: CaseFiles, scales: Mapping[str, float]) -> Shown:
        """Read the maps of a case; ``scales`` are the largest values, by the meaning of the values.

        Raises:
            ValueError: when its scan was not kept, or lies on another grid than its maps.
        """
        kept = case.kept
        if kept is None:
            raise ValueError("its scan was not kept (report: false), so explain it again with report: true")
        file, error_file = case.open_maps()
        if kept.shape != file.shape or not np.allclose(kept.affine, file.affine, rtol=1e-4, atol=1e-3):
            raise ValueError("its scan was kept in an earlier run, on another grid, so explain it again")
        maps = finite(file.read(kept.part))
        errors: Any = [None] * file.count if error_file is None else finite(error_file.read(kept.part))
        layers = []
        for row, legend, values, error in zip(case.rows, kept.legends, maps, errors, strict=True):
            coloured = legend.coloured(values, error)
            if row["verdict"]:  # which is of all voxels
                coloured[:] = False
            scale, focus = scales[legend.words], focus_voxel(values, coloured)
            layers.append(_Layer(class_words(row), values, error, legend, scale, coloured, focus, row["verdict"]))
        return cls(case.case, kept, layers)

    def data(self) -> dict[str, Any]:
        """The data of ``assets/case.js``."""
        kept, values, dims = self.kept, self.kept.values, len(self.kept.shape)
        is_ct = dims == 3 and kept.step >= 1 and values.min() <= _AIR and np.percentile(values, 99.9) >= _BONE
        turn = nib.io_orientation(kept.affine if dims == 3 else np.eye(3))
        # For x, y and z: the axis of the file that is nearest, and whether it runs the other way.
        axes = [[axis, bool(turn[axis, 1] < 0)] for axis in np.argsort(turn[:, 0]).tolist()]
        return {
            "case": self.case,
            "scan": _embedded(kept, kept.codes, kept.step, kept.low),
            "window": list(map(float, self._window)),
            "gray": kept.codes.ndim == dims,
            "hounsfield": bool(is_ct),
            "label": None if kept.label is None else _embedded(kept, kept.label),
            "maps": [self._map_data(layer) for layer in self.layers],
            "colours": {"cold": COLD, "warm": WARM},
            "shape": kept.shape,
            "start": kept.start,
            "stride": kept.stride,
            "affine": kept.affine.tolist(),
            "inverse": np.linalg.inv(kept.affine).tolist(),
            "spacing": nib.affines.voxel_sizes(kept.affine)[:dims].tolist(),
            "axes": axes,
            "rowsDown": kept.rows_down,
            "step": kept.step,
        }

    def thumbnails(self) -> list[bytes]:
        """PNG files, one for each of the first maps."""
        low, high = self._window
        gray = (self.kept.values - low) / (high - low)
        first = self.layers[:_MOST_THUMBNAILS]
        return [_thumbnail(self.kept, gray, layer) for layer in first]

    @cached_property
    def _window(self) -> tuple[float, float]:
        return gray_window(self.kept.values)

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
            "against": legend.against(layer.values, layer.coloured),
            "focus": layer.focus,
        }


def _encoded(kept: KeptScan, values: np.ndarray) -> str:
    """A map in int16, in steps of a thousandth of its largest absolute value."""
    largest = np.abs(values).max(initial=0)
    step = float(np.float32(largest / _LEVELS)) or 1.0
    codes = np.rint(values / step).astype(np.int16)
    return _embedded(kept, codes, step)


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
    spacing = nib.affines.voxel_sizes(kept.affine)[: len(kept.shape)] * kept.stride
    planes = [gray, layer.values, layer.coloured]
    if len(kept.shape) == 3:
        turn = nib.io_orientation(kept.affine)
        across, down, through = np.argsort(turn[:, 0])
        spacing = spacing[[across, down]]
        place = layer.focus[through]
        slabs = [volume.take([place], through) for volume in planes]
        planes = [nib.apply_orientation(slab, turn)[:, :, 0] for slab in slabs]
    scan, values, coloured = (_upright(plane, kept) for plane in planes)
    picture = blended(scan, values, coloured, layer.scale)
    image = require("PIL.Image", extra="bundle").fromarray(picture)
    aspect = image.width * spacing[0] / (image.height * spacing[1])
    width = max(1, min(2 * _THUMBNAIL, round(_THUMBNAIL * aspect)))
    file = io.BytesIO()
    image.resize((width, _THUMBNAIL), resample=0).save(file, format="png")
    return file.getvalue()


def _upright(plane: np.ndarray, kept: KeptScan) -> np.ndarray:
    """A plane ``(columns, rows)`` of a scan as a picture ``(rows, columns)``, whose rows count downwards."""
    picture = np.swapaxes(plane, 0, 1)
    return picture if kept.rows_down else picture[::-1]
