"""CSV files with rows for cases, which several runs on one folder complete together."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.utils.arguments import a_path

__all__ = ["LONGEST_CELL", "REGION_COLUMNS", "SUMMARY_COLUMNS", "TRUST_COLUMNS", "CaseTable", "cell"]

logger = logging.getLogger(__name__)

#: the columns of ``summary.csv``, see :func:`monai_saliency.handlers.summary.summarize`
SUMMARY_COLUMNS = (
    *("case", "prediction", "probability", "class", "channel", "score", "quantity", "unit"),
    *("peak_x_mm", "peak_y_mm", "peak_z_mm", "peak_saliency", "lowest_saliency", "noise", "peak_in_label"),
    *("forwards", "predictions", "stopped", "seconds", "settings", "scan"),
)

_MAPS = ("random", "intensity", "edges", "blurred")
_LABELLED = ("pointing", "mass", "leakage", "auprc")
#: further columns of ``summary.csv``, in files with a row of ``--trust true``, see :mod:`monai_saliency.handlers.trust`
TRUST_COLUMNS = (
    *("trust_of", "trust_forwards", "trust_repeatability", "trust_fill_agreement"),
    *("trust_relative_error", "trust_peak_to_error", "trust_labelled"),
    *(f"trust_{name}{beside}" for name in _LABELLED for beside in ("", *(f"_{map}" for map in (*_MAPS, "randomised")))),
    *(f"trust_{name}{beside}" for name in ("insertion", "deletion") for beside in ("", *(f"_{map}" for map in _MAPS))),
    *("trust_randomised", "trust_problem", "trust_curves"),
)
#: the columns of ``regions.csv``, see :func:`monai_saliency.transforms.writers.region_rows`
REGION_COLUMNS = ("case", "class", "channel", "region", "name", "saliency", "volume_ml")

#: characters; a spreadsheet takes 32,767, and Python's reader 131,072
LONGEST_CELL = 32_000
# What spreadsheets take for a formula, behind the apostrophes that make it text.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_UNENCODABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class CaseTable:
    """A CSV file with a column ``case``: ``summary.csv``, or a table with other columns.

    The file is whole after every change, and sorted by case. Rows of other cases stay, so that a resumed run, or two
    runs on one folder, complete one table.

    A text that a spreadsheet would run as a formula, such as ``=1+1``, has an apostrophe before it in the file, which
    :meth:`read` takes away. A text of more than 32,000 characters is cut.

    Args:
        path: the file.
        cases: the names of the cohort's cases. Rows of other cases are removed at the next change, and the log says so.
            None keeps all.
        columns: the names of the columns, with ``case`` among them. Default: the columns of ``summary.csv``.
        further: columns that the file has only while a row has a value in one of them. Default: those of
            ``--trust true`` for ``summary.csv``, none for other tables.

    Example::

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     table = CaseTable(f"{folder}/failures.csv", columns=("case", "error"))
        ...     table.add([{"case": "s1", "error": "the file is empty"}])
        ...     table.read()
        [{'case': 's1', 'error': 'the file is empty'}]
    """

    def __init__(
        self,
        path: str | Path,
        cases: Collection[str] | None = None,
        columns: Sequence[str] = SUMMARY_COLUMNS,
        further: Sequence[str] | None = None,
    ) -> None:
        self.path = a_path("path", path)
        self.columns = tuple(columns)
        self.further = (TRUST_COLUMNS if self.columns == SUMMARY_COLUMNS else ()) if further is None else tuple(further)
        self.cases = None if cases is None else set(map(_kept, cases))

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace all rows of some cases by new ones, whose keys are the columns."""
        self.replace({row["case"] for row in rows}, rows)

    def replace(self, cases: Collection[str], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Remove all rows of some cases, and add rows. A table without rows has no file."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            found, cases = self.read(), set(map(_kept, cases))
            self._warn_of_others(found)
            kept = [
                row for row in found if row["case"] not in cases and (self.cases is None or row["case"] in self.cases)
            ]
            if not rows and len(kept) == len(found):
                return
            if not kept and not rows:
                self.path.unlink(missing_ok=True)
                return
            # A stable sort keeps the order of the rows of one case.
            rows = sorted([*kept, *rows], key=lambda row: row["case"])
            has_further = any(row.get(name, "") != "" for row in rows for name in self.further)
            with atomic_path(self.path) as temporary, _open(temporary, "w") as file:
                writer = csv.DictWriter(file, (*self.columns, *self.further) if has_further else self.columns)
                writer.writeheader()
                writer.writerows(
                    {name: cell(value) for name, value in row.items() if has_further or name not in self.further}
                    for row in rows
                )

    def read(self) -> list[dict[str, str]]:
        """The rows of the file, sorted by case. Empty when there is no file, or one of another table.

        Columns that an earlier version did not write are empty. Rows have the further columns where the file has them.
        """
        csv.field_size_limit(2**31 - 1)  # earlier versions wrote cells of any length
        try:
            with _open(self.path, "r") as file:
                header, *lines = [line for line in csv.reader(file) if line] or [[]]
        except FileNotFoundError:
            return []
        if "case" not in header or not set(header) <= {*self.columns, *self.further}:
            return []
        found = [dict(zip(header, map(_text, line), strict=False)) for line in lines]
        names = [*self.columns, *(name for name in self.further if name in header)]
        return [{name: row.get(name, "") for name in names} for row in found]

    def _warn_of_others(self, rows: Sequence[dict[str, str]]) -> None:
        names = dict.fromkeys(row["case"] for row in rows)
        if others := [name for name in names if self.cases is not None and name not in self.cases]:
            logger.warning(
                "%s held rows of %d case%s that this cohort does not have (the first is %s): they are removed, and "
                "what else was written of such cases stays. Choose another folder to keep both",
                self.path,
                len(others),
                "s" * (len(others) > 1),
                others[0],
            )


def cell(value: Any) -> Any:
    """A value as it stands in a table's file: a text that a spreadsheet would run has an apostrophe before it."""
    if not isinstance(value, str):
        return value
    text = _kept(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def _kept(text: str) -> str:
    """What a table keeps of a text: all but what its file cannot hold."""
    text = _UNENCODABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).replace("\0", "\\x00")
    if len(text) > LONGEST_CELL + 50:  # what was cut before is not cut again
        text = f"{text[:LONGEST_CELL]} ... ({len(text):,} characters)"
    return text


def _text(cell: str) -> str:
    """The text that a cell stands for."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _open(path: Path, mode: str) -> IO[str]:
    # Python reads file names that are not UTF-8 with this error handler, so the file holds their bytes.
    return open(path, mode, newline="", encoding="utf-8", errors="surrogateescape")
