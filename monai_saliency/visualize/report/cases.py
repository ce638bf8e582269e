"""What an output folder holds of each case: its rows, its maps, and the scan that was kept for the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.storage.files import error_key
from monai_saliency.storage.scans import load_scan
from monai_saliency.storage.tables import LABEL_REGION_COLUMNS, REGION_COLUMNS, SUMMARY_COLUMNS, CaseTable, Failures
from monai_saliency.visualize.legend import Legend
from monai_saliency.visualize.report.kept_scan import KeptScan, case_id, kept_path

logger = logging.getLogger(__name__)

Row = Mapping[str, str]
#: units of scores that are in [-1, 1]
_OF_ONE = {"probability", "0 to 1", "-1 to 1"}


class MapFile:
    """A file of ``count`` maps ``(*shape)``, whose voxels are read when they are needed."""

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        self._image = load_scan(path)
        whole: tuple[int, ...] = self._image.shape
        self.shape = whole[:-1] if count > 1 else whole
        self.affine = np.asarray(self._image.affine, np.float64)
        has_all = count == 1 or whole[-1] == count
        if not has_all or len(self.shape) not in (2, 3):
            raise ValueError(f"{path} has shape {whole}, where summary.csv has {count} maps of 2D or 3D images")

    def read(self, part: tuple[slice, ...] = ()) -> np.ndarray:
        """The maps ``(count, *spatial)``, float32, or a part of each."""
        place = (*part, ...)
        voxels = np.asarray(self._image.dataobj[place], dtype=np.float32)
        if self.count == 1:
            return voxels[None]
        return np.moveaxis(voxels, -1, 0)


@dataclass(frozen=True)
class CaseFiles:
    """The files and rows of one case."""

    case: str
    rows: Sequence[Row]
    failure: Row | None
    nothing: str  # why there is nothing to explain; empty where there is
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
        path = self.folder / f"{self.case}_{key}.nii.gz"
        error_path = self.folder / f"{self.case}_{error_key(key)}.nii.gz"
        if not path.is_file():
            raise ValueError("its map is not in the folder any more")
        maps = MapFile(path, len(self.rows))
        if not error_path.is_file():
            return maps, None
        errors = MapFile(error_path, len(self.rows))
        return maps, errors if errors.shape == maps.shape else None

    @property
    def legends(self) -> list[Legend]:
        """The legend of each of its maps; none where no scan was kept."""
        return [] if self.kept is None else self.kept.legends


@dataclass(frozen=True)
class Cohort:
    """The cases of an output folder, from ``summary.csv``, ``failures.csv`` and ``nothing_to_explain.csv``, sorted by
    name. ``settings`` are those of each mark in the table, from ``summary.settings.json``.
    """

    cases: Sequence[CaseFiles]
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def scales(self) -> dict[str, float]:
        """The largest value of the colours, by what the values are: one for the whole cohort."""
        scales: dict[str, float] = {}
        for case in self.cases:
            for legend in case.legends:
                scales[legend.words] = max(scales.get(legend.words, 0.0), legend.scale)
        return scales


def read_cohort(folder: str | Path) -> Cohort:
    """Find the cases in the output folder of a run; a ValueError if it has none."""
    folder = Path(folder)
    summary = _table(folder / "summary.csv", SUMMARY_COLUMNS)
    failures = _table(folder / "failures.csv", Failures.COLUMNS)
    nothing = _table(folder / Failures.NOTHING_FILE, Failures.NOTHING_COLUMNS)
    regions = _table(folder / "regions.csv", REGION_COLUMNS)
    label_regions = _table(folder / "label_regions.csv", LABEL_REGION_COLUMNS)
    if not (summary or failures or nothing):
        raise ValueError(
            f"{folder} holds neither a summary.csv nor a failures.csv with cases: give the output folder of a run"
        )
    cases = []
    for case in sorted({*summary, *failures, *nothing}):
        kept = _kept(folder, case)
        rows = [_shown_row(row, kept) for row in summary.get(case, ())]
        failure = failures[case][-1] if case in failures else None
        reason = nothing[case][-1]["reason"] if case in nothing else ""
        of_regions = [_shown_row(row, kept) for row in regions.get(case, ())]
        of_labels = [_shown_row(row, kept) for row in label_regions.get(case, ())]
        cases.append(CaseFiles(case, rows, failure, reason, of_regions, of_labels, folder, kept))
    return Cohort(cases, _settings(folder / "summary.settings.json"))


def _table(path: Path, columns: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of a table by their case."""
    by_case: dict[str, list[Row]] = {}
    for row in CaseTable(path, columns=columns).read():
        by_case.setdefault(row["case"], []).append(row)
    return by_case


def _settings(path: Path) -> dict[str, dict[str, str]]:
    """The settings by mark, with what is known of the last run that had them."""
    try:
        marks = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    runs = marks.pop("runs", {})
    return {mark: settings | runs.get(mark, {}) for mark, settings in marks.items()}


def _kept(folder: Path, case: str) -> KeptScan | None:
    """The scan that was kept of a case; None if none was."""
    path = kept_path(folder, case)
    try:
        return KeptScan.load(path) if path.is_file() else None
    except Exception as error:
        logger.warning("case %s: %s is not a scan that was kept for a report: %s", case, path, error)
        return None


def _shown_row(row: Row, kept: KeptScan | None) -> Row:
    """A row with the names of its class and its prediction. The peak of a 2D image has no height."""
    if kept is None:
        return row
    names, predicted = kept.class_names, row.get("prediction", "")
    shown = {**row, "class_name": names.get(row.get("class", ""), "")}
    shown["prediction"] = names.get(predicted, predicted)
    if len(kept.shape) == 2:
        shown["peak_z_mm"] = ""
    return shown


def class_words(row: Row) -> str:
    """The class and channel of a row's map, such as ``"lesion (class 1)"``, or ``"class 1"`` without a name."""
    text = row.get("class", "")
    words = f"class {text}" if text.isdecimal() else text or "map"
    if row.get("class_name"):
        words = f"{row['class_name']} ({words})"
    return f"{words}, channel {row['channel']}" if row.get("channel") else words


def beyond(row: Row) -> bool:
    """Whether a map has values above the range of its score, such as 1.3 for a probability."""
    if row.get("unit") not in _OF_ONE:
        return False
    values = [float(row.get(column) or 0) for column in ("peak_saliency", "lowest_saliency")]
    return max(map(abs, values)) > 1 + 1e-6


def number(text: Any, digits: int = 3) -> str:
    """A number from a table in a few digits, such as ``"0.974"`` for ``"0.97354239"``; other text as it is."""
    try:
        value = float(text) + 0.0  # no minus before zero
    except ValueError:
        return str(text)
    if abs(value) >= 10**digits and abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
