"""Who does what: units of work, and how several workers share a cohort.

A unit of work is a case and a part of its masks, cut between network batches. Nothing else is ever handed out, whatever
hands it out (:mod:`monai_saliency.distributed`): a worker is a process of a SLURM job or of ``torchrun``, or a Ray
actor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from monai_saliency.utils.arguments import check_option, whole_numbers

__all__ = ["WHOLE", "Part", "Unit", "rank_of", "units"]

_SPLITS = ("auto", "cases", "masks")


@dataclass(frozen=True)
class Part:
    """One of several parts of a case's masks, of nearly equal size.

    Args:
        index: which one, from 0.
        count: how many there are.

    Raises:
        ValueError: when the part does not exist.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.index >= self.count:
            raise ValueError(f"`index` must be below `count`: part {self.index} of {self.count} does not exist")

    def of(self, length: int) -> range:
        """The part's share of ``length`` things in a row."""
        return range(length * self.index // self.count, length * (self.index + 1) // self.count)


#: the one part that is all of a case's masks
WHOLE = Part()


@dataclass(frozen=True)
class Unit:
    """A unit of work.

    Args:
        index: of the case in its cohort; or of the loader's batch, in a bundle whose loader decides what a batch is.
        part: of the case's masks.
    """

    index: int
    part: Part = WHOLE


def units(count: int, num_workers: int = 1, split: str = "auto") -> list[Unit]:
    """All units of a cohort; worker r of n takes ``units(...)[r::n]``, or whoever is free the next.

    Args:
        count: cases in the cohort.
        num_workers: how many share it.
        split: what they share:

            - ``"cases"``: each case is one unit;
            - ``"masks"``: each case is ``num_workers`` units, so that all work on the same case, for cohorts of few
              large scans;
            - ``"auto"``: cases, or where there are more workers than cases, parts of cases, as many as keep every
              worker busy with one.

    Raises:
        ValueError: when an argument is out of its range.
    """
    whole_numbers("num_workers", num_workers, 1)
    split = check_option("split", split, _SPLITS)
    if split == "masks":
        parts = [Part(worker, num_workers) for worker in range(num_workers)]
        return [Unit(index, part) for index in range(count) for part in parts]
    if split == "cases" or num_workers <= count or count == 0:
        return [Unit(index) for index in range(count)]
    shared = []
    for worker in range(num_workers):
        number, index = divmod(worker, count)
        workers_of_case = len(range(index, num_workers, count))
        shared.append(Unit(index, Part(number, workers_of_case)))
    return shared


def rank_of(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """The rank of this process, and the number of ranks. Without a process group: 0 and 1."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in `group`: call this on the group's own ranks only")
    return rank, dist.get_world_size(group)
