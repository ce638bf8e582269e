"""The content of a case's page: its scan, maps, standard errors and label as volumes, and small pictures."""

from __future__ import annotations

import base64
import gzip
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.visualize.colours import COLD, WARM, blended, coloured_voxels, focus_voxel, gray_window
from monai_saliency.visualize.legend import Legend, rounded_up
from monai_saliency.visualize.report.cases import CaseFiles, class_words
from monai_saliency.visualize.report.kept_scan import KeptScan

__all__ = ["Layer", "Shown", "encoded", "laid_out", "show"]

_THUMBNAIL = 112  # rows of pixels
_MOST_THUMBNAILS = 12
_LEVELS = 1000
#: below this a CT has air, above that bone
_AIR, _BONE = -900, 200
_OFFSET = 352  # of the voxels in a NIfTI file with one empty extension


@dataclass(frozen=True)
class Shown:
    """The data of ``assets/case.js``, and PNG files, one for each of the first maps."""

    data: dict[str, Any]
    thumbnails: list[bytes]


@dataclass(frozen=True)
class Layer:
    """One map in the voxels that are shown: all arrays are ``(*spatial)``, and ``focus`` is looked at first."""

    values: np.ndarray
    error: np.ndarray | None
    coloured: np.ndarray
    focus: tuple[int, ...]
    legend: Legend

    @classmethod
    def of(cls, saliency: np.ndarray, error: np.ndarray | None, legend: Legend) -> Layer:
        values = np.nan_to_num(saliency, posinf=0, neginf=0)
        part = None if error is None else np.nan_to_num(error, posinf=0, neginf=0)
        coloured = coloured_voxels(values, part, legend)
        return cls(values, part, coloured, focus_voxel(values, coloured), legend)

    def data(self, kept: KeptScan, scale: float, name: str) -> dict[str, Any]:
        """The data of the map in the page's script."""
        error, legend = self.error, self.legend
        return {
            "name": name,
            "words": legend.words,
            "volume": _embedded(kept, *encoded(self.values)),
            "error": None if error is None else _embedded(kept, *encoded(error)),
            "scale": scale,
            "own": rounded_up(float(np.abs(self.values).max(initial=0))),
            "ownError": 1 if error is None else rounded_up(float(error.max(initial=0))),
            "floor": min(legend.floor(error is not None), scale),
            "signed": legend.signed,
            "focus": list(self.focus),
        }


def show(case: CaseFiles, scales: Mapping[str, float]) -> Shown:
    """The content of the page of a case with maps; ``scales`` are the largest values, by the meaning of the values.

    Raises:
        ValueError: when its maps cannot be read.
    """
    file, error_file = case.open_maps()
    legends, kept = case.legends(), case.kept
    has_scan = kept is not None and kept.lies_on(file.shape, file.affine)
    if kept is None or not has_scan:
        layers, nothing = file.count * (1 if error_file is None else 2), np.zeros(file.shape, np.float32)
        kept = KeptScan.of(case.case, nothing, file.read(), file.affine, legends, layers=layers)
    errors = [None] * file.count if error_file is None else error_file.read(kept.part)
    shown = [Layer.of(*each) for each in zip(file.read(kept.part), errors, legends, strict=True)]
    return laid_out(case.case, kept, has_scan, [*zip(map(class_words, case.rows), shown, strict=True)], scales)


def laid_out(
    case: str, kept: KeptScan, has_scan: bool, layers: Sequence[tuple[str, Layer]], scales: Mapping[str, float]
) -> Shown:
    """The content of a page with maps over one scan.

    Args:
        case: the name of the case.
        kept: the scan, and which voxels are shown.
        has_scan: whether ``kept`` holds a scan; else only the places of the voxels.
        layers: for each map its name and its shown voxels.
        scales: the largest value of the colours, by what the values are.
    """
    window = gray_window(kept.values) if has_scan else (0.0, 1.0)
    chosen = [scales.get(layer.legend.words, layer.legend.scale) for _, layer in layers]
    data = _place(kept) | {
        "case": case,
        "scan": _embedded(kept, kept.codes, kept.step, kept.low) if has_scan else None,
        "window": list(map(float, window)),
        "gray": has_scan and kept.codes.ndim == len(kept.shape),
        "hounsfield": has_scan and _is_ct(kept),
        "label": None if kept.label is None else _embedded(kept, kept.label),
        "maps": [layer.data(kept, scale, name) for (name, layer), scale in zip(layers, chosen, strict=True)],
        "colours": {"cold": COLD, "warm": WARM},
    }
    gray = (kept.values - window[0]) / (window[1] - window[0])
    drawn = list(zip(layers, chosen, strict=True))[:_MOST_THUMBNAILS]
    return Shown(data, [_png(_thumbnail(kept, gray, layer, scale)) for (_, layer), scale in drawn])


