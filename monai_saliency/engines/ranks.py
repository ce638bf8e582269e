"""Processes that know their number and how many there are, and share the units between them: ``torchrun``."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from monai_saliency.engines.base import Cohort, Engine
from monai_saliency.engines.distributed import alone, wait_for_all
from monai_saliency.shares import check_rank, units

__all__ = ["RankEngine", "TorchrunEngine"]

# One process may be done long before another: nobody gives up on a share that takes days.
PATIENCE = timedelta(days=30)


class RankEngine(Engine):
    """Process ``rank`` of ``world_size`` does every ``world_size``-th unit, and waits for nobody.

    Args:
        rank: from 0.
        world_size: how many processes share the cohort.
        split: what they share: ``"auto"``, ``"cases"`` or ``"masks"`` (:func:`monai_saliency.shares.units`).
    """

    waits = False

    def __init__(self, rank: int, world_size: int, split: str = "auto") -> None:
        check_rank(rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.split = split

    def run(self, cohort: Cohort) -> None:
        if self.waits:
            cohort.expect()
        cohort.explain(units(len(cohort), self.world_size, self.split)[self.rank :: self.world_size])


class TorchrunEngine(RankEngine):
    """The processes that ``torchrun`` starts: at the end each waits for all, and the first tells the figures.

    Without ``torchrun`` it is the plain run. Nothing goes between the processes but that they are done: scores meet in
    the store, and so a process that ends early can be started again by ``--max-restarts``.

    Args:
        split: see :class:`RankEngine`.
    """

    waits = True

    def __init__(self, split: str = "auto") -> None:
        super().__init__(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), split)
        self.speaks = self.rank == 0

    def run(self, cohort: Cohort) -> None:
        # A bundle for several GPUs may have made a group, whose patience is that of training.
        standing = dist.is_initialized()
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if standing else None
        with alone():
            super().run(cohort)
        if self.world_size > 1:
            if not standing:
                # Only now: while a group stands, whatever a bundle gathers waits for all processes.
                dist.init_process_group("gloo", timeout=PATIENCE)
            wait_for_all(partial(dist.barrier, group))
            if not standing:
                dist.destroy_process_group()
