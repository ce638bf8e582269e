"""Processes that know their number and how many there are, and share the units between them."""

from __future__ import annotations

from datetime import timedelta

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.sharding import check_rank, units

__all__ = ["RankEngine"]

# One process may be done long before another: nobody gives up on a share that takes days.
PATIENCE = timedelta(days=30)


class RankEngine(Engine):
    """Process ``rank`` of ``world_size`` does every ``world_size``-th unit, and waits for nobody.

    Args:
        rank: from 0.
        world_size: how many processes share the cohort.
        split: what they share: ``"auto"``, ``"cases"`` or ``"masks"`` (:func:`monai_saliency.sharding.units`).
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
