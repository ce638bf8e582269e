"""The cases that ended without a map."""

from __future__ import annotations

import csv
import logging
from contextlib import suppress
from pathlib import Path

from monai_saliency.errors import OutputError, as_case_error, root_cause
from monai_saliency.files import atomic_path

__all__ = ["Failures"]

logger = logging.getLogger(__name__)


class Failures:
    """``failures.csv``: one row for each case that failed, with the stage it failed in and the error in one line.

    No file means no failure: the one that an earlier run left is removed, as its cases are tried again.

    Args:
        path: the file.
        strict: raise the first failure instead of going on.
    """

    COLUMNS = ("case", "stage", "error")

    def __init__(self, path: str | Path, strict: bool = False) -> None:
        self.path = Path(path)
        self.strict = strict
        self.rows: list[dict[str, str]] = []
        with suppress(OSError):  # a folder that cannot be written is met, and named, at the first file
            self.path.unlink(missing_ok=True)

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
        self.rows.append({"case": case, "stage": stage, "error": cause.problem})
        with atomic_path(self.path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def summary(self) -> str:
        """One line for the end of a run."""
        first = self.rows[0]
        return (
            f"{len(self.rows)} case{'s' * (len(self.rows) > 1)} without a map, see {self.path}; the first is case "
            f"{first['case']}: {first['error']}"
        )
