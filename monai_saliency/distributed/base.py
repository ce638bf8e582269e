"""What an engine is: it hands out a cohort's units of work, and holds no saliency arithmetic.

An engine's overlay (``python -m monai_saliency overlay NAME``) puts it under the id ``saliency_engine``, where our
bundle's run and the overlay ``explain`` look for one. Each of its processes reads the same config, so each has the
network, the loader and the output folder of the plain run; the engine only says who explains what.
"""

from __future__ import annotations

import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch
from monai.engines import Evaluator
from monai.handlers import ClassificationSaver, MetricsSaver
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from monai_saliency.data.loader import CohortLoader
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.sharding import Unit
from monai_saliency.storage.failures import Failures
from monai_saliency.utils.monai_private import event_handlers
from monai_saliency.utils.optional_imports import require

__all__ = ["Cohort", "Engine", "local_device"]

Metric = require("ignite.metrics", extra="bundle").Metric
logger = logging.getLogger(__name__)

_BY_CHANCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class Engine(ABC):
    """Runs a cohort over several processes or devices.

    Attributes:
        waits: whether :meth:`run` returns when all processes are done, rather than this one.
        speaks: whether this process, once :meth:`run` has returned, tells the figures of the whole cohort. Where
            processes do not wait for each other, each does.
    """

    waits = True
    speaks = True

    @abstractmethod
    def run(self, cohort: Cohort) -> None:
        """Have this process's units explained, and wait for what others do, where that is the engine's way."""


class Cohort:
    """A cohort that is ready to be explained, unit by unit.

    A unit's ``index`` is a case where the loader is our own. In another bundle it is one of the batches that its loader
    makes, so that every case shares its batch with those that it shares it with in the plain run.

    Args:
        evaluator: predicts, with its loader.
        handler: explains, attached to the evaluator.
        failures: the cases without a map.
        start: runs the evaluator.
        config: the bundle's config as the plain run reads it, for processes that have to read it themselves.
        run_id: the id by which it is run.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        handler: SaliencyHandler,
        failures: Failures | None,
        start: Callable[[], Any],
        config: dict[str, Any],
        run_id: str,
    ) -> None:
        self.evaluator = evaluator
        self.handler = handler
        self.failures = failures
        self.config = config
        self.run_id = run_id
        self._start = start
        self._loader: Any = _in_order(evaluator.data_loader)
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

    def explain(self, units: Sequence[Unit]) -> list[dict[str, str]]:
        """Explain some units, in their order.

        Returns:
            a row for each case that ended here: ``case``, and ``error`` in one line, empty where it has a map now. The
            case of a part is in it where that was the last of its parts.

        Raises:
            ValueError: when a unit is a part of a case, and no scores are kept.
            CaseError, OutputError: what stops the plain run.
        """
        if self.handler.store is None and any(unit.part.count > 1 for unit in units):
            raise ValueError(
                "no scores are kept, so the parts of a case cannot come together: keep them (--store_dir, "
                "--saliency_resume), or let workers share cases (--saliency_split cases)"
            )
        written, failed = len(self.handler.explained), len(self._failed)
        for part, group in groupby(units, key=lambda unit: unit.part):
            self.handler.part = part
            indices = [unit.index for unit in group]
            self.handler.places = sorted(indices)  # as a bundle's own loader is gone through
            loader = _take(self._loader, indices)
            self.evaluator.data_loader = loader
            # Known to ignite from an earlier run, or to be found out where the loader does not know it.
            self.evaluator.state.epoch_length = None if isinstance(loader, CohortLoader) else len(loader)
            self._start()
        rows = [{"case": case, "error": ""} for case in self.handler.explained[written:]]
        return rows + [{"case": row["case"], "error": row["error"]} for row in self._failed[failed:]]

    def expect(self) -> None:
        """Note that every case must have a map or a failure once all processes are done."""
        # Only the summary knows what other processes have done.
        if isinstance(self._loader, CohortLoader) and self.handler.summary is not None:
            self.handler.waiting = list(self._loader.names)

    @property
    def _failed(self) -> list[dict[str, str]]:
        return [] if self.failures is None else self.failures.rows


def _drop_what_is_of_all(evaluator: Evaluator) -> None:
    """Leave out what a bundle makes of a whole cohort: its metrics, and the tables that one process would write over
    those of another. Of a share they say nothing, and they wait for all processes in the middle of each one's own work.
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


def _in_order(loader: Any) -> Any:
    """A loader that gives every process the same batches.

    Raises:
        ValueError: when it draws some cases only.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, _BY_CHANCE):
        return loader
    words = f"the loader's {type(sampler).__name__} gives each process other cases or another order"
    if not isinstance(sampler, (RandomSampler, DistributedSampler)) or loader.batch_size is None:
        raise ValueError(f"{words}, so they cannot share the cohort: give it none, or run it without an engine")
    logger.warning("%s: the cases are taken in the dataset's", words)
    taken = copy.copy(loader)
    order = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    _set(taken, "sampler", order)
    _set(taken, "batch_sampler", BatchSampler(order, loader.batch_size, loader.drop_last))
    return taken


def _set(loader: DataLoader, name: str, value: Any) -> None:
    """Give a loader another sampler, which it refuses once it is made; it cannot be made anew without its own class."""
    object.__setattr__(loader, name, value)


def _take(loader: Any, indices: Sequence[int]) -> Any:
    """A loader of some of the cases or batches of another."""
    if isinstance(loader, CohortLoader):
        return loader.take(indices)
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        taken = copy.copy(loader)
        _set(taken, "batch_sampler", _Chosen(loader.batch_sampler, indices))
        return taken
    return _Chosen(loader, indices)


class _Chosen:
    """Some of the things that an iterable gives, by their places."""

    def __init__(self, things: Any, indices: Sequence[int]) -> None:
        self.things = things
        self.indices = sorted(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        stop = self.indices[-1] + 1 if self.indices else 0
        chosen = set(self.indices)
        return (thing for place, thing in enumerate(islice(self.things, stop)) if place in chosen)

    def __getattr__(self, name: str) -> Any:
        if name == "things":  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.things, name)


def local_device() -> torch.device:
    """The device of this process: of the node's GPUs the one with the number of the process on it, or the CPU.

    A GPU becomes the current one, so that what a bundle puts on just ``cuda`` lies there too.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    # A scheduler may show each process its own GPU only.
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
