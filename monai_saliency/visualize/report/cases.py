"""What an output folder holds of each case: its rows, its maps, and the scan that a run keeps for the report."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.files import atomic_path
from monai_saliency.storage.scans import load_scan
from monai_saliency.storage.tables import LABEL_REGION_COLUMNS, REGION_COLUMNS, SUMMARY_COLUMNS, CaseTable, Failures
from monai_saliency.visualize.legend import Legend, rounded_up

__all__ = ["CaseFiles", "Cohort", "KeptScan", "MapFile", "Row", "beyond", "case_id", "class_words", "kept_path"]
__all__ += ["number", "read_cohort"]

logger = logging.getLogger(__name__)

Row = Mapping[str, str]
#: units of scores that are in [-1, 1]
_OF_ONE = {"probability", "0 to 1", "-1 to 1"}

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
        return tuple(slice(a, None, s) for a, s in zip(self.start, self.stride, strict=True))

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


# Cases. ---------------------------------------------------------------------------------------------------------------


class MapFile:
    """A file of ``count`` maps ``(*shape)``, whose voxels are read when they are needed."""

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        self._image = load_scan(path)
        whole = self._image.shape
        self.shape: tuple[int, ...] = whole[:-1] if count > 1 else whole
        self.affine = np.asarray(self._image.affine, np.float64)
        if len(self.shape) not in (2, 3) or (count > 1 and whole[-1] != count):
            raise ValueError(f"{path} has shape {whole}, where summary.csv has {count} maps of 2D or 3D images")

    def read(self, part: tuple[slice, ...] = ()) -> np.ndarray:
        """The maps ``(count, *spatial)``, float32, or a part of each."""
        place = (*part, ...)
        found = np.asarray(self._image.dataobj[place], dtype=np.float32)
        return np.moveaxis(found, -1, 0) if self.count > 1 else found[None]


@dataclass(frozen=True)
class CaseFiles:
    """The files and rows of one case."""

    case: str
    rows: Sequence[Row]
    failure: Row | None
    regions: Sequence[Row]
    label_regions: Sequence[Row]
    folder: Path
    kept: KeptScan | None = None

    @property
    def id(self) -> str:
        """The name of its pages and pictures."""
        return case_id(self.case)

    def open_maps(self) -> tuple[MapFile, MapFile | None]:
        """The files of its maps and of their standard errors on the same grid."""
        key = "saliency" if self.kept is None else self.kept.key
        error = "standard_error" if key == "saliency" else f"{key}_standard_error"
        path, error_path = (self.folder / f"{self.case}_{ending}.nii.gz" for ending in (key, error))
        if not path.is_file():
            raise ValueError("its map is not in the folder any more")
        maps = MapFile(path, len(self.rows))
        errors = MapFile(error_path, len(self.rows)) if error_path.is_file() else None
        return maps, errors if errors is not None and errors.shape == maps.shape else None

    def legends(self) -> list[Legend]:
        """The legend of each of its maps."""
        if self.kept is not None and len(self.kept.legends) == len(self.rows):
            return self.kept.legends
        return [_legend(row) for row in self.rows]


@dataclass(frozen=True)
class Cohort:
    """The cases of an output folder, from ``summary.csv`` and ``failures.csv``, sorted by name. ``settings`` are those
    of each mark in the table, from ``summary.settings.json``.
    """

    cases: Sequence[CaseFiles]
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def scales(self) -> dict[str, float]:
        """The largest value of the colours, by what the values are: one for the whole cohort."""
        found: dict[str, float] = {}
        for case in self.cases:
            for legend in case.legends():
                found[legend.words] = max(found.get(legend.words, 0.0), legend.scale)
        return found


def read_cohort(folder: str | Path) -> Cohort:
    """Find the cases in the output folder of a run; a ValueError if it has none."""
    folder = Path(folder)
    summary = _table(folder / "summary.csv", SUMMARY_COLUMNS)
    failures = _table(folder / "failures.csv", Failures.COLUMNS)
    regions = _table(folder / "regions.csv", REGION_COLUMNS)
    means = _table(folder / "label_regions.csv", LABEL_REGION_COLUMNS)
    if not summary and not failures:
        raise ValueError(
            f"{folder} holds neither a summary.csv nor a failures.csv with cases: give the output folder of a run"
        )
    cases = []
    for name in sorted({*summary, *failures}):
        failure = failures[name][-1] if name in failures else None
        kept = _kept(folder, name)
        names = {} if kept is None else kept.class_names
        flat = {"peak_z_mm": ""} if kept is not None and len(kept.shape) == 2 else {}
        rows, of_regions, of_labels = (
            [_named(row, names) | flat for row in table.get(name, ())] for table in (summary, regions, means)
        )
        cases.append(CaseFiles(name, rows, failure, of_regions, of_labels, folder, kept))
    return Cohort(cases, _settings(folder / "summary.settings.json"))


def _settings(path: Path) -> dict[str, dict[str, str]]:
    """The settings by mark, with what is known of the last run that had them."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    runs = found.pop("runs", {})
    return {mark: settings | runs.get(mark, {}) for mark, settings in found.items()}


def _kept(folder: Path, case: str) -> KeptScan | None:
    """The scan that was kept of a case; None if none was."""
    path = kept_path(folder, case)
    try:
        return KeptScan.load(path) if path.is_file() else None
    except Exception as error:
        logger.warning("case %s: %s is not a scan that was kept for a report: %s", case, path, error)
        return None


def _named(row: Row, names: Mapping[str, str]) -> dict[str, str]:
    """A row with the names of its class and of its prediction."""
    predicted = row.get("prediction", "")
    known = {"class_name": names.get(row.get("class", ""), "")}
    return {**row, **known, "prediction": names.get(predicted, predicted)}


def class_words(row: Row) -> str:
    """The class and channel of a row's map, such as ``"lesion (class 1)"``, or ``"class 1"`` without a name."""
    text = row.get("class", "")
    words = f"class {text}" if text.isdecimal() else text or "map"
    words = f"{row['class_name']} ({words})" if row.get("class_name") else words
    return words + (f", channel {row['channel']}" if row.get("channel") else "")


def beyond(row: Row) -> bool:
    """Whether a map has values above the range of its score, such as 1.3 for a probability."""
    values = [abs(float(row[name])) for name in ("peak_saliency", "lowest_saliency") if row.get(name)]
    return row.get("unit") in _OF_ONE and max(values, default=0.0) > 1 + 1e-6


def number(text: Any, digits: int = 3) -> str:
    """A number from a table in a few digits, such as ``"0.974"`` for ``"0.97354239"``; other text as it is."""
    try:
        value = float(text) + 0.0  # no minus before zero
    except ValueError:
        return str(text)
    if abs(value) >= 10**digits and abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def _legend(row: Row) -> Legend:
    """The legend of a map by its row alone."""
    sizes = [abs(float(row[name])) for name in ("peak_saliency", "lowest_saliency") if row.get(name)]
    scale = 1.0 if row.get("unit") in _OF_ONE else rounded_up(max(sizes, default=0.0))
    words = f"saliency ({row['quantity']})" if row.get("quantity") else Legend.words
    return Legend(scale, None, words, noise=float(row.get("noise") or 0))


def _table(path: Path, columns: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of a table by their case."""
    found: dict[str, list[Row]] = {}
    for row in CaseTable(path, columns=columns).read():
        found.setdefault(row["case"], []).append(row)
    return found
