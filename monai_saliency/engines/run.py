"""The run of a cohort, which a signal or an error may stop, and what it reports."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from monai.engines import SupervisedEvaluator
from monai.utils import OptionalImportError

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.errors import OutputError, root_cause
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.files import remove_stale
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.arguments import flag
from monai_saliency.utils.timing import trace
from monai_saliency.visualize.report import try_report

#: of which one holds cases, so that there is something to report
_TABLES = ("summary.csv", "failures.csv", Failures.NOTHING_FILE)
_STOPPED = (
    "stopped by {}. What was written is whole; run the same command again to go on: scores that are kept are not "
    "computed again"
)


def run(
    evaluator: SupervisedEvaluator,
    handler: SaliencyHandler,
    tracker: AbstractContextManager[Any] | None = None,
    start: Callable[[], Any] | None = None,
    profile: str | Path = "",
    engine: Engine | None = None,
    recipe: Callable[[], Cohort] | None = None,
    report: str | Path | None = None,
) -> None:
    """Run an evaluator over its cohort, and print its metrics in one line.

    The last line is the path of the report.

    Args:
        evaluator: predicts, with its loader.
        handler: explains.
        tracker: a context to run it in, such as :class:`monai_saliency.handlers.mlflow.Tracker`.
        start: runs the evaluator; its own ``run`` by default.
        profile: a folder for a trace of the run, see :func:`monai_saliency.utils.timing.trace`; none where empty.
        engine: shares the cohort with other processes; all is done here by default.
        recipe: makes the cohort in another process, see :class:`monai_saliency.distributed.base.Cohort`.
        report: the output folder to make a report of (:func:`monai_saliency.visualize.report.write_report`); none by
            default. Without any case it is not made.

    Raises:
        ValueError: when an engine is to share what is tracked.
        SystemExit: with one line that sums up the failures, or the cases that have no map yet: the program ends with
            status 1. Of several processes, in those that speak.
        KeyboardInterrupt, SystemExit: when it is stopped, see :func:`stoppable`.
    """
    if engine is not None and getattr(tracker, "handlers", None):
        raise ValueError(
            "--tracking records the run of one process: run with the engine first, then without it and with "
            "--tracking, which finds all scores and records the whole cohort"
        )
    start = start or evaluator.run
    remove_stale(handler.failures.path.parent)  # of killed runs
    with stoppable(), tracker or nullcontext(), trace(profile) if profile else nullcontext():
        if engine is None:
            start()
        else:
            engine.run(Cohort(evaluator, handler, start, recipe))
            handler.report_cohort(evaluator)
    # A process that does not speak ends well: whoever started it would stop the others, who may still be writing.
    if engine is not None and not engine.speaks:
        return
    if handler.compare is None:
        _print_figures(evaluator)
        if nothing := handler.failures.nothing_summary():
            print(nothing, flush=True)
    if report is not None and any((Path(report) / name).is_file() for name in _TABLES):
        try_report(report)
    _check_complete(handler, engine)


def _check_complete(handler: SaliencyHandler, engine: Engine | None) -> None:
    """End the program with status 1 if cases have failed, or have no map though all processes are done."""
    failures, waits = handler.failures, engine is not None and engine.waits
    failed = failures.read() if waits else failures.rows
    if failed:
        sys.exit(f"error: {failures.summary(failed)}")
    waiting = handler.incomplete(alike=engine is None)
    if not waiting:
        return
    words = f"{len(waiting)} case{'s' if len(waiting) > 1 else ''} without a map yet, the first is {waiting[0]}"
    if engine is None or waits:
        sys.exit(
            f"error: {words}: all processes are done, and either another run held it, or its parts are of different "
            "weights. The same command, without an engine, explains what is missing"
        )
    print(f"{words}: whoever scores the last part makes its map, and so does the same command without the engine")


def _print_figures(evaluator: SupervisedEvaluator) -> None:
    metrics = evaluator.state.metrics.items()
    numbers = {name: float(value) for name, value in metrics if isinstance(value, (int, float))}
    figures = [
        f"{name} {value:.0f}" if abs(value) >= 1000 else f"{name} {value:.3g}" for name, value in numbers.items()
    ]
    if figures:
        print(f"cohort: {', '.join(figures)}", flush=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C, and in the main thread SIGTERM, end what runs here as any error would, and report how to go on."""

    def terminate(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_STOPPED.format("Ctrl-C")) from None
    except SystemExit as error:
        if error.code == 128 + signal.SIGTERM:
            print(_STOPPED.format("SIGTERM"), file=sys.stderr)
        raise
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def show_cause_only(debug: bool = False) -> None:
    """Let an uncaught exception print its cause in one line, without a traceback. For use by a program, as the bundle's
    ``initialize`` does: MONAI's transforms and configs wrap what went wrong in errors of their own.

    Args:
        debug: print the traceback before that line, as ``--debug`` does, and those of cases that fail.
    """
    debug = flag("debug", debug)
    if debug:
        logging.getLogger("monai_saliency").setLevel(logging.DEBUG)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and error.args:
            print(f"\n{error}", file=sys.stderr)
            return
        if debug or not isinstance(error, Exception):
            sys.__excepthook__(kind, error, trace)
        cause = root_cause(error)
        is_ours = isinstance(cause, (ValueError, OutputError, OptionalImportError))
        # A missing folder or file that our own words name: the system's error has a number.
        is_ours |= isinstance(cause, FileNotFoundError) and cause.errno is None
        if not (debug or is_ours):
            print("\nthe traceback is shown by --debug (--saliency_debug in another bundle)", file=sys.stderr)
        if isinstance(error, Exception):
            print(f"\nerror: {'' if is_ours else f'{type(cause).__name__}: '}{cause}", file=sys.stderr)

    sys.excepthook = hook