def encoded(saliency: np.ndarray) -> tuple[np.ndarray, float]:
    """A map as whole numbers in int16, and the step between them: a thousandth of its largest absolute value.

    Zero stays zero, and so do values that are not finite.
    """
    finite = np.nan_to_num(saliency, posinf=0, neginf=0).astype(np.float64)
    largest = float(np.abs(finite).max(initial=0))
    # In the precision of the NIfTI header.
    step = float(np.float32(largest / _LEVELS if largest > 0 else 1.0))
    return np.rint(finite / step).astype(np.int16), step


def _embedded(kept: KeptScan, codes: np.ndarray, step: float = 1.0, low: float = 0.0) -> str:
    """A volume of codes, uint8 or int16, as the base64 of a packed NIfTI file: its values are ``low + step * code``."""
    dims = len(kept.shape)
    move = np.eye(4)
    move[range(dims), range(dims)] = kept.stride
    move[range(dims), 3] = kept.start
    header = nib.Nifti1Header()
    header.set_data_dtype(codes.dtype)
    header.set_data_shape(codes.shape)
    header.set_sform(kept.affine @ move, code=1)
    header.set_qform(kept.affine @ move, code=1, strip_shears=True)
    header.set_xyzt_units("mm")
    header["scl_slope"], header["scl_inter"] = step, low
    header["vox_offset"], header["magic"] = _OFFSET, b"n+1"
    voxels = header.binaryblock + bytes(_OFFSET - len(header.binaryblock)) + codes.tobytes(order="F")
    return base64.b64encode(gzip.compress(voxels, 6, mtime=0)).decode()


def _png(pixels: np.ndarray) -> bytes:
    """Pixels ``(rows, columns, 3)`` in uint8 as a PNG file: a report needs no package for pictures."""
    rows, columns = pixels.shape[:2]
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], axis=1)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


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


def _thumbnail(kept: KeptScan, gray: np.ndarray, layer: Layer, scale: float) -> np.ndarray:
    """The plane through the focus, ``(rows, columns, 3)``: axial, from the feet's side up, or the 2D image."""
    parts = [gray, layer.values, layer.coloured]
    sizes = np.linalg.norm(kept.affine[:3, : len(kept.shape)], axis=0) * kept.stride
    if len(kept.shape) == 3:
        turn = nib.io_orientation(kept.affine)
        axis = int(np.flatnonzero(turn[:, 0] == 2)[0])
        place = slice(layer.focus[axis], layer.focus[axis] + 1)
        cut = tuple(place if other == axis else slice(None) for other in range(3))
        parts = [nib.apply_orientation(part[cut], turn)[:, :, 0] for part in parts]
        sizes = np.array([sizes[np.flatnonzero(turn[:, 0] == axis)[0]] for axis in (0, 1)])
    # Columns to the right, rows down.
    parts = [np.swapaxes(part, 0, 1)[:: 1 if kept.rows_down else -1] for part in parts]
    rows, columns = parts[0].shape[:2]
    width = max(1, min(2 * _THUMBNAIL, round(_THUMBNAIL * columns * sizes[0] / (rows * sizes[1]))))
    row = np.minimum(np.arange(_THUMBNAIL) * rows // _THUMBNAIL, rows - 1)
    column = np.minimum(np.arange(width) * columns // width, columns - 1)
    scan, values, coloured = (part[row][:, column] for part in parts)
    return blended(scan, values, coloured, scale)
