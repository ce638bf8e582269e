"""CSV files with rows for cases, which several runs on one folder complete together."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from monai_saliency.storage.files import atomic_path, locked

__all__ = ["SUMMARY_COLUMNS", "CaseTable"]

#: the columns of ``summary.csv``, see :func:`monai_saliency.handlers.summary.summarize`
SUMMARY_COLUMNS = (
    "case",
    "prediction",
    "probability",
    "class",
    "channel",
    "score",
    "peak_x_mm",
    "peak_y_mm",
    "peak_z_mm",
    "peak_saliency",
    "peak_in_label",
    "forwards",
    "seconds",
)


class CaseTable:
    """A CSV file with a column ``case``: ``summary.csv``, or a table with other columns.

    The file is whole after every change, and sorted by case. Rows of other cases stay, so that a resumed run, or two
    runs on one folder, complete one table.

    Example::

        table = CaseTable("out/failures.csv", columns=("case", "error"))
        table.add([{"case": "s1", "error": "the file is empty"}])

    Args:
        path: the file.
        cases: the names of the cohort's cases. Rows of other cases are removed at the next change. None keeps all.
        columns: the names of the columns, with ``case`` among them. Default: the columns of ``summary.csv``.
    """

    def __init__(
        self, path: str | Path, cases: Collection[str] | None = None, columns: Sequence[str] = SUMMARY_COLUMNS
    ) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.cases = None if cases is None else set(cases)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace all rows of some cases.

        Args:
            rows: the new rows. Their keys are the columns.
        """
        self.replace({row["case"] for row in rows}, rows)

    def replace(self, cases: Collection[str], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Remove all rows of some cases, and add rows. A table without rows has no file.

        Args:
            cases: the names of the cases whose rows are removed.
            rows: the rows to add.
        """
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            found = self.read()
            kept = [
                row for row in found if row["case"] not in cases and (self.cases is None or row["case"] in self.cases)
            ]
            if not rows and len(kept) == len(found):
                return
            if not kept and not rows:
                self.path.unlink(missing_ok=True)
                return
            with atomic_path(self.path) as temporary, _open(temporary, "w") as file:
                writer = csv.DictWriter(file, self.columns)
                writer.writeheader()
                # A stable sort keeps the order of the rows of one case.
                writer.writerows(sorted([*kept, *rows], key=lambda row: row["case"]))

    def read(self) -> list[dict[str, str]]:
        """The rows of the file, sorted by case. Empty when there is no file, or one with other columns."""
        try:
            with _open(self.path, "r") as file:
                reader = csv.DictReader(file)
                return list(reader) if tuple(reader.fieldnames or ()) == self.columns else []
        except FileNotFoundError:
            return []


def _open(path: Path, mode: str) -> IO[str]:
    # Python reads file names that are not UTF-8 with this error handler, so the file holds their bytes.
    return open(path, mode, newline="", encoding="utf-8", errors="surrogateescape")
