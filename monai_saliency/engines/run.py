"""Running an evaluator over a cohort."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser
from monai.engines import SupervisedEvaluator

from monai_saliency.bundle.config import calling_parser
from monai_saliency.distributed import Cohort, Engine
from monai_saliency.engines.signals import stoppable
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.files import remove_stale
from monai_saliency.utils.profiling import trace

__all__ = ["run"]


def run(
    evaluator: SupervisedEvaluator,
    failures: Failures | None = None,
    tracker: AbstractContextManager[Any] | None = None,
    start: Callable[[], None] | None = None,
    profile: str | Path = "",
    handler: SaliencyHandler | None = None,
    engine: Engine | None = None,
    run_id: str = "run",
    parser: ConfigParser | None = None,
) -> None:
    """Run an evaluator over its cohort, and print its metrics in one line.

    Where it has a ``meter``, another line says how busy its network was.

    Args:
        evaluator: it.
        failures: the list that it puts failed cases into.
        tracker: a context to run it in, such as :class:`monai_saliency.handlers.mlflow.Tracker`.
        start: runs the evaluator; its own ``run`` by default.
        profile: a folder for a trace of the run, see :func:`monai_saliency.utils.profiling.trace`; none where empty.
        handler: explains; only needed with an engine, or with a store whose folder is not below that of ``failures``.
        engine: shares the cohort with other processes; all is done here by default.
        run_id: the config's id by which this is run; only needed with an engine.
        parser: of the config; by default the one in whose expression this is called.

    Raises:
        ValueError: when an engine is to share what is tracked.
        SystemExit: with one line that sums up the failures, where there are any, or the cases whose parts do not fit
            each other: the program ends with status 1. Of several processes, in those that speak.
        KeyboardInterrupt, SystemExit: when it is stopped, see :func:`monai_saliency.engines.signals.stoppable`.
    """
    if engine is not None and getattr(tracker, "handlers", None):
        raise ValueError(
            "--tracking records the run of one process: run with the engine first, then without it and with "
            "--tracking, which finds all scores and records the whole cohort"
        )
    start = start or evaluator.run
    folders = [] if failures is None else [failures.path.parent]
    store = None if handler is None else handler.store
    if store is not None and not any(store.root.is_relative_to(folder) for folder in folders):
        folders.append(store.root)
    for folder in folders:
        remove_stale(folder)
    with stoppable(evaluator, handler), tracker or nullcontext(), trace(profile) if profile else nullcontext():
        if engine is None:
            start()
        elif handler is None:
            raise ValueError("an engine needs the `handler` that explains")
        else:
            config = (parser or calling_parser()).get()
            engine.run(Cohort(evaluator, handler, failures, start, config, run_id))
            evaluator.state.metrics.update(handler.figures())
    numbers = {name: value for name, value in evaluator.state.metrics.items() if isinstance(value, (int, float))}
    # A process that does not speak ends well: whoever started it would stop the others, who may still be writing.
    speaks = engine is None or engine.speaks
    if numbers and speaks:
        print("cohort: " + ", ".join(f"{name} {value:.7g}" for name, value in numbers.items()), flush=True)
    meter = getattr(evaluator, "meter", None)
    if meter is not None and meter.images:
        print(meter, flush=True)
    if not speaks:
        return
    if failures is not None and (rows := failures.read() if engine is not None and engine.waits else failures.rows):
        sys.exit(f"error: {failures.summary(rows)}")
    if engine is not None and handler is not None and (waiting := handler.incomplete()):
        words = f"{len(waiting)} case{'s' * (len(waiting) > 1)} without a map yet, the first is {waiting[0]}"
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
