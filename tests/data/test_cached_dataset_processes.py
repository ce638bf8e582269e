"""A cached dataset in several threads and processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cached_cohort import (
    dataset,
    digest,
    expected,
    in_children,
)
from torch.utils.data import DataLoader

from monai_saliency.data.cached_dataset import CachedDataset


class Digests(torch.utils.data.Dataset):
    """What a worker process reads, as seen there."""

    def __init__(self, items: CachedDataset) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        return digest(self.items[index])


@pytest.mark.parametrize("cache", ["memory", "lmdb"])
def test_two_worker_processes(cohort: Path, cache: str, computed: Any) -> None:
    uncached = [digest(item) for item in expected(cohort)]
    computed()
    shared = dataset(cohort, cache)
    for _ in range(2):
        assert list(DataLoader(Digests(shared), batch_size=None, num_workers=2)) == uncached
    if cache == "lmdb":
        # Two processes may both be first, but none computes what it finds.
        assert max(computed().values()) <= 2


@pytest.mark.parametrize("cache", ["disk", "lmdb"])
def test_two_processes_on_one_cache(cohort: Path, cache: str, computed: Any) -> None:
    uncached = [digest(item) for item in expected(cohort)]
    own = dataset(cohort, cache)
    computed()

    def child() -> None:
        items = dataset(cohort, cache)
        for _ in range(2):
            assert [digest(item) for item in items] == uncached

    in_children([child, child])
    assert max(computed().values()) <= 2
    assert [digest(item) for item in own] == uncached
    assert computed() == {}
    assert not list((cohort.parent / "cache").rglob(".tmp-*"))
