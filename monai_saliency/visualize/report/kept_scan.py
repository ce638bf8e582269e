"""The part of a scan that a report shows, kept in ``views/`` below the output folder with its label.

It is the part with the head or body, in at most two million voxels and in about a thousand values. Where voxels are
left out, the others keep their values and places.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.files import atomic_path
from monai_saliency.visualize.legend import Legend

__all__ = ["KeptScan", "case_id", "kept_path"]

# The fields that are kept as text; the others are arrays and legends.
_WORDS = ("case", "key", "step", "low", "shape", "start", "stride", "rows_down")
# Voxels of all that a case's page holds: the scan, its maps and their standard errors.
_VALUES = 8_000_000
_VOXELS = (500_000, 2_000_000)
# Values that are told apart, in the range where almost all are.
_LEVELS = 1000
_INT16 = 2**15 - 1
# Of this range is what is head or body, and so is a plane with this share of such voxels.
_BODY, _IN_PLANE, _MARGIN = 0.1, 0.002, 3


@dataclass(frozen=True)
class KeptScan:
    """The scan of a case as a report shows it.

    A voxel's value is ``low + step * code``; codes are int16 ``(*spatial)``, or uint8 ``(*spatial, 3)`` in colours.
    ``start`` and ``stride`` are the kept voxels of each axis of the maps, which have ``shape`` and ``affine``, and file
    names that end in ``key``. ``rows_down``: the second axis of a 2D image counts downwards.
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

    @property
    def part(self) -> tuple[slice, ...]:
        """The voxels of a map that are shown."""
        sizes = self.codes.shape[: len(self.shape)]
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
    ) -> KeptScan:
        """Keep the shown part of a scan ``(*spatial)``, or ``(*spatial, 3)`` in colours, with maps ``(K, *spatial)``.

        ``layers`` is how many volumes the page holds in addition to the scan; K by default.
        """
        shape = maps.shape[1:]
        low, high = _range(scan)
        box = [(0, n) for n in shape]
        if len(shape) == 3:
            floors = [legend.least for legend in legends] or [math.inf] * len(maps)
            coloured = np.any([np.abs(each) >= floor for each, floor in zip(maps, floors, strict=True)], axis=0)
            box = _box(scan > low + _BODY * (high - low), coloured)
        count = (len(maps) if layers is None else layers) + 1
        budget = min(max(_VALUES // count, _VOXELS[0]), _VOXELS[1])
        finite = np.nan_to_num(maps[0], posinf=0, neginf=0)
        start, stride = _lattice(box, peak_voxel(finite), np.linalg.norm(affine[:3, : len(shape)], axis=0), budget)
        part = tuple(slice(a, b, s) for a, s, (_, b) in zip(start, stride, box, strict=True))
        step, zero, codes = _codes(scan[part], high - low, colours=scan.ndim > len(shape))
        places = np.asarray(affine, np.float64), shape, start, stride
        kept = None if label is None else _label_codes(np.asarray(label)[part])
        return cls(case, key, codes, step, zero, *places, [*legends], kept, rows_down)

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
        """Read a file that :meth:`save` wrote; ValueError when it is not such a file."""
        try:
            with np.load(path, allow_pickle=False) as found:
                words = json.loads(found["words"].tobytes())
                codes, affine = found["codes"], found["affine"]
                label = found.get("label")
            for name in ("shape", "start", "stride"):
                words[name] = tuple(map(int, words[name]))
            words["legends"] = [Legend(**each) for each in words["legends"]]
            return cls(codes=codes, affine=affine, label=label, **words)
        except Exception as error:
            raise ValueError(f"{path} is not a scan that was kept for a report: {error}") from error


def case_id(case: str) -> str:
    """The name of a case's files in a report: readable, safe in a path, and different for each case."""
    number = hashlib.sha256(case.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_]+', '-', case)[-60:].strip('-')}-{number}".lstrip("-")


def kept_path(folder: str | Path, case: str) -> Path:
    """The file of a case's :class:`KeptScan` below an output folder."""
    return Path(folder) / "views" / f"{case_id(case)}.npz"


def _range(scan: np.ndarray) -> tuple[float, float]:
    """Where almost all of a scan's finite values lie."""
    sample = scan[tuple(slice(None, None, max(1, n // 128)) for n in scan.shape)]
    sample = sample[np.isfinite(sample)]
    low, high = np.percentile(sample, [0.1, 99.9]) if sample.size else (0.0, 0.0)
    return float(low), float(high)


def _box(body: np.ndarray, coloured: np.ndarray) -> list[tuple[int, int]]:
    """The box of two masks ``(*spatial)`` without specks of the first; all of the image where the first is empty."""
    if not body.any():
        return [(0, size) for size in body.shape]
    found = []
    for axis, size in enumerate(body.shape):
        others = tuple(other for other in range(body.ndim) if other != axis)
        in_plane = body.sum(axis=others) > _IN_PLANE * body.size / size
        in_plane |= coloured.any(axis=others)
        planes = np.flatnonzero(in_plane)
        found.append((max(planes[0] - _MARGIN, 0), min(planes[-1] + 1 + _MARGIN, size)) if planes.size else (0, size))
    return [(int(a), int(b)) for a, b in found]


def _lattice(
    box: Sequence[tuple[int, int]], peak: Sequence[int], spacing: np.ndarray, budget: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first voxel and the stride of each axis, so that at most ``budget`` voxels are kept, the peak among them."""
    stride = [1] * len(box)

    def count() -> int:
        return math.prod(math.ceil((b - a) / s) for (a, b), s in zip(box, stride, strict=True))

    while count() > budget:
        stride[int(np.argmin(spacing * stride))] += 1
    start = [a + (p - a) % s for (a, _), p, s in zip(box, peak, stride, strict=True)]
    return tuple(start), tuple(stride)


def _label_codes(label: np.ndarray) -> np.ndarray | None:
    found = np.nan_to_num(label)
    has_numbers = found.max(initial=0) <= 255 and found.min(initial=0) >= 0
    return (found if has_numbers else found != 0).astype(np.uint8) if found.any() else None


def _codes(scan: np.ndarray, width: float, colours: bool) -> tuple[float, float, np.ndarray]:
    """A scan as whole numbers: the step between them, the value of code 0, and the codes."""
    finite = scan[np.isfinite(scan)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    filled = np.nan_to_num(scan.astype(np.float64), nan=low, posinf=low, neginf=low)
    if colours:
        low, step = (0.0, 1.0) if low >= 0 and high <= 255 else (low, (high - low) / 255)
        return step, low, np.rint((filled - low) / step).astype(np.uint8)
    step = max(width / _LEVELS, (high - low) / _INT16) or 1.0
    if np.array_equal(filled, np.rint(filled)):
        step = max(float(np.rint(step)), np.ceil((high - low) / _INT16), 1.0)
    return step, low, np.rint((filled - low) / step).astype(np.int16)
