"""What the page of a case shows: its scan, maps, standard errors and label as volumes, and small pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.visualize.colours import COLD, WARM, blended
from monai_saliency.visualize.legend import TIMES_ERROR, Legend, rounded_up
from monai_saliency.visualize.report.cases import CaseFiles, MapFile, class_words
from monai_saliency.visualize.report.kept_scan import KeptScan
from monai_saliency.visualize.report.volumes import embedded, encoded, png

__all__ = ["Layer", "Shown", "laid_out", "show"]

_THUMBNAIL = 112  # rows of pixels
_MOST_THUMBNAILS = 12
#: below this a CT has air, above that bone
_AIR, _BONE = -900, 200


@dataclass(frozen=True)
class Shown:
    """What is shown of a case.

    Attributes:
        data: for the page's script, see ``assets/case.js``.
        thumbnails: PNG files, one for each of the first maps.
    """

    data: dict[str, Any]
    thumbnails: list[bytes]


def show(case: CaseFiles, scales: Mapping[str, float]) -> Shown:
    """What is shown of a case.

    Args:
        case: a case with maps.
        scales: the largest value of the colours, by what the values are.

    Raises:
        ValueError: when its maps cannot be read.
    """
    if case.map_file is None:
        raise ValueError("its map is not in the folder any more")
    count = len(case.rows)
    file = MapFile.open(case.map_file, count)
    beside = None if case.error_file is None else MapFile.open(case.error_file, count)
    if beside is not None and beside.shape != file.shape:
        beside = None
    legends = case.legends(count)
    kept = case.kept
    has_scan = kept is not None and kept.lies_on(file.shape, file.affine)
    if kept is None or not has_scan:
        layers, nothing = count * (1 if beside is None else 2), np.zeros(file.shape, np.float32)
        kept = KeptScan.of(case.case, nothing, file.read(), file.affine, legends, layers=layers)
    maps = file.read(kept.part)
    errors = [None] * count if beside is None else beside.read(kept.part)
    shown = [Layer.of(*each) for each in zip(maps, errors, legends, strict=True)]
    return laid_out(case.case, kept, has_scan, [*zip(map(class_words, case.rows), shown, strict=True)], scales)


def laid_out(
    case: str, kept: KeptScan, has_scan: bool, layers: Sequence[tuple[str, Layer]], scales: Mapping[str, float]
) -> Shown:
    """What is shown of some maps over one scan.

    Args:
        case: the name of the case.
        kept: the scan, and which voxels are shown.
        has_scan: whether ``kept`` holds a scan; else only the places of the voxels.
        layers: for each map its name and its shown voxels.
        scales: the largest value of the colours, by what the values are.
    """
    data = _place(kept) | {
        "case": case,
        "scan": embedded(kept.codes, _lattice_affine(kept), kept.step, kept.low) if has_scan else None,
        "window": list(_window(kept.values)) if has_scan else [0, 1],
        "gray": has_scan and kept.codes.ndim == len(kept.shape),
        "hounsfield": has_scan and _is_ct(kept),
        "label": None if kept.label is None else embedded(kept.label, _lattice_affine(kept)),
        "maps": [layer.data(kept, scales.get(layer.legend.words, layer.legend.scale), name) for name, layer in layers],
        "colours": {"cold": COLD, "warm": WARM},
    }
    thumbnails = [
        png(_thumbnail(kept, layer, scales.get(layer.legend.words, layer.legend.scale), has_scan))
        for _, layer in layers[:_MOST_THUMBNAILS]
    ]
    return Shown(data, thumbnails)


@dataclass(frozen=True)
class Layer:
    """One map in the voxels that are shown.

    Attributes:
        values: the map ``(*spatial)``.
        error: its standard error, of the same shape; None where there is none.
        coloured: which voxels are coloured, of the same shape.
        focus: the voxel that is looked at first: the peak, or where that is not coloured the strongest that is,
            or where nothing is the middle.
        legend: what its colours mean.
    """

    values: np.ndarray
    error: np.ndarray | None
    coloured: np.ndarray
    focus: tuple[int, ...]
    legend: Legend

    @classmethod
    def of(cls, saliency: np.ndarray, error: np.ndarray | None, legend: Legend) -> Layer:
        values = np.nan_to_num(saliency, posinf=0, neginf=0)
        part = None if error is None else np.nan_to_num(error, posinf=0, neginf=0)
        size = np.abs(values)
        coloured = (size >= legend.floor(part is not None)) & (size > 0)
        if part is not None:
            coloured &= size >= TIMES_ERROR * part
        focus = peak_voxel(values)
        if coloured.any() and not coloured[focus]:
            focus = peak_voxel(np.where(coloured, size, 0))
        if not coloured.any():
            focus = tuple(count // 2 for count in size.shape)
        return cls(values, part, coloured, focus, legend)

    def data(self, kept: KeptScan, scale: float, name: str) -> dict[str, Any]:
        """What the page's script reads of it."""
        affine, legend = _lattice_affine(kept), self.legend
        has_error = self.error is not None
        return {
            "name": name,
            "words": legend.words,
            "volume": embedded(*_with(encoded(self.values), affine)),
            "error": embedded(*_with(encoded(self.error), affine)) if self.error is not None else None,
            "scale": scale,
            "own": rounded_up(float(np.abs(self.values).max(initial=0))),
            "ownError": rounded_up(float(self.error.max(initial=0))) if self.error is not None else 1,
            "floor": min(legend.floor(has_error), scale),
            "signed": legend.signed,
            "focus": list(self.focus),
        }


