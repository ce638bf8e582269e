"""Caches of preprocessed scans."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from monai_saliency.storage.cache import DiskBackend, LMDBBackend, MemoryBackend

KINDS = ("memory", "disk", "lmdb", "window")


FILED = ("disk", "lmdb", "window")


def behind(backend: Any) -> DiskBackend | LMDBBackend:
    """What holds the entries for good."""
    return backend.behind if isinstance(backend, MemoryBackend) else backend


def in_threads(works: list[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()
