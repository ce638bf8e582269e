"""An engine hands out the units of work of a cohort, and holds no saliency arithmetic.

An engine's overlay (``python -m monai_saliency overlay NAME``) puts it under the id ``saliency_engine``, where our
bundle's run and the overlay ``explain`` look for one. Each of its processes reads the same config, so each has the
network, the loader and the output folder of the plain run; the engine only decides who explains what.
"""

from __future__ import annotations

import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby, islice
from typing import Any

import torch
from monai.engines import Evaluator
from monai.handlers import ClassificationSaver, MetricsSaver
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from monai_saliency.data.loader import CohortLoader
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.inferers.cohort_explainer import Assignment
from monai_saliency.sharding import Unit, units
from monai_saliency.utils.arguments import require, whole_numbers
from monai_saliency.utils.monai_private import event_handlers, single_process

Metric = require("ignite.metrics", extra="bundle").Metric
logger = logging.getLogger(__name__)
# One process may be done long before another, and must wait for a share that takes days.
PATIENCE = timedelta(days=30)


class Engine(ABC):
    """Runs a cohort over several processes.

    Attributes:
        waits: whether :meth:`run` returns when all processes are done, rather than this one.
        speaks: whether this process, once :meth:`run` has returned, reports the figures of the whole cohort. Where
            processes do not wait for each other, each does.
    """

    waits = True
    speaks = True

    @abstractmethod
    def run(self, cohort: Cohort) -> None:
        """Explain this process's units, and wait for other processes if the engine does so."""


class RankEngine(Engine):
    """Process ``rank`` of ``world_size`` explains every ``world_size``-th unit, and waits for nobody.

    Args:
        rank: the number of this process, from 0.
        world_size: how many processes share the cohort.
        split: what the processes share: ``"auto"``, ``"cases"`` or ``"masks"`` (:func:`monai_saliency.sharding.units`).
    """

    waits = False

    def __init__(self, rank: int, world_size: int, split: str = "auto") -> None:
        whole_numbers("world_size", world_size, 1)
        if rank not in range(world_size):
            raise ValueError(f"`rank` must be in [0, {world_size}), the number of processes, got {rank}")
        self.rank = rank
        self.world_size = world_size
        self.split = split

    def run(self, cohort: Cohort) -> None:
        if self.waits:
            cohort.expect()
        # What a bundle gathers over a process group would wait for other processes in the middle of their work.
        with single_process():
            cohort.explain(units(len(cohort), self.world_size, self.split)[self.rank :: self.world_size])
        try:
            self.wait()
        except RuntimeError:
            raise RuntimeError("another process has ended before its share was done: see its own message") from None

    def wait(self) -> None:
        """Wait until all processes are done, where ``waits``."""


class Cohort:
    """A cohort that is ready to be explained, unit by unit.

    The ``index`` of a unit is a case where the loader is our own. In another bundle it is one of its loader's batches,
    so that every case shares its batch with the same cases as in the plain run.

    Args:
        evaluator: predicts, with its loader.
        handler: explains, attached to the evaluator.
        start: runs the evaluator.
        recipe: makes the same cohort in another process. It must survive cloudpickle. Only needed by engines that start
            processes which do not run the user's command.

    Attributes:
        explainer: explains the cases; it knows which have a map, and which wait for another process.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        handler: SaliencyHandler,
        start: Callable[[], Any],
        recipe: Callable[[], Cohort] | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.explainer = handler.explainer
        self.recipe = recipe
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
            raise ValueError(f"{kind} has no length, so it cannot be shared: run it without an engine") from None

    def explain(self, units: Sequence[Unit], quiet: bool = False) -> None:
        """Explain some units, in their order.

        Args:
            units: what to explain.
            quiet: show no progress bar.
        """
        try:
            for part, group in groupby(units, key=lambda unit: unit.part):
                # A bundle's own loader is gone through in its own order.
                indices = sorted(unit.index for unit in group)
                self.explainer.assignment = Assignment(part, indices, quiet)
                loader = self.evaluator.data_loader = take(self._loader, indices)
                # ignite keeps the length of an earlier run, and finds one out itself where the loader does not know it.
                self.evaluator.state.epoch_length = None if isinstance(loader, CohortLoader) else len(loader)
                self._start()
        finally:
            self.explainer.assignment = Assignment()

    def expect(self) -> None:
        """Note that every case must have a map or a failure once all processes are done."""
        # Only the summary knows what other processes have done.
        if isinstance(self._loader, CohortLoader):
            self.explainer.waiting = list(self._loader.names)


def in_order(loader: Any) -> Any:
    """A loader that makes the same batches in every process: the same one, or a copy without its random sampler."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, (RandomSampler, DistributedSampler)):
        return loader
    logger.warning(
        "the loader's %s gives each process other cases or another order: the cases are taken in the dataset's",
        type(sampler).__name__,
    )
    order = SequentialSampler(loader.dataset)
    return _copy_with(loader, sampler=order, batch_sampler=BatchSampler(order, loader.batch_size, loader.drop_last))


def take(loader: Any, indices: Sequence[int]) -> Any:
    """A loader of some of another one's batches, in its order; of our own loader's cases."""
    if isinstance(loader, CohortLoader):
        return loader.take(indices)
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return _copy_with(loader, batch_sampler=_Chosen(loader.batch_sampler, indices))
    return _Chosen(loader, indices)


def _copy_with(loader: DataLoader, **samplers: Any) -> DataLoader:
    """A copy of a loader, which refuses to have its samplers set, with other ones."""
    taken = copy.copy(loader)
    vars(taken).update(samplers)
    return taken


class _Chosen:
    """Some of the values of an iterable, by their sorted places."""

    def __init__(self, values: Any, indices: Sequence[int]) -> None:
        self.dataset = getattr(values, "dataset", None)
        self._values = values
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        chosen = set(self._indices)
        if not chosen:
            return
        for place, value in enumerate(islice(self._values, max(chosen) + 1)):
            if place in chosen:
                yield value


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
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    # A scheduler may show each process its own GPU only.
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
