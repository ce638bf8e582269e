"""The table of the cases that ended without a map."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from monai_saliency.errors import OutputError, as_case_error, root_cause
from monai_saliency.storage.tables import CaseTable
from monai_saliency.utils.arguments import a_path, flag

__all__ = ["Failures"]

logger = logging.getLogger(__name__)

_LONGEST_ERROR = 2000  # characters


class Failures:
    """``failures.csv``: one row for each failed case, with the stage in which it failed and the error in one line.

    Without failures there is no file. A row of an earlier run stays until its case is tried again. Several runs on one
    folder write to the same file.

    Args:
        path: the file.
        strict: raise the first failure instead of continuing with the next case.
        cases: the names of the cohort's cases. Rows of other cases are removed now. Default: all earlier rows are
            removed now.
        shared: other processes work on the same cohort. Then no row is removed before its case is tried again.

    Attributes:
        rows: the failures of this run, of cases that have not ended with a map since.
    """

    COLUMNS = ("case", "stage", "error")

    def __init__(
        self, path: str | Path, strict: bool = False, cases: Collection[str] | None = None, shared: bool = False
    ) -> None:
        self.path = a_path("path", path)
        self.strict = flag("strict", strict)
        self.rows: list[dict[str, str]] = []
        self._table = CaseTable(self.path, columns=self.COLUMNS)
        self._withdraws: list[Callable[[str], None]] = []
        self._earlier: list[dict[str, str]] = []
        self._lock = Lock()  # cases are explained in one thread and written in another
        with suppress(OSError):  # a folder that cannot be written fails at its first file, with a message
            if cases is None and not shared:
                self.path.unlink(missing_ok=True)
            elif cases is not None and self.path.exists():
                self.keep(cases)
        with suppress(OSError):
            self._earlier = self.read()

    def withdraw_by(self, withdraw: Callable[[str], None]) -> None:
        """Have ``withdraw`` remove the results that an earlier run made of a case as soon as the case fails."""
        self._withdraws.append(withdraw)

    def add(self, case: str, stage: str, error: BaseException, trace: str = "") -> None:
        """Add the row of a failed case.

        Args:
            case: the name of the case.
            stage: where it failed: ``load``, ``predict`` or ``explain``.
            error: the error. Its traceback goes to the log.
            trace: the traceback as text, for an error of a worker process, which does not carry its traceback.

        Raises:
            CaseError: the failure, with ``strict``.
            OutputError: the failure, if it is of this type, since every other case would fail in the same way.
        """
        if isinstance(output_error := root_cause(error), OutputError):
            raise output_error
        cause = as_case_error(error, case)
        for withdraw in self._withdraws:
            withdraw(case)
        if self.strict:
            raise cause from error
        logger.error("%s (%s)\n%s", cause, stage, trace, exc_info=None if trace else error)
        problem = cause.problem
        if len(problem) > _LONGEST_ERROR:
            problem = f"{problem[:_LONGEST_ERROR]} ... ({len(problem):,} characters, all of them in the log)"
        with self._lock:
            row = {"case": case, "stage": stage, "error": problem}
            self.rows = [*self._rows_without(case), row]
            self._table.add([row])

    def keep(self, cases: Collection[str]) -> None:
        """Remove the rows of all cases but these."""
        self._table.replace({row["case"] for row in self._table.read()} - set(cases))

    def remove(self, case: str) -> None:
        """Remove the row of a case that has a map now, whichever run has written it."""
        with self._lock:
            self.rows = self._rows_without(case)
            if self.path.exists():
                self._table.replace({case})

    def _rows_without(self, case: str) -> list[dict[str, str]]:
        return [row for row in self.rows if row["case"] != case]

    def read(self) -> list[dict[str, str]]:
        """The rows of the file: of this run, of other runs on the folder, and of cases that were not tried again."""
        return self._table.read()

    def since(self) -> list[dict[str, str]]:
        """The rows of the file that this run, or another one meanwhile, has written."""
        ours = {row["case"] for row in self.rows}
        return [row for row in self.read() if row["case"] in ours or row not in self._earlier]

    def summary(self, rows: Sequence[dict[str, str]] | None = None) -> str:
        """One line about some failures, by default those of this run, at least one."""
        rows = self.rows if rows is None else rows
        return (
            f"{len(rows)} case{'s' * (len(rows) > 1)} without a map, see {self.path}; the first is case "
            f"{rows[0]['case']}: {rows[0]['error']}"
        )
