"""Running an evaluator over a cohort, so that every case ends with a map or in the list of failures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser
from monai.data import MetaTensor, decollate_batch, list_data_collate
from monai.engines import IterationEvents, SupervisedEvaluator

from monai_saliency.bundles import calling_parser
from monai_saliency.engines import Cohort, Engine
from monai_saliency.errors import CaseError, OutputError, as_case_error, root_cause
from monai_saliency.failures import Failures
from monai_saliency.files import remove_stale
from monai_saliency.handlers import SaliencyHandler
from monai_saliency.interrupts import stoppable
from monai_saliency.profiling import trace
from monai_saliency.timing import BusyMeter
from monai_saliency.utils import with_meta_of

__all__ = ["CohortEvaluator", "run"]


class CohortEvaluator(SupervisedEvaluator):
    """A ``SupervisedEvaluator`` that goes on where the network, or the postprocessing, fails on a case.

    Where a batch fails, each of its cases is tried alone, so that the others have their predictions and maps.

    Handlers of ``FORWARD_COMPLETED``, where cases are explained, are called after those of ``MODEL_COMPLETED``, where
    predictions are postprocessed: a case ends with a map or in the list of failures, never in both. They still see the
    batch and the output as the network left them. What they raise themselves stops the run.

    Args:
        args: those of ``SupervisedEvaluator``.
        failures: where failed cases go; the error is raised when None.
        meter: counts the time in which the network predicts; the one that explains is to have it as well.
        kwargs: those of ``SupervisedEvaluator``.
    """

    def __init__(
        self, *args: Any, failures: Failures | None = None, meter: BusyMeter | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.failures = failures
        self.meter = meter
        self._predicted = False
        if meter is not None:
            self.inferer = meter.watch(self.inferer)

    def fire_event(self, event_name: Any) -> None:
        """As ignite's, but for the order of two events, see :class:`CohortEvaluator`."""
        if event_name == IterationEvents.FORWARD_COMPLETED:
            return
        if event_name != IterationEvents.MODEL_COMPLETED:
            super().fire_event(event_name)
            return
        forward = self.state.batch, self.state.output
        self.state.batch, self.state.output = map(_copied, forward)
        super().fire_event(event_name)
        self._predicted = True
        processed = self.state.batch, self.state.output
        self.state.batch, self.state.output = forward
        super().fire_event(IterationEvents.FORWARD_COMPLETED)
        self.state.batch, self.state.output = processed

    def _iteration(self, engine: Any, batchdata: Any) -> Any:
        names = [str(name) for name in batchdata.get("case", [])] if isinstance(batchdata, dict) else []
        self._predicted = False
        try:
            return super()._iteration(engine, batchdata)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, OutputError) or not names:
                raise
            if self.failures is None or self._predicted:
                # One that names a case says which of them it was.
                raise (cause if isinstance(cause, CaseError) else as_case_error(error, ", ".join(names))) from error
            if len(names) == 1:
                self.failures.add(names[0], "predict", error)
                return {}
        # The error is gone by now, and with it the memory that its frames held.
        return self._each_alone(engine, batchdata)

    def _each_alone(self, engine: Any, batchdata: dict[str, Any]) -> Any:
        """The outputs of the cases of a batch that do not fail alone, whose items are the engine's batch then."""
        batches, outputs = [], []
        for item in decollate_batch(batchdata):
            engine.state.batch = list_data_collate([item])
            if output := self._iteration(engine, engine.state.batch):
                # One dictionary where batches are not decollated.
                batches += engine.state.batch if isinstance(engine.state.batch, list) else [engine.state.batch]
                outputs += output if isinstance(output, list) else [output]
        engine.state.batch = batches
        return outputs or {}


def _copied(batch: Any) -> Any:
    """A batch of the same voxels for postprocessing, which uses up the record of the transforms that it inverts."""
    if not isinstance(batch, dict):
        return batch
    return {key: with_meta_of(value, value) if isinstance(value, MetaTensor) else value for key, value in batch.items()}


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
        tracker: a context to run it in, such as :class:`monai_saliency.tracking.Tracker`.
        start: runs the evaluator; its own ``run`` by default.
        profile: a folder for a trace of the run, see :func:`monai_saliency.profiling.trace`; none where empty.
        handler: explains; only needed with an engine, or with a store whose folder is not below that of ``failures``.
        engine: shares the cohort with other processes; all is done here by default.
        run_id: the config's id by which this is run; only needed with an engine.
        parser: of the config; by default the one in whose expression this is called.

    Raises:
        ValueError: when an engine is to share what is tracked.
        SystemExit: with one line that sums up the failures, where there are any, or the cases whose parts do not fit
            each other: the program ends with status 1. Of several processes, in those that speak.
        KeyboardInterrupt, SystemExit: when it is stopped, see :func:`monai_saliency.interrupts.stoppable`.
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
