"""Running an evaluator over a cohort, and reporting what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from monai.engines import SupervisedEvaluator

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.engines.signals import stoppable
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.files import remove_stale
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.timing import trace
from monai_saliency.visualize.report import try_report

__all__ = ["run"]


def run(
    evaluator: SupervisedEvaluator,
    failures: Failures | None = None,
    tracker: AbstractContextManager[Any] | None = None,
    start: Callable[[], Any] | None = None,
    profile: str | Path = "",
    handler: SaliencyHandler | None = None,
    engine: Engine | None = None,
    recipe: Callable[[], Cohort] | None = None,
    report: str | Path | None = None,
) -> None:
    """Run an evaluator over its cohort, and print its metrics in one line.

    If it has a ``meter``, another line reports how busy its network was. The last line is the path of the report.

    Args:
        evaluator: predicts, with its loader.
        failures: the list of failed cases, which the evaluator and its handler add to.
        tracker: a context to run it in, such as :class:`monai_saliency.handlers.mlflow.Tracker`.
        start: runs the evaluator; its own ``run`` by default.
        profile: a folder for a trace of the run, see :func:`monai_saliency.utils.timing.trace`; none where empty.
        handler: explains; only needed with an engine, or with a store whose folder is not below that of ``failures``.
        engine: shares the cohort with other processes; all is done here by default.
        recipe: makes the cohort in another process, see :class:`monai_saliency.distributed.base.Cohort`.
        report: the output folder to make a report of (:func:`monai_saliency.visualize.report.write_report`); none by
            default. Without any case it is not made.

    Raises:
        ValueError: when an engine is to share what is tracked.
        SystemExit: with one line that sums up the failures, where there are any, or the cases whose parts do not fit
            each other or that another run held: the program ends with status 1. Of several processes, in those that
            speak.
        KeyboardInterrupt, SystemExit: when it is stopped, see :func:`monai_saliency.engines.signals.stoppable`.
    """
    if engine is not None and getattr(tracker, "handlers", None):
        raise ValueError(
            "--tracking records the run of one process: run with the engine first, then without it and with "
            "--tracking, which finds all scores and records the whole cohort"
        )
    start = start or evaluator.run
    _remove_stale(failures, handler)
    with stoppable(evaluator, handler), tracker or nullcontext(), trace(profile) if profile else nullcontext():
        if engine is None:
            start()
        elif handler is None:
            raise ValueError("an engine needs the `handler` that explains")
        else:
            engine.run(Cohort(evaluator, handler, start, recipe))
            evaluator.state.metrics.update(handler.figures())
            handler.write_trust()
    # A process that does not speak ends well: whoever started it would stop the others, who may still be writing.
    speaks = engine is None or engine.speaks
    _print_figures(evaluator, speaks)
    if not speaks:
        return
    if report is not None and any((Path(report) / name).is_file() for name in ("summary.csv", "failures.csv")):
        try_report(report)
    if failures is not None and (rows := failures.read() if engine is not None and engine.waits else failures.rows):
        sys.exit(f"error: {failures.summary(rows)}")
    if handler is not None:
        _report_incomplete(handler, engine)


def _remove_stale(failures: Failures | None, handler: SaliencyHandler | None) -> None:
    """Remove the temporary files of killed runs, wherever this run writes."""
    folders = [] if failures is None else [failures.path.parent]
    store = None if handler is None else handler.store
    if store is not None and not any(store.root.is_relative_to(folder) for folder in folders):
        folders.append(store.root)
    for folder in folders:
        remove_stale(folder)


def _print_figures(evaluator: SupervisedEvaluator, speaks: bool) -> None:
    numbers = {name: value for name, value in evaluator.state.metrics.items() if isinstance(value, (int, float))}
    if numbers and speaks:
        print("cohort: " + ", ".join(f"{name} {value:.7g}" for name, value in numbers.items()), flush=True)
    meter = getattr(evaluator, "meter", None)
    if meter is not None and meter.images:
        print(meter, flush=True)


def _report_incomplete(handler: SaliencyHandler, engine: Engine | None) -> None:
    """Report cases that ended with neither a map nor a failure."""
    waiting = handler.incomplete(alike=engine is None)
    if not waiting:
        return
    words = f"{len(waiting)} case{'s' * (len(waiting) > 1)} without a map yet, the first is {waiting[0]}"
    if engine is None:
        sys.exit(
            f"error: {words}: another run on this folder held it, and writes its map unless it is stopped. The same "
            "command again explains what is missing"
        )
    if engine.waits:
        sys.exit(
            f"error: {words}: all processes are done, and either another run held it, or its parts do not make a "
            "case. Had all the same weights (a checkpoint, or a seed)? The same command without the engine scores "
            "what is missing"
        )
    print(
        f"{words}: whoever scores the last part makes its map, and so does the same command without the engine",
        flush=True,
    )
