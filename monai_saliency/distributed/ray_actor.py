"""What runs in the actors of a Ray pool: each makes the cohort once, and explains the units of each call."""

from __future__ import annotations

import io
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from monai_saliency.distributed.base import Cohort
from monai_saliency.errors import root_cause
from monai_saliency.sharding import Unit
from monai_saliency.utils.arguments import require

__all__ = ["Actor", "Attempts", "Reply"]


@dataclass
class Reply:
    """The result of a call."""

    num_units: int = 0
    rows: list[dict[str, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    printed: str = ""
    logged: str = ""
    error: BaseException | None = None


class Actor:
    """One actor of the pool. Errors go into its replies: Ray would wrap them in pages of its own traceback."""

    def __init__(self, recipe: Callable[[], Cohort], attempts: Any) -> None:
        self.attempts = attempts
        self.made = Reply()
        with _overheard(self.made):
            self.cohort = recipe()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Explain the units of one call."""
        reply, self.made = self.made, Reply(error=self.made.error)
        if reply.error is None:
            units: list[Unit] = pickle.loads(row["units"])
            with _overheard(reply):
                self._begin(row["call"], units)
                reply.rows = self.cohort.explain(units, quiet=True)  # the driver shows the progress of all
                reply.waiting = self.cohort.take_waiting()
                reply.num_units = len(units)
        return {"reply": pickle.dumps(reply)}

    def _begin(self, call: int, units: Sequence[Unit]) -> None:
        ray: Any = require("ray", extra="ray")
        attempts, most = ray.get(self.attempts.begin.remote(call))
        if attempts > most:
            places = ", ".join(str(unit.index) for unit in units)
            raise RuntimeError(
                f"{most} actors were lost one after the other while they explained one of the cases {places} "
                "(counted from 0 in the cohort): its network or its loader ends the process, or it needs more memory "
                "than there is. Explain it alone and without Ray to see the error"
            )


class Attempts:
    """Counts, in its own actor, how often each call was begun."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[int] = Counter()

    def begin(self, call: int) -> tuple[int, int]:
        """Count a call; how often it was begun by now, and how often it may be."""
        self._counts[call] += 1
        return self._counts[call], self._most


@contextmanager
def _overheard(reply: Reply) -> Iterator[None]:
    """Note in a reply what is printed, logged and raised."""
    printed, logged = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(logged):
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            # Causes get lost when an error is pickled; the traceback has them all.
            reply.error = _sendable(root_cause(error))
    reply.printed += printed.getvalue()
    reply.logged += logged.getvalue()


def _sendable(error: BaseException) -> BaseException:
    """An error that can be pickled: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
