"""CSV files whose rows belong to cases, which several runs on one folder complete together."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from monai_saliency.storage.files import atomic_path, locked

__all__ = ["CaseTable"]


class CaseTable:
    """A table whose first column is the case; the file is whole after every change.

    Rows of other cases that are in the file stay: a run that goes on from an earlier one, or beside another one on the
    same folder, completes their table.

    Args:
        path: the file.
        columns: the table's columns, ``case`` among them.
        cases: the cohort's cases; rows of others are dropped. None keeps all.
    """

    def __init__(self, path: str | Path, columns: Sequence[str], cases: Collection[str] | None = None) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.cases = None if cases is None else set(cases)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put rows with the columns' keys in the place of their cases' earlier ones."""
        self.replace({row["case"] for row in rows}, rows)

    def replace(self, cases: Collection[str], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Put rows in the place of all that these cases have. A table without rows is no file."""
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
                # A stable sort: the rows of one case stay in their order.
                writer.writerows(sorted([*kept, *rows], key=lambda row: row["case"]))

    def read(self) -> list[dict[str, str]]:
        """The rows of the file, by case; none where it is not there or has other columns."""
        try:
            with _open(self.path, "r") as file:
                reader = csv.DictReader(file)
                return list(reader) if tuple(reader.fieldnames or ()) == self.columns else []
        except FileNotFoundError:
            return []


def _open(path: Path, mode: str) -> IO[str]:
    # Python's own way with file names that are not UTF-8: the file holds their bytes.
    return open(path, mode, newline="", encoding="utf-8", errors="surrogateescape")
