"""The cases that ended without a map."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from monai_saliency.errors import OutputError, as_case_error, root_cause
from monai_saliency.storage.tables import CaseTable

__all__ = ["Failures"]

logger = logging.getLogger(__name__)


class Failures:
    """``failures.csv``: one row for each case that failed, with the stage it failed in and the error in one line.

    No file means no failure. Rows of an earlier run stay until their case is tried again, and runs beside this one on
    the same folder add to the same file.

    Args:
        path: the file.
        strict: raise the first failure instead of going on.
        cases: the cohort's; rows of others go at once. By default all earlier rows do.
        shared: other processes work on the same cohort, so that no row goes before its case is tried again.
    """

    COLUMNS = ("case", "stage", "error")

    def __init__(
        self, path: str | Path, strict: bool = False, cases: Collection[str] | None = None, shared: bool = False
    ) -> None:
        self.path = Path(path)
        self.strict = strict
        self.rows: list[dict[str, str]] = []
        self._table = CaseTable(self.path, self.COLUMNS)
        self._lock = Lock()  # cases are explained in one thread and written in another
        with suppress(OSError):  # a folder that cannot be written is met, and named, at the first file
            if cases is None and not shared:
                self.path.unlink(missing_ok=True)
            elif cases is not None and self.path.exists():
                self.keep(cases)

    def add(self, case: str, stage: str, error: BaseException, trace: str = "") -> None:
        """Note a case that failed.

        Args:
            case: its name.
            stage: ``load``, ``predict`` or ``explain``.
            error: what went wrong; its traceback goes to the log.
            trace: the traceback where the error does not have it, as from a worker process.

        Raises:
            CaseError: the failure itself, when strict.
            OutputError: when that is the failure, since every further case would meet it too.
        """
        if isinstance(output_error := root_cause(error), OutputError):
            raise output_error
        cause = as_case_error(error, case)
        if self.strict:
            raise cause from error
        logger.error("%s (%s)\n%s", cause, stage, trace, exc_info=None if trace else error)
        with self._lock:
            self.rows.append({"case": case, "stage": stage, "error": cause.problem})
            self._table.add(self.rows[-1:])

    def keep(self, cases: Collection[str]) -> None:
        """Remove the rows of all other cases, which are not of the cohort any more."""
        self._table.replace({row["case"] for row in self._table.read()} - set(cases))

    def remove(self, case: str) -> None:
        """Note that a case has a map now, whichever run it failed in before."""
        if self.path.exists():
            with self._lock:
                self._table.replace({case})

    def read(self) -> list[dict[str, str]]:
        """The rows of the file: those of this run, of runs beside it, and of cases that were not tried again."""
        return self._table.read()

    def summary(self, rows: Sequence[dict[str, str]] | None = None) -> str:
        """One line for the end of a run.

        Args:
            rows: of the failures, at least one; this run's by default.
        """
        rows = self.rows if rows is None else rows
        return (
            f"{len(rows)} case{'s' * (len(rows) > 1)} without a map, see {self.path}; the first is case "
            f"{rows[0]['case']}: {rows[0]['error']}"
        )