def _with(codes: tuple[np.ndarray, float], affine: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    return codes[0], affine, codes[1]


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


def _lattice_affine(kept: KeptScan) -> np.ndarray:
    """The affine ``(4, 4)`` of the shown voxels."""
    dims = len(kept.shape)
    move = np.eye(4)
    move[range(dims), range(dims)] = kept.stride
    move[range(dims), 3] = kept.start
    return kept.affine @ move


def _window(values: np.ndarray) -> tuple[float, float]:
    """The values that are black and white at first, as in the pictures."""
    low, high = np.percentile(values, [0.5, 99.9])
    return float(low), float(max(high, low + 1e-6))


def _is_ct(kept: KeptScan) -> bool:
    """Whether the values are those of a CT: from air to bone, in whole numbers."""
    values = kept.values
    is_wide = values.min() <= _AIR and np.percentile(values, 99.9) >= _BONE
    return bool(len(kept.shape) == 3 and kept.step >= 1 and is_wide)


def _thumbnail(kept: KeptScan, layer: Layer, scale: float, has_scan: bool) -> np.ndarray:
    """The plane through the focus, ``(rows, columns, 3)``: axial, from the feet's side up, or the 2D image."""
    low, high = _window(kept.values) if has_scan else (0.0, 1.0)
    parts: list[np.ndarray] = [(kept.values - low) / (high - low), layer.values, layer.coloured]
    sizes = np.linalg.norm(kept.affine[:3, : len(kept.shape)], axis=0) * kept.stride
    if len(kept.shape) == 3:
        turn = nib.io_orientation(kept.affine)
        parts = [nib.apply_orientation(part, turn).take(_turned(layer.focus, turn, part.shape)[2], 2) for part in parts]
        sizes = np.array([sizes[np.flatnonzero(turn[:, 0] == axis)[0]] for axis in (0, 1)])
    # Columns to the right, rows down.
    parts = [np.swapaxes(part, 0, 1)[:: 1 if kept.rows_down else -1] for part in parts]
    rows, columns = parts[0].shape[:2]
    height = _THUMBNAIL
    width = max(1, min(2 * height, round(height * columns * sizes[0] / (rows * sizes[1]))))
    row = np.minimum(np.arange(height) * rows // height, rows - 1)
    column = np.minimum(np.arange(width) * columns // width, columns - 1)
    scan, values, coloured = (part[row][:, column] for part in parts)
    return blended(scan, values, coloured, scale)


def _turned(voxel: tuple[int, ...], turn: np.ndarray, shape: tuple[int, ...]) -> list[int]:
    """A voxel's place once axes are reordered and turned."""
    found = [0] * len(voxel)
    for axis, (to, direction) in enumerate(turn):
        found[int(to)] = voxel[axis] if direction > 0 else shape[axis] - 1 - voxel[axis]
    return found
