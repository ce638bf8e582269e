"""An evaluator that goes on when a case fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from monai.data import MetaTensor, decollate_batch, list_data_collate
from monai.engines import IterationEvents
from monai.networks import eval_mode

from monai_saliency.errors import CaseError, OutputError, SettingError, as_case_error, root_cause
from monai_saliency.inferers.forward import evaluating
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.monai_private import IterationEvaluator
from monai_saliency.utils.tensors import with_meta_of


class CohortEvaluator(IterationEvaluator):
    """A ``SupervisedEvaluator`` that continues when the network or the postprocessing fails on a case.

    If a batch fails, each of its cases is tried alone, so that the others have their predictions and maps.

    Handlers of ``FORWARD_COMPLETED``, where cases are explained, are called after the handlers of ``MODEL_COMPLETED``,
    where predictions are postprocessed: a case ends with a map or in the list of failures, never in both. They still
    see the batch and the output as the network left them, so postprocessing must not change an output in place. Errors
    that they raise stop the run.

    Args:
        args: positional arguments of ``SupervisedEvaluator``.
        failures: the list of failed cases. The error is raised when None.
        kwargs: named arguments of ``SupervisedEvaluator``.
    """

    def __init__(self, *args: Any, failures: Failures | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures = failures
        self._predicted = False
        if self.mode is eval_mode:
            self.mode: Any = _evaluating

    def fire_event(self, event_name: Any) -> None:
        """Fire an event as ignite does, except for the order of two events, see :class:`CohortEvaluator`."""
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

    def iterate(self, engine: Any, batchdata: Any) -> Any:
        names = [str(name) for name in batchdata.get("case", [])] if isinstance(batchdata, dict) else []
        self._predicted = False
        try:
            return super().iterate(engine, batchdata)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, (OutputError, SettingError)) or not names:
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


def _copied(batch: Any) -> Any:
    """A batch with the same voxels for postprocessing, which removes the recorded transforms that it inverts."""
    if not isinstance(batch, dict):
        return batch
    return {key: with_meta_of(value, value) if isinstance(value, MetaTensor) else value for key, value in batch.items()}
