"""The scan of a case as its report shows it, which a run keeps in ``views/``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.files import atomic_path
from monai_saliency.visualize.legend import Legend, finite

# The fields that are kept as text, next to the legends; the others are arrays.
_WORDS = ("case", "key", "step", "low", "shape", "start", "stride", "rows_down", "class_names")
# Voxels of all that a case's page holds: the scan, its maps and their standard errors.
_VALUES = 8_000_000
_VOXELS = (500_000, 2_000_000)
# Number of different values, in the range of almost all voxels.
_LEVELS = 1000
_INT16 = 2**15 - 1


@dataclass(frozen=True)
class KeptScan:
    """The scan of a case as a report shows it, kept in ``views/`` below the output folder: at most two million voxels
    and about a thousand values. Where voxels are left out, the others keep their values and places.

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
        return _part(self.start, self.stride)

    @property
    def values(self) -> np.ndarray:
        """The scan's values, in its file's unit, float64."""
        return self.low + self.step * self.codes.astype(np.float64)

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
        stride = _stride(shape, affine, volumes=(layers or len(maps)) + 1)
        # The first map's peak is among the voxels.
        peak = peak_voxel(finite(maps[0]))
        start = tuple(np.remainder(peak, stride).tolist())
        part = _part(start, stride)
        codes, step, low = _codes(scan[part], is_colour=scan.ndim > len(shape))
        return cls(
            case,
            key,
            codes,
            step,
            low,
            affine,
            shape,
            start,
            stride,
            legends=[*legends],
            label=None if label is None else _label_codes(label[part]),
            rows_down=rows_down,
            class_names=class_names or {},
        )

    def save(self, folder: str | Path) -> None:
        """Write it below an output folder; OutputError when the file cannot be written."""
        words = {name: getattr(self, name) for name in _WORDS}
        words["legends"] = [asdict(legend) for legend in self.legends]
        text = np.frombuffer(json.dumps(words).encode(), np.uint8)
        arrays = {"codes": self.codes, "affine": self.affine, "words": text}
        if self.label is not None:
            arrays["label"] = self.label
        with atomic_path(kept_path(folder, self.case), durable=False) as temporary:
            np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> KeptScan:
        """Read a file that :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        words = json.loads(arrays.pop("words").tobytes())
        for name in ("shape", "start", "stride"):
            words[name] = tuple(words[name])
        words["legends"] = [Legend(**legend) for legend in words["legends"]]
        return cls(**arrays, **words)


def case_id(case: str) -> str:
    """The name of a case's files in a report: readable, safe in a path, and different for each case."""
    digest = hashlib.sha256(case.encode(errors="surrogateescape")).hexdigest()
    readable = re.sub("[^A-Za-z0-9_]+", "-", case)[-60:]
    return f"{readable.strip('-')}-{digest[:8]}".lstrip("-")


def kept_path(folder: str | Path, case: str) -> Path:
    """The file of a case's :class:`KeptScan` below an output folder."""
    return Path(folder) / "views" / f"{case_id(case)}.npz"


def _part(start: Sequence[int], stride: Sequence[int]) -> tuple[slice, ...]:
    """The voxels from ``start`` on, one every ``stride`` of each axis."""
    return tuple(slice(first, None, step) for first, step in zip(start, stride, strict=True))


def _stride(shape: tuple[int, ...], affine: np.ndarray, volumes: int) -> tuple[int, ...]:
    """The step between the shown voxels of each axis, so that a page with this number of volumes stays small."""
    most = np.clip(_VALUES // volumes, *_VOXELS)
    spacing = np.linalg.norm(affine[:3, : len(shape)], axis=0)
    stride = np.ones(len(shape), int)
    while np.prod(np.ceil(shape / stride)) > most:
        stride[np.argmin(spacing * stride)] += 1
    return tuple(stride.tolist())


def _codes(scan: np.ndarray, is_colour: bool) -> tuple[np.ndarray, float, float]:
    """A scan as whole numbers: the codes, the step between them, and the value of code 0."""
    voxels = scan.astype(np.float64)
    finite = voxels[np.isfinite(voxels)]
    if not finite.size:
        finite = np.zeros(1)
    low, usual, most, high = np.percentile(finite, [0, 0.1, 99.9, 100]).tolist()
    voxels = np.nan_to_num(voxels, nan=low, posinf=high, neginf=low)
    if is_colour and low >= 0 and high <= 255:
        low, step = 0.0, 1.0
    elif is_colour:
        step = (high - low) / 255
    else:
        step = max((most - usual) / _LEVELS, (high - low) / _INT16) or 1.0
        if np.array_equal(voxels, np.rint(voxels)):
            step = max(float(np.ceil(step)), 1.0)
    codes = np.rint((voxels - low) / step)
    return codes.astype(np.uint8 if is_colour else np.int16), step, low


def _label_codes(label: np.ndarray) -> np.ndarray | None:
    """A label map in uint8: its numbers up to 255, or else where it is not 0; None where it is empty."""
    label = np.nan_to_num(label)
    if not label.any():
        return None
    has_numbers = label.max() <= 255 and label.min() >= 0
    return (label if has_numbers else label != 0).astype(np.uint8)
