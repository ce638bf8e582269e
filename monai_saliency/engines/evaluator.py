"""An evaluator that goes on when a case fails, and the run of a cohort, which a signal or an error may stop."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from monai.data import MetaTensor, decollate_batch, list_data_collate
from monai.engines import IterationEvents, SupervisedEvaluator
from monai.networks import eval_mode
from monai.utils import OptionalImportError

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.errors import CaseError, OutputError, as_case_error, root_cause
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.inferers.forward import evaluating
from monai_saliency.storage.files import remove_stale
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.monai_private import IterationEvaluator, tensor_version, tree_leaves
from monai_saliency.utils.tensors import with_meta_of
from monai_saliency.utils.timing import trace
from monai_saliency.visualize.report import try_report

__all__ = ["CohortEvaluator", "run", "show_cause_only", "stoppable"]

_STOPPED = (
    "stopped by {}. What was written is whole; run the same command again to go on: scores that are kept are not "
    "computed again"
)


class CohortEvaluator(IterationEvaluator):
    """A ``SupervisedEvaluator`` that continues when the network or the postprocessing fails on a case.

    If a batch fails, each of its cases is tried alone, so that the others have their predictions and maps.

    Handlers of ``FORWARD_COMPLETED``, where cases are explained, are called after the handlers of ``MODEL_COMPLETED``,
    where predictions are postprocessed: a case ends with a map or in the list of failures, never in both. They still
    see the batch and the output as the network left them. Errors that they raise stop the run.

    Attributes:
        output_changed: whether postprocessing has changed the network's output of this batch in place.

    Args:
        args: positional arguments of ``SupervisedEvaluator``.
        failures: the list of failed cases. The error is raised when None.
        kwargs: named arguments of ``SupervisedEvaluator``.
    """

    def __init__(self, *args: Any, failures: Failures | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures = failures
        self._predicted = False
        self.output_changed = False
        self._versions: list[int] = []
        if self.mode is eval_mode:
            self.mode: Any = _evaluating

    def fire_event(self, event_name: Any) -> None:
        """Fire an event as ignite does, except for the order of two events, see :class:`CohortEvaluator`."""
        if event_name == IterationEvents.FORWARD_COMPLETED:
            self._versions = _versions(self.state.output)
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
        self.output_changed = self._versions != _versions(self.state.output)
        super().fire_event(IterationEvents.FORWARD_COMPLETED)
        self.state.batch, self.state.output = processed

    def iterate(self, engine: Any, batchdata: Any) -> Any:
        names = [str(name) for name in batchdata.get("case", [])] if isinstance(batchdata, dict) else []
        self._predicted = False
        try:
            return super().iterate(engine, batchdata)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, OutputError) or not names:
                raise
            if self.failures is None or self._predicted:
                # A `CaseError` names the case of the batch that failed.
                raise (cause if isinstance(cause, CaseError) else as_case_error(error, ", ".join(names))) from error
            if len(names) == 1:
                self.failures.add(names[0], "predict", error)
                return {}
        # The error is gone by now, and with it the memory that its frames held.
        return self._each_alone(engine, batchdata)

    def _each_alone(self, engine: Any, batchdata: dict[str, Any]) -> Any:
        """Try each case of a batch alone. The outputs of those that do not fail; their items become the batch."""
        batches, outputs = [], []
        for item in decollate_batch(batchdata):
            engine.state.batch = list_data_collate([item])
            if output := self.iterate(engine, engine.state.batch):
                # A dictionary if batches are not decollated.
                batches += engine.state.batch if isinstance(engine.state.batch, list) else [engine.state.batch]
                outputs += output if isinstance(output, list) else [output]
        engine.state.batch = batches
        return outputs or {}


@contextmanager
def _evaluating(network: torch.nn.Module) -> Iterator[None]:
    """What ``monai.networks.eval_mode`` does, for a network that may have no mode, or hide its members in a list."""
    with evaluating(network), torch.no_grad():
        yield


def _versions(output: Any) -> list[int]:
    """How often each tensor of an output was changed in place, as far as it is counted."""
    leaves = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
    return [tensor_version(each) for each in leaves if not each.is_inference()]


def _copied(batch: Any) -> Any:
    """A batch with the same voxels for postprocessing, which removes the recorded transforms that it inverts."""
    if not isinstance(batch, dict):
        return batch
    return {key: with_meta_of(value, value) if isinstance(value, MetaTensor) else value for key, value in batch.items()}


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

    The last line is the path of the report.

    Args:
        evaluator: predicts, with its loader.
        failures: the list of failed cases, which the evaluator and its handler add to.
        tracker: a context to run it in, such as :class:`monai_saliency.handlers.mlflow.Tracker`.
        start: runs the evaluator; its own ``run`` by default.
        profile: a folder for a trace of the run, see :func:`monai_saliency.utils.timing.trace`; none where empty.
        handler: explains; only needed with an engine, or if the store is not below the folder of ``failures``.
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
    store = None if handler is None else handler.store
    for folder in {path for path in (failures and failures.path.parent, store and store.root) if path}:
        remove_stale(folder)  # of killed runs
    with stoppable(), tracker or nullcontext(), trace(profile) if profile else nullcontext():
        if engine is None:
            start()
        elif handler is None:
            raise ValueError("an engine needs the `handler` that explains")
        else:
            engine.run(Cohort(evaluator, handler, start, recipe))
            evaluator.state.metrics.update(handler.figures())
            handler.write_trust()
    # A process that does not speak ends well: whoever started it would stop the others, who may still be writing.
    if engine is not None and not engine.speaks:
        return
    _print_figures(evaluator)
    if report is not None and any((Path(report) / name).is_file() for name in ("summary.csv", "failures.csv")):
        try_report(report)
    if failures is not None and (rows := failures.read() if engine is not None and engine.waits else failures.rows):
        sys.exit(f"error: {failures.summary(rows)}")
    if handler is not None and (waiting := handler.incomplete(alike=engine is None)):
        words = f"{len(waiting)} case{'s' * (len(waiting) > 1)} without a map yet, the first is {waiting[0]}"
        if engine is None or engine.waits:
            sys.exit(
                f"error: {words}: all processes are done, and either another run held it, or its parts are of "
                "different weights. The same command, without an engine, explains what is missing"
            )
        print(f"{words}: whoever scores the last part makes its map, and so does the same command without the engine")


def _print_figures(evaluator: SupervisedEvaluator) -> None:
    numbers = {name: value for name, value in evaluator.state.metrics.items() if isinstance(value, (int, float))}
    if numbers:
        print("cohort: " + ", ".join(f"{name} {value:.7g}" for name, value in numbers.items()), flush=True)


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
        debug: print the traceback before that line, as ``--debug`` does.
    """
    previous = getattr(sys.excepthook, "previous", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and error.args:
            print(f"\n{error}", file=sys.stderr)
            return
        if debug or not isinstance(error, Exception):
            previous(kind, error, trace)
        cause = root_cause(error)
        is_ours = isinstance(cause, (ValueError, OutputError, OptionalImportError))
        if not (debug or is_ours):
            print("\nthe traceback is shown by --debug (--saliency_debug in another bundle)", file=sys.stderr)
        if isinstance(error, Exception):
            print(f"\nerror: {'' if is_ours else f'{type(cause).__name__}: '}{cause}", file=sys.stderr)

    hook.previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook
