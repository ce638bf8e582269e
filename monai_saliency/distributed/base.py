"""What an engine is: it hands out the units of work of a cohort, and holds no saliency arithmetic.

An engine's overlay (``python -m monai_saliency overlay NAME``) puts it under the id ``saliency_engine``, where our
bundle's run and the overlay ``explain`` look for one. Each of its processes reads the same config, so each has the
network, the loader and the output folder of the plain run; the engine only decides who explains what.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from monai.engines import Evaluator
from monai.handlers import ClassificationSaver, MetricsSaver

from monai_saliency.data.loader import CohortLoader
from monai_saliency.distributed.loaders import in_order, take
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.inferers.case_explainer import Assignment
from monai_saliency.inferers.inferer import Sharing
from monai_saliency.sharding import Unit
from monai_saliency.storage.failures import Failures
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import event_handlers

__all__ = ["Cohort", "Engine", "local_device"]

Metric = require("ignite.metrics", extra="bundle").Metric
logger = logging.getLogger(__name__)


class Engine(ABC):
    """Runs a cohort over several processes or devices.

    Attributes:
        waits: whether :meth:`run` returns when all processes are done, rather than this one.
        speaks: whether this process, once :meth:`run` has returned, reports the figures of the whole cohort. Where
            processes do not wait for each other, each does.

    Example::

        >>> from monai_saliency.distributed import TorchrunEngine
        >>> isinstance(TorchrunEngine(), Engine)
        True
    """

    waits = True
    speaks = True

    @abstractmethod
    def run(self, cohort: Cohort) -> None:
        """Explain this process's units, and wait for other processes if the engine does so."""


class Cohort:
    """A cohort that is ready to be explained, unit by unit.

    The ``index`` of a unit is a case where the loader is our own. In another bundle it is one of its loader's batches,
    so that every case shares its batch with the same cases as in the plain run.

    Args:
        evaluator: predicts, with its loader.
        handler: explains, attached to the evaluator.
        failures: the cases without a map.
        start: runs the evaluator.
        recipe: makes the same cohort in another process. It must survive cloudpickle. Only needed by engines that start
            processes which do not run the user's command.

    Example::

        >>> import torch
        >>> from monai.engines import SupervisedEvaluator
        >>> import monai_saliency as ms
        >>> network, data = torch.nn.Flatten(), [{"image": torch.rand(1, 1, 2, 2)}]
        >>> evaluator = SupervisedEvaluator(torch.device("cpu"), data, network)
        >>> explain = ms.sliding_window(1, target=ms.ClassScore([0], "none"))
        >>> handler = ms.handlers.SaliencyHandler(explain, network, lambda item: item)
        >>> cohort = Cohort(evaluator, handler, None, evaluator.run)
        >>> cohort.evaluator is evaluator
        True
    """

    def __init__(
        self,
        evaluator: Evaluator,
        handler: SaliencyHandler,
        failures: Failures | None,
        start: Callable[[], Any],
        recipe: Callable[[], Cohort] | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.handler = handler
        self.failures = failures
        self.recipe = recipe
        self._explainer = handler.explainer
        self._start = start
        self._loader: Any = in_order(evaluator.data_loader)
        _drop_what_is_of_all(evaluator)
        # Which algorithm cuDNN finds fastest differs from process to process, and with it the scores' last bits.
        torch.backends.cudnn.benchmark = False

    def __len__(self) -> int:
        """How many cases, or batches, there are."""
        try:
            return len(self._loader.names if isinstance(self._loader, CohortLoader) else self._loader)
        except TypeError:
            kind = type(self._loader).__name__
            raise ValueError(
                f"a cohort can be shared where its loader has a length, and {kind} has none: run it without an engine"
            ) from None

    def explain(
        self, units: Sequence[Unit], sharing: Sharing | None = None, quiet: bool = False
    ) -> list[dict[str, str]]:
        """Explain some units, in their order.

        Args:
            units: what to explain.
            sharing: how devices share the masks of each case; as the inferer does by default.
            quiet: show no progress bar.

        Returns:
            a row for each case that ended here: ``case``, and ``error`` in one line, empty if it has a map now. A case
            of which a part was explained has a row if that was the last of its parts.

        Raises:
            ValueError: when a unit is a part of a case, and no scores are kept.
            CaseError, OutputError: what stops the plain run.
        """
        if self._explainer.store is None and any(unit.part.count > 1 for unit in units):
            raise ValueError(
                "no scores are kept, so the parts of a case cannot come together: keep them (--store_dir, "
                "--saliency_store_dir), or let workers share cases (--saliency_split cases)"
            )
        written, failed = len(self.explained), [*self._failed]
        try:
            for part, group in groupby(units, key=lambda unit: unit.part):
                indices = [unit.index for unit in group]
                # A bundle's own loader is gone through in its own order.
                self._explainer.assign(Assignment(part, sorted(indices), sharing, quiet))
                self._run_over(take(self._loader, indices))
        finally:
            self._explainer.assign(Assignment())
        rows = [{"case": case, "error": ""} for case in self.explained[written:]]
        new = [row for row in self._failed if all(row is not earlier for earlier in failed)]
        return rows + [{"case": row["case"], "error": row["error"]} for row in new]

    def _run_over(self, loader: Any) -> None:
        self.evaluator.data_loader = loader
        # ignite keeps the length of an earlier run, and finds one out itself where the loader does not know it.
        self.evaluator.state.epoch_length = None if isinstance(loader, CohortLoader) else len(loader)
        self._start()

    def expect(self) -> None:
        """Note that every case must have a map or a failure once all processes are done."""
        # Only the summary knows what other processes have done.
        if isinstance(self._loader, CohortLoader) and self.handler.summary is not None:
            self._explainer.expect(self._loader.names)

    @property
    def explained(self) -> list[str]:
        """The cases whose maps are written, by this process or by those whose reports :meth:`take_over` got."""
        return self._explainer.explained

    def take_over(self, explained: Iterable[str], waiting: Iterable[str]) -> None:
        """Note what another process has done."""
        self._explainer.take_over(explained, waiting)

    def take_waiting(self) -> list[str]:
        """The cases explained here since the last call that another process has to finish."""
        return self._explainer.take_waiting()

    @property
    def _failed(self) -> list[dict[str, str]]:
        return [] if self.failures is None else self.failures.rows


def _drop_what_is_of_all(evaluator: Evaluator) -> None:
    """Remove the handlers of a bundle that need the whole cohort: its metrics, and tables that one process would write
    over another's. For a share they mean nothing, and they wait for all processes in the middle of each one's work.
    """
    dropped = set()
    for event, function in list(event_handlers(evaluator)):
        owner = getattr(function, "__self__", function)
        if isinstance(owner, (Metric, MetricsSaver, ClassificationSaver)):
            evaluator.remove_event_handler(function, event)
            dropped.add(type(owner).__name__)
    if dropped:
        evaluator.state.key_metric_name = None
        logger.warning(
            "left out, since each process sees a share of the cohort: %s. Run without an engine for them",
            ", ".join(sorted(dropped)),
        )


def local_device() -> torch.device:
    """The device of this process: the GPU of the node with the process's number on it, or the CPU.

    A GPU becomes the current one, so that what a bundle puts on just ``cuda`` lies there too.

    Example::

        >>> local_device().type in ("cpu", "cuda")
        True
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    # A scheduler may show each process its own GPU only.
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
