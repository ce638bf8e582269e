"""Loaders of a cohort that several processes share: every process makes the same batches, and takes some of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

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

__all__ = ["in_order", "take"]

logger = logging.getLogger(__name__)

_BY_CHANCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def in_order(loader: Any) -> Any:
    """A loader that makes the same batches in every process: the same one, or a copy without its random sampler."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, _BY_CHANCE):
        return loader
    words = f"the loader's {type(sampler).__name__} gives each process other cases or another order"
    if not isinstance(sampler, (RandomSampler, DistributedSampler)) or loader.batch_size is None:
        raise ValueError(f"{words}, so they cannot share the cohort: give it none, or run it without an engine")
    logger.warning("%s: the cases are taken in the dataset's", words)
    order = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    return _copy_with(loader, sampler=order, batch_sampler=BatchSampler(order, loader.batch_size, loader.drop_last))


def take(loader: Any, indices: Sequence[int]) -> Any:
    """A loader of some of another one's batches, in its order; of our own loader's cases."""
    if isinstance(loader, CohortLoader):
        return loader.take(indices)
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return _copy_with(loader, batch_sampler=_Chosen(loader.batch_sampler, indices))
    return _Chosen(loader, indices)


def _copy_with(loader: DataLoader, **samplers: Any) -> DataLoader:
    """A copy of a loader with other samplers. Making one anew would need the arguments of its own class, and setting
    them is refused once a loader is made.
    """
    taken = copy.copy(loader)
    vars(taken).update(samplers)
    return taken


class _Chosen:
    """Some of the values of an iterable, by their places, in its order."""

    def __init__(self, values: Any, indices: Sequence[int]) -> None:
        self.values = values
        self.indices = sorted(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        stop = self.indices[-1] + 1 if self.indices else 0
        chosen = set(self.indices)
        return (value for place, value in enumerate(islice(self.values, stop)) if place in chosen)

    def __getattr__(self, name: str) -> Any:
        if name == "values":  # missing while the object is being copied
            raise AttributeError(name)
        return getattr(self.values, name)
