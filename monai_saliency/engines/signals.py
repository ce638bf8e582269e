"""Stopping a run by a signal: it leaves nothing half done, and the next run resumes where it stopped."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from monai.engines import Evaluator

from monai_saliency.utils.arguments import require

if TYPE_CHECKING:
    from monai_saliency.handlers.saliency_handler import SaliencyHandler

__all__ = ["stoppable"]

Events = require("ignite.engine", extra="bundle").Events


class _Terminated(SystemExit):
    """SIGTERM, with which a cluster announces the end of a job."""


@contextmanager
def stoppable(evaluator: Evaluator, handler: SaliencyHandler | None = None) -> Iterator[None]:
    """Let Ctrl-C, and in the main thread SIGTERM, end the run of an evaluator as any error would, and report how far it
    came.
    """
    done = 0
    complete = False

    def completed(engine: Any) -> None:
        nonlocal complete
        complete = True

    def count(engine: Any) -> None:
        nonlocal done
        batch = engine.state.batch
        done += len(batch if isinstance(batch, list) else batch.get("case", ()) if isinstance(batch, dict) else ())

    def stopped(name: str) -> str:
        dataset = getattr(evaluator.data_loader, "dataset", None)
        total = f" of {len(dataset)}" if isinstance(dataset, Sized) else ""
        cases = done or len(handler.explained if handler is not None else ())
        return (
            f"stopped by {name} after {cases}{total} cases. What was written is whole; run the same command again to "
            "go on: scores that are kept are not computed again"
        )

    def terminate(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _Terminated(128 + number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        with (
            evaluator.add_event_handler(Events.ITERATION_COMPLETED, count),
            evaluator.add_event_handler(Events.COMPLETED, completed),
        ):
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(stopped("Ctrl-C")) from None
    except _Terminated:
        print(stopped("SIGTERM"), file=sys.stderr)
        raise
    except SystemExit as error:
        if error.code or complete:
            raise
        # The bundle's own code may call this, or a library's. A status of 0 would pass for a whole cohort.
        raise SystemExit(f"error: {stopped('sys.exit')}") from error
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
