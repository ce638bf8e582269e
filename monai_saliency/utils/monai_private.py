"""Every private name of another package that this package relies on.

A new release of MONAI, torch or ignite is checked here, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from monai.engines import SupervisedEvaluator

# MONAI has no public function for the step from patch to patch, which it rounds in its own way.
from monai.inferers.utils import _get_scan_interval as scan_interval
from monai.metrics import CumulativeIterationMetric

# Only the configuration that torch calls experimental records all threads, and cases are loaded and saved in others.
from torch.profiler import _ExperimentalConfig

# torch has no public functions for tensors in nested containers.
from torch.utils._pytree import tree_leaves, tree_map

from monai_saliency.utils.arguments import require

__all__ = ["scan_interval", "tree_leaves", "tree_map"]


class IterationEvaluator(SupervisedEvaluator):
    """A ``SupervisedEvaluator`` with a public method for an iteration, which MONAI's subclasses override as private."""

    def iterate(self, engine: Any, batchdata: Any) -> Any:
        """Predict one batch. Subclasses override this."""
        return super()._iteration(engine, batchdata)

    def _iteration(self, engine: Any, batchdata: Any) -> Any:
        return self.iterate(engine, batchdata)


class BatchMetric(CumulativeIterationMetric):
    """A cumulative metric with a public method for a batch. The method that MONAI's subclasses override is private."""

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Measure one batch, without adding it to the metric's buffer. Subclasses override this."""
        raise NotImplementedError

    def _compute_tensor(self, y_pred: torch.Tensor, y: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return self.compute(y_pred, y, **kwargs)


def profile_all_threads() -> Any:
    """The ``experimental_config`` with which ``torch.profiler.profile`` records all threads."""
    return _ExperimentalConfig(profile_all_threads=True)


def tensor_version(tensor: torch.Tensor) -> int:
    """How many changes in place autograd has counted. No public attribute has this number."""
    return 0 if tensor.is_inference() else tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another, for autograd."""
    return tensor._is_view()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is the wrapper that ``torch.compile`` makes, whose class is in a private module."""
    return type(module).__module__ == "torch._dynamo.eval_frame"


def holds_compiled(network: Any) -> bool:
    """Whether a part of a network is compiled by ``torch.compile``, or will be at its first call."""
    if not isinstance(network, torch.nn.Module):
        return False
    return any(is_compiled(part) or getattr(part, "compiles", False) is True for part in network.modules())


def heeding_hooks() -> Any:
    """While this is entered, a compiled module runs hooks that it was given afterwards. By default it does not."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


def event_handlers(engine: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """The events and handlers of an ignite engine. The public methods only add, remove, and look for one handler."""
    for event, handlers in list(engine._event_handlers.items()):
        for function, *_ in list(handlers):
            yield event, function


def postprocessing_of(evaluator: Any) -> Any:
    """The transform that a MONAI evaluator applies to its outputs; None without one. It keeps it in a closure alone."""
    for _, function in event_handlers(evaluator):
        if getattr(function, "__name__", "") == "_run_postprocessing" and function.__closure__:
            return inspect.getclosurevars(function).nonlocals.get("posttrans")
    return None


@contextmanager
def single_process() -> Iterator[None]:
    """Let ``ignite.distributed`` report one process, whatever process group there is. It has no public switch."""
    ignite: Any = require("ignite.distributed.utils", extra="bundle")
    serial = require("ignite.distributed.comp_models", extra="bundle")._SerialModel
    before = ignite._model, ignite._need_to_sync
    ignite._model, ignite._need_to_sync = serial(), False
    try:
        yield
    finally:
        ignite._model, ignite._need_to_sync = before


def set_experiment(handler: Any) -> None:
    """Let a ``monai.handlers.MLFlowHandler`` find or make its experiment. Its public ``start`` also begins a run."""
    handler._set_experiment()
