"""The scan that a report shows, kept in ``views/`` below the output folder: at most two million voxels and about a
thousand values. Where voxels are left out, the others keep their values and places.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.files import atomic_path
from monai_saliency.visualize.legend import Legend

__all__ = ["KeptScan", "case_id", "kept_path"]

# The fields that are kept as text; the others are arrays and legends.
_WORDS = ("case", "key", "step", "low", "shape", "start", "stride", "rows_down", "class_names")
# Voxels of all that a case's page holds: the scan, its maps and their standard errors.
_VALUES = 8_000_000
_VOXELS = (500_000, 2_000_000)
# Number of different values, in the range of almost all voxels.
_LEVELS = 1000
_INT16 = 2**15 - 1


@dataclass(frozen=True)
class KeptScan:
    """The scan of a case as a report shows it.

    A voxel's value is ``low + step * code``; codes are int16 ``(*spatial)``, or uint8 ``(*spatial, 3)`` in colours.
    ``start`` and ``stride`` are the kept voxels of each axis of the maps, which have ``shape`` and ``affine``, and file
    names that end in ``key``. ``rows_down``: the second axis of a 2D image counts downwards. ``class_names``: by
    class.
    """

    case: str
    key: str
    codes: np.ndarray
    step: float
    low: float
    affine: np.ndarray
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stride: tuple[int, ...]
    legends: list[Legend] = field(default_factory=list)
    label: np.ndarray | None = None
    rows_down: bool = False
    class_names: dict[str, str] = field(default_factory=dict)

    @property
    def part(self) -> tuple[slice, ...]:
        """The voxels of a map that are shown."""
        sizes = self.codes.shape[: len(self.shape)]  # earlier versions kept a box of the scan
        return tuple(slice(a, a + n * s, s) for a, s, n in zip(self.start, self.stride, sizes, strict=True))

    @property
    def values(self) -> np.ndarray:
        """The scan's values, in its file's unit, float64."""
        return self.low + self.step * self.codes.astype(np.float64)

    def lies_on(self, shape: tuple[int, ...], affine: np.ndarray) -> bool:
        """Whether maps of a shape ``(*spatial)`` and affine ``(4, 4)`` are of this scan."""
        return self.shape == shape and np.allclose(self.affine, affine, rtol=1e-4, atol=1e-3)

    @classmethod
    def of(
        cls,
        case: str,
        scan: np.ndarray,
        maps: np.ndarray,
        affine: np.ndarray,
        legends: Sequence[Legend],
        label: np.ndarray | None = None,
        *,
        key: str = "saliency",
        layers: int | None = None,
        rows_down: bool = False,
        class_names: dict[str, str] | None = None,
    ) -> KeptScan:
        """Keep the shown part of a scan ``(*spatial[, 3])`` with maps ``(K, *spatial)``; a page has ``layers`` more."""
        shape = maps.shape[1:]
        affine = np.asarray(affine, np.float64)
        budget = min(max(_VALUES // ((layers or len(maps)) + 1), _VOXELS[0]), _VOXELS[1])
        spacing, stride = np.linalg.norm(affine[:3, : len(shape)], axis=0), [1] * len(shape)
        while math.prod(math.ceil(n / s) for n, s in zip(shape, stride, strict=True)) > budget:
            stride[int(np.argmin(spacing * stride))] += 1
        # The first map's peak is among the voxels.
        peak = peak_voxel(np.nan_to_num(maps[0], posinf=0, neginf=0))
        start = tuple(p % s for p, s in zip(peak, stride, strict=True))
        part = tuple(slice(a, None, s) for a, s in zip(start, stride, strict=True))
        step, low, codes = _codes(scan[part], colours=scan.ndim > len(shape))
        kept = None if label is None else _label_codes(np.asarray(label)[part])
        more = [*legends], kept, rows_down, class_names or {}
        return cls(case, key, codes, step, low, affine, shape, start, tuple(stride), *more)

    def save(self, folder: str | Path) -> None:
        """Write it below an output folder; OutputError when the file cannot be written."""
        words = {name: getattr(self, name) for name in _WORDS}
        words["legends"] = [asdict(legend) for legend in self.legends]
        text = np.frombuffer(json.dumps(words).encode(), np.uint8)
        arrays = {"codes": self.codes, "affine": self.affine, "words": text}
        arrays |= {} if self.label is None else {"label": self.label}
        with atomic_path(kept_path(folder, self.case), durable=False) as temporary:
            np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> KeptScan:
        """Read a file that :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as found:
            words = json.loads(found["words"].tobytes())
            arrays: dict[str, Any] = {name: found.get(name) for name in ("codes", "affine", "label")}
        places: dict[str, Any] = {name: tuple(words.pop(name)) for name in ("shape", "start", "stride")}
        legends = [Legend(**each) for each in words.pop("legends")]
        return cls(legends=legends, **arrays, **places, **words)


def case_id(case: str) -> str:
    """The name of a case's files in a report: readable, safe in a path, and different for each case."""
    number = hashlib.sha256(case.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_]+', '-', case)[-60:].strip('-')}-{number}".lstrip("-")


def kept_path(folder: str | Path, case: str) -> Path:
    """The file of a case's :class:`KeptScan` below an output folder."""
    return Path(folder) / "views" / f"{case_id(case)}.npz"


def _label_codes(label: np.ndarray) -> np.ndarray | None:
    found = np.nan_to_num(label)
    has_numbers = found.max(initial=0) <= 255 and found.min(initial=0) >= 0
    return (found if has_numbers else found != 0).astype(np.uint8) if found.any() else None


def _codes(scan: np.ndarray, colours: bool) -> tuple[float, float, np.ndarray]:
    """A scan as whole numbers: the step between them, the value of code 0, and the codes."""
    finite = scan[np.isfinite(scan)].astype(np.float64)
    low, usual, most, high = np.percentile(finite, [0, 0.1, 99.9, 100]).tolist() if finite.size else (0.0,) * 4
    filled = np.nan_to_num(scan.astype(np.float64), nan=low, posinf=high, neginf=low)
    if colours:
        low, step = (0.0, 1.0) if low >= 0 and high <= 255 else (low, (high - low) / 255)
        return step, low, np.rint((filled - low) / step).astype(np.uint8)
    step = max((most - usual) / _LEVELS, (high - low) / _INT16) or 1.0
    if np.array_equal(filled, np.rint(filled)):
        step = max(float(np.ceil(step)), 1.0)
    return step, low, np.rint((filled - low) / step).astype(np.int16)
