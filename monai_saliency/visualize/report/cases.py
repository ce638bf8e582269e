"""What an output folder holds of each case, read from nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from nibabel.spatialimages import SpatialImage

from monai_saliency.storage.failures import Failures
from monai_saliency.storage.files import load_scan
from monai_saliency.storage.tables import REGION_COLUMNS, SUMMARY_COLUMNS, CaseTable
from monai_saliency.visualize.legend import Legend, rounded_up
from monai_saliency.visualize.report.kept_scan import KeptScan, case_id, kept_path

__all__ = ["CaseFiles", "Cohort", "MapFile", "Row", "class_words", "read_cohort"]

logger = logging.getLogger(__name__)

Row = Mapping[str, str]
#: units of scores that are in [-1, 1]
_OF_ONE = {"probability", "0 to 1", "-1 to 1"}
_VOXELS_AT_ONCE = 2**27


@dataclass(frozen=True)
class MapFile:
    """A file of maps, whose voxels are read when they are needed.

    Attributes:
        path: the file.
        image: what nibabel makes of it.
        count: how many maps it holds.
    """

    path: Path
    image: SpatialImage
    count: int

    @classmethod
    def open(cls, path: Path, count: int) -> MapFile:
        """Open a file.

        Raises:
            ValueError: when it holds another number of maps, or cannot be read.
        """
        try:
            image = load_scan(path)
        except Exception as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        shape = image.shape[:-1] if count > 1 else image.shape
        if len(shape) not in (2, 3) or (count > 1 and image.shape[-1] != count):
            raise ValueError(f"{path} has shape {image.shape}, where summary.csv has {count} maps of 2D or 3D images")
        return cls(path, image, count)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(*spatial)`` of a map."""
        return self.image.shape[:-1] if self.count > 1 else self.image.shape

    @property
    def affine(self) -> np.ndarray:
        """``(4, 4)``, from voxels to scanner mm."""
        return np.asarray(self.image.affine, np.float64)

    def read(self, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """The maps ``(count, *spatial)``, float32, or a part of each.

        Raises:
            ValueError: when they cannot be read.
        """
        part = part or tuple(slice(None) for _ in self.shape)
        try:
            # A part alone is read in twice the time, and many classes of a large CT do not fit into the memory.
            lazily = np.prod(self.image.shape) > _VOXELS_AT_ONCE
            voxels = self.image.dataobj if lazily else np.asanyarray(self.image.dataobj, dtype=np.float32)
            found = np.asarray(voxels[part if self.count == 1 else (*part, slice(None))], dtype=np.float32)
        except Exception as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from error
        return np.moveaxis(found, -1, 0) if self.count > 1 else found[None]


@dataclass(frozen=True)
class CaseFiles:
    """What there is of one case.

    Attributes:
        case: its name.
        rows: of ``summary.csv``, one for each map.
        failure: its row of ``failures.csv``; None where it has a map.
        regions: its rows of ``regions.csv``.
        kept_file: the scan that was kept for the report; None where there is none.
        map_file: its maps; None where there are none.
        error_file: their standard errors.
    """

    case: str
    rows: Sequence[Row] = ()
    failure: Row | None = None
    regions: Sequence[Row] = ()
    kept_file: Path | None = None
    map_file: Path | None = None
    error_file: Path | None = None

    @property
    def id(self) -> str:
        """What its files are called."""
        return case_id(self.case)

    @property
    def files(self) -> list[Path]:
        """All files that its page is made of."""
        return [file for file in (self.kept_file, self.map_file, self.error_file) if file is not None]

    @cached_property
    def kept(self) -> KeptScan | None:
        """The scan that was kept; None where there is none of these maps."""
        if self.kept_file is None:
            return None
        try:
            kept = KeptScan.load(self.kept_file)
        except ValueError as error:
            logger.warning("case %s: %s, so its page shows the maps alone", self.case, error)
            return None
        return kept if self.map_file is None or kept.case == self.case else None

    def legends(self, count: int) -> list[Legend]:
        """What the colours of some maps mean, one legend each."""
        if self.kept is not None and len(self.kept.legends) == count:
            return self.kept.legends
        found = []
        for number in range(count):
            row = self.rows[number] if number < len(self.rows) else {}
            sizes = [abs(float(row[name])) for name in ("peak_saliency", "lowest_saliency") if row.get(name)]
            is_known = row.get("unit") in _OF_ONE
            quantity = row.get("quantity")
            words = f"saliency ({quantity})" if quantity else Legend.words
            noise = float(row.get("noise") or 0)
            found.append(Legend(1.0 if is_known else rounded_up(max(sizes, default=0.0)), None, words, noise=noise))
        return found


@dataclass(frozen=True)
class Cohort:
    """What an output folder holds.

    Attributes:
        folder: the folder.
        cases: of ``summary.csv`` and ``failures.csv``, sorted by name.
    """

    folder: Path
    cases: Sequence[CaseFiles] = field(default_factory=list)

    @cached_property
    def scales(self) -> dict[str, float]:
        """The largest value of the colours, by what the values are: one for the whole cohort."""
        found: dict[str, float] = {}
        for case in self.cases:
            for legend in case.legends(len(case.rows)):
                found[legend.words] = max(found.get(legend.words, 0.0), legend.scale)
        return found


def read_cohort(folder: str | Path) -> Cohort:
    """Find what an output folder holds. What lies outside of it, also behind a link or ``..``, is not read.

    Args:
        folder: of a run of our bundle or of the overlay.

    Raises:
        ValueError: when it is not such a folder.
    """
    folder = Path(folder)
    summary = _table(folder, "summary.csv", SUMMARY_COLUMNS)
    failures = {row["case"]: row for row in _table(folder, "failures.csv", Failures.COLUMNS)}
    if not summary and not failures:
        raise ValueError(
            f"{folder} holds neither a summary.csv nor a failures.csv with cases: give the output folder of a run"
        )
    rows: dict[str, list[Row]] = {}
    for row in summary:
        rows.setdefault(row["case"], []).append(row)
    regions: dict[str, list[Row]] = {}
    for row in _table(folder, "regions.csv", REGION_COLUMNS):
        regions.setdefault(row["case"], []).append(row)
    cases = []
    for case in sorted({*rows, *failures}):
        if case not in rows:
            cases.append(CaseFiles(case, failure=failures[case]))
            continue
        kept = _inside(folder, kept_path(folder, case))
        found = CaseFiles(case, rows[case], failures.get(case), regions.get(case, ()), kept)
        key = "saliency" if found.kept is None else found.kept.key
        error = "standard_error" if key == "saliency" else f"{key}_standard_error"
        maps, errors = (_inside(folder, folder / f"{case}_{name}.nii.gz") for name in (key, error))
        cases.append(CaseFiles(case, rows[case], failures.get(case), regions.get(case, ()), kept, maps, errors))
    return Cohort(folder, cases)


def class_words(row: Row) -> str:
    """What a row's map is of, such as ``"class 1"``; behind the run's name where rows of several runs are together."""
    text = row.get("class", "")
    words = f"class {text}" if text.isdecimal() else text or "map"
    words += f", channel {row['channel']}" if row.get("channel") else ""
    return f"{row['run']}: {words}" if row.get("run") else words


def _table(folder: Path, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    path = _inside(folder, folder / name)
    return [] if path is None else CaseTable(path, columns=columns).read()


def _inside(folder: Path, path: Path) -> Path | None:
    """A file of the folder; None where there is none, or where it lies elsewhere, as a name or a link may lead to."""
    try:
        found = path.resolve()
        if not found.is_file():
            return None
    except (OSError, ValueError):  # a name that no file can have
        return None
    if found.is_relative_to(folder.resolve()):
        return found
    logger.warning("%s leads out of %s, and is not read", path, folder)
    return None
