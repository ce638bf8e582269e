"""A cached dataset in several threads and processes at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fork_server
from helpers.cached_cohort import (
    FILED,
    dataset,
    digest,
    expected,
    in_children,
    in_threads,
)
from helpers.paths import ROOT, TESTS
from torch.utils.data import DataLoader

from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.storage.cache import LMDBBackend


def only(batch: list[Any]) -> Any:
    return batch[0]


class Digests(torch.utils.data.Dataset):
    """What a worker process reads, as seen there."""

    def __init__(self, items: CachedDataset) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        return digest(self.items[index])


@pytest.mark.slow
def test_a_second_python_run(cohort: Path, computed: Any) -> None:
    uncached = [digest(item) for item in expected(cohort)]
    for cache in FILED:
        list(dataset(cohort, cache, cache_dir=cohort.parent / cache))
    computed()
    code = f"from helpers.cached_cohort import print_digests; print_digests({str(cohort)!r})"
    path = os.pathsep.join([str(TESTS), str(ROOT)])
    strict = "import warnings; warnings.filterwarnings('error', 'cached')"
    run = fork_server.run(["-c", f"{strict}; {code}"], env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "5"})
    assert run.returncode == 0, run.stderr
    assert [line.split() for line in run.stdout.splitlines()] == [uncached] * 3
    assert computed() == {}


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


def test_database_grows(cohort: Path, computed: Any) -> None:
    """Beyond its first size, in threads, and for a connection that did not make it grow."""
    database = LMDBBackend(cohort.parent / "cache" / "x.lmdb", map_size=1 << 16)
    other = LMDBBackend(cohort.parent / "cache" / "x.lmdb", map_size=1 << 16)
    payload = {f"{number:064d}": os.urandom(100_000 + number) for number in range(12)}

    def write(keys: list[str]) -> None:
        for key in keys:
            database.put(key, payload[key])

    keys = list(payload)
    in_threads([lambda: write(keys[::2]), lambda: write(keys[1::2])])
    in_children([lambda: other.put("1" * 64, b"child")])
    assert all(other.get(key) == data for key, data in payload.items())
    assert database.get("1" * 64) == b"child"
