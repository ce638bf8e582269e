"""Processes that share a cohort by their ranks: each knows its own rank and the number of processes."""

from __future__ import annotations

from datetime import timedelta

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.sharding import check_rank, units

__all__ = ["RankEngine"]

# One process may be done long before another, and must wait for a share that takes days.
PATIENCE = timedelta(days=30)


class RankEngine(Engine):
    """Process ``rank`` of ``world_size`` explains every ``world_size``-th unit, and waits for nobody.

    Args:
        rank: the number of this process, from 0.
        world_size: how many processes share the cohort.
        split: what the processes share: ``"auto"``, ``"cases"`` or ``"masks"`` (:func:`monai_saliency.sharding.units`).

    Example::

        >>> from monai_saliency.sharding import units
        >>> engine = RankEngine(rank=1, world_size=3)
        >>> [unit.index for unit in units(5)[engine.rank :: engine.world_size]]
        [1, 4]
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
