"""CSV files with rows for cases, which several runs on one folder complete together, and the table of failures."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from monai_saliency.errors import NothingToExplain, OutputError, SettingError, as_case_error, root_cause
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.utils.arguments import a_path, flag

__all__ = [
    "LABEL_REGION_COLUMNS",
    "REGION_COLUMNS",
    "SUMMARY_COLUMNS",
    "TRUST_COLUMNS",
    "CaseTable",
    "Failures",
    "refuse_foreign",
    "write_csv",
]

logger = logging.getLogger(__name__)

#: the columns of ``summary.csv``, see :func:`monai_saliency.handlers.summary.summarize`
SUMMARY_COLUMNS = (
    *("case", "prediction", "probability", "class", "channel", "score", "score_without_peak", "quantity", "unit"),
    *("peak_x_mm", "peak_y_mm", "peak_z_mm", "peak_saliency", "lowest_saliency", "noise", "verdict", "peak_in_label"),
    *("fill_leaves", "images", "forwards", "predictions", "stopped", "seconds", "settings", "scan"),
)


def _compared(figures: Sequence[str], controls: Sequence[str]) -> list[str]:
    """The columns of figures of a map, each followed by the same figure of control maps."""
    columns = []
    for figure in figures:
        columns.append(f"trust_{figure}")
        columns += [f"trust_{figure}_{control}" for control in controls]
    return columns


_MAPS = ("random", "intensity", "edges", "blurred")
#: further columns of ``summary.csv``, in files with a row of ``--trust true``, see :mod:`monai_saliency.handlers.trust`
TRUST_COLUMNS = (
    *("trust_of", "trust_forwards", "trust_repeatability", "trust_fill_agreement"),
    *("trust_relative_error", "trust_peak_to_error", "trust_labelled"),
    *_compared(("pointing", "mass", "leakage", "auprc"), (*_MAPS, "randomised")),
    *_compared(("insertion", "deletion"), _MAPS),
    *("trust_randomised", "trust_problem", "trust_curves"),
)
#: the columns of ``regions.csv``, see :func:`monai_saliency.transforms.regions.region_rows`
REGION_COLUMNS = ("case", "class", "channel", "kind", "region", "name", "saliency", "volume_ml", "value", "baseline")
#: the columns of ``label_regions.csv``, see :func:`monai_saliency.transforms.regions.label_region_rows`
LABEL_REGION_COLUMNS = ("case", "class", "channel", "region", "name", "saliency", "mass", "voxels")

# Python reads file names that are not UTF-8 with this error handler, so that the file holds their bytes.
_ENCODED: Any = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}
_READ: Any = {**_ENCODED, "encoding": "utf-8-sig"}  # a spreadsheet may have saved it
# What spreadsheets take for a formula, behind the apostrophes that make it text.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-](\d+\.?\d*(e[+-]?\d+)?|inf|nan)")


class CaseTable:
    """A CSV file with a column ``case``: ``summary.csv``, or a table with other columns.

    The file is whole after every change, and sorted by case. Rows of other cases stay, so that a resumed run, or two
    runs on one folder, complete one table.

    A text that a spreadsheet would run as a formula, such as ``=1+1``, has an apostrophe before it in the file, which
    :meth:`read` takes away.

    Args:
        path: the file.
        columns: the names of the columns, with ``case`` among them. Default: the columns of ``summary.csv``. The
            columns of ``--trust true`` appear only if a row has a value in one of them.

    Raises:
        SettingError: now and later, when the file has other columns, so that it is not ours. It is left as it is.
    """

    def __init__(self, path: str | Path, columns: Sequence[str] = SUMMARY_COLUMNS) -> None:
        self.path = a_path("path", path)
        self.columns = tuple(columns)
        self.further: tuple[str, ...] = TRUST_COLUMNS if self.columns == SUMMARY_COLUMNS else ()
        with suppress(OSError):  # a file that cannot be read fails when its rows are needed
            self.read()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace all rows of some cases by new ones, whose keys are the columns."""
        self.replace({row["case"] for row in rows}, rows)

    def replace(self, cases: Collection[str], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Remove all rows of some cases, and add rows. A table without rows has no file."""
        if not rows and not self.path.exists():
            return
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            kept = [row for row in self.read() if row["case"] not in cases]
            if rows or kept:
                # A stable sort keeps the order of the rows of one case.
                rows = sorted([*kept, *rows], key=lambda row: row["case"])
                has_further = any(row.get(name, "") != "" for row in rows for name in self.further)
                names = self.columns + self.further if has_further else self.columns
                write_csv(self.path, names, rows)
            else:
                self.path.unlink(missing_ok=True)

    def read(self) -> list[dict[str, str]]:
        """The rows of the file, sorted by case. Empty if the file is missing or empty.

        Columns that an earlier version did not write are empty. Rows have the further columns where the file has them.
        """
        (header, lines), known = _content(self.path), (*self.columns, *self.further)
        if header and ("case" not in header or not set(header) <= set(known)):
            raise _foreign(self.path, header, self.columns)
        names = [name for name in known if name in self.columns or name in header]
        rows = []
        for line in lines:
            rows.append({name: _text(line.get(name, "")) for name in names})
        return rows


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table with a header, whose texts a spreadsheet does not run as formulas."""
    with atomic_path(path) as temporary, open(temporary, "w", **_ENCODED) as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def refuse_foreign(path: Path, columns: Sequence[str]) -> None:
    """Refuse to replace a file whose first column is not that of our table."""
    header, _ = _content(path)
    if header and header[0] != columns[0]:
        raise _foreign(path, header, columns)


def _content(path: Path) -> tuple[Sequence[str], list[dict[str, str]]]:
    """The names of a file's columns, and its rows; nothing where the file is missing or empty."""
    try:
        with open(path, **_READ) as file:
            reader = csv.DictReader(file, restval="")
            return reader.fieldnames or [], list(reader)
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except csv.Error:  # as of a binary file
        return ["(no text with commas)"], []


def _foreign(path: Path, header: Sequence[str], columns: Sequence[str]) -> SettingError:
    got, expected = (f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}" for names in (header, columns))
    return SettingError(
        f"{path} is not a table of this version of monai-saliency, and is left as it is: its columns are {got}, where "
        f"{expected} were expected. Move the file away, or choose another output folder (--output_dir)"
    )


def _cell(value: Any) -> Any:
    """A value as written to a table's file: text that a spreadsheet would run gets an apostrophe in front."""
    if not isinstance(value, str) or not _FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def _text(cell: str) -> str:
    """The text of a cell, without the apostrophe in front."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


class Failures:
    """``failures.csv``: one row for each failed case, with the stage where it failed and the error in one line. Cases
    in which there is nothing to explain are no failures: they are in ``nothing_to_explain.csv``, with the reason.

    Without such cases there is no file. Several runs on one folder write to the same files. A file with other columns
    is refused, as by :class:`CaseTable`.

    Args:
        path: the file.
        strict: raise the first failure instead of continuing with the next case.
        cases: the names of the cohort's cases. Rows of other cases are removed now; by default all earlier ones.
        shared: other processes work on the same cohort. Then no row is removed before its case is tried again.
    """

    COLUMNS = ("case", "stage", "error")
    NOTHING_FILE, NOTHING_COLUMNS = "nothing_to_explain.csv", ("case", "reason")

    def __init__(
        self, path: str | Path, strict: bool = False, cases: Collection[str] | None = None, shared: bool = False
    ) -> None:
        self.path = a_path("path", path)
        self.strict = flag("strict", strict)
        self.rows: list[dict[str, str]] = []  # of this run, of cases that have not ended with a map since
        self.nothing: list[dict[str, str]] = []  # likewise, of cases in which there is nothing to explain
        self._table = CaseTable(self.path, columns=self.COLUMNS)
        self.nothing_table = CaseTable(self.path.with_name(self.NOTHING_FILE), columns=self.NOTHING_COLUMNS)
        self._withdraws: list[Callable[[str], None]] = []
        self._failed: list[str] = []  # cases whose earlier results are still there
        self._withdraws_at_once = shared  # each of several processes sees some cases only
        self._earlier: list[dict[str, str]] = []
        self._lock = Lock()  # cases are explained in one thread and written in another
        with suppress(OSError):  # a folder that cannot be written fails at its first file, with a message
            if cases is not None:
                self.keep(cases)
            elif not shared:
                self.path.unlink(missing_ok=True)
                self.nothing_table.path.unlink(missing_ok=True)
            self._earlier = self._listed()

    def withdraw_by(self, withdraw: Callable[[str], None]) -> None:
        """Have ``withdraw`` remove the results that an earlier run made of a case, once the case fails and another has
        a map: a mistake that fits none, such as windows larger than all scans, must not cost a night's maps.
        """
        self._withdraws.append(withdraw)

    def add(self, case: str, stage: str, error: BaseException, trace: str = "") -> None:
        """Add the row of a failed case, or raise its error: if ``strict``, or one that all others would meet too. A
        case in which there is nothing to explain goes to the other list.

        ``stage`` is ``load``, ``predict`` or ``explain``. The log has the error in one line; where this package's
        loggers are at level DEBUG, as by ``--debug``, its traceback too. ``trace`` is the traceback of a worker process
        as text.
        """
        if isinstance(of_all_cases := root_cause(error), (OutputError, SettingError)):
            raise of_all_cases
        cause = as_case_error(error, case)
        with self._lock:
            self._failed.append(case)
        if self._withdraws_at_once:
            self._withdraw_failed()
        if isinstance(cause, NothingToExplain):
            logger.info("%s (nothing to explain)", cause)
            with self._lock:
                self._drop(case)
                self.nothing.append({"case": case, "reason": cause.problem})
                self.nothing_table.add(self.nothing[-1:])
            return
        if self.strict:
            raise cause from error
        logger.error("%s (%s)", cause, stage)
        if logger.isEnabledFor(logging.DEBUG):
            logger.error("%s", trace or "its traceback:", exc_info=None if trace else error)
        row = {"case": case, "stage": stage, "error": cause.problem}
        with self._lock:
            self._drop(case)
            self.rows.append(row)
            self._table.add([row])

    def keep(self, cases: Collection[str]) -> None:
        """Remove the rows of all cases but these."""
        for table in (self._table, self.nothing_table):
            table.replace({row["case"] for row in table.read()} - set(cases))

    def remove(self, case: str) -> None:
        """Remove the row of a case that has a map now, whichever run has written it."""
        self._withdraws_at_once = True
        self._withdraw_failed()
        with self._lock:
            self._drop(case)

    def _drop(self, case: str) -> None:
        """Remove the row of a case from both lists and files."""
        for rows, table in ((self.rows, self._table), (self.nothing, self.nothing_table)):
            rows[:] = [row for row in rows if row["case"] != case]
            table.replace({case})

    def _withdraw_failed(self) -> None:
        with self._lock:
            failed, self._failed = self._failed, []
        for case in failed:
            for withdraw in self._withdraws:
                withdraw(case)

    def read(self) -> list[dict[str, str]]:
        """The rows of the file: of this run, of other runs on the folder, and of cases that were not tried again."""
        return self._table.read()

    def _listed(self) -> list[dict[str, str]]:
        return [*self.read(), *self.nothing_table.read()]

    def since(self) -> list[dict[str, str]]:
        """The rows of both files that this run, or another one meanwhile, has written."""
        ours = {row["case"] for row in [*self.rows, *self.nothing]}
        return [row for row in self._listed() if row["case"] in ours or row not in self._earlier]

    def summary(self, rows: Sequence[dict[str, str]]) -> str:
        """One line about some failures, at least one."""
        return (
            f"{len(rows)} case{'s' * (len(rows) > 1)} without a map, see {self.path}; the first is case "
            f"{rows[0]['case']}: {rows[0]['error']}"
        )

    def nothing_summary(self) -> str:
        """One line about the cases in which there is nothing to explain, of all runs on the folder; empty without."""
        if not (rows := self.nothing_table.read()):
            return ""
        cases = f"{len(rows)} case{'s' * (len(rows) > 1)} with nothing to explain, see {self.nothing_table.path}"
        return f"{cases}; the first is case {rows[0]['case']}: {rows[0]['reason']}"
