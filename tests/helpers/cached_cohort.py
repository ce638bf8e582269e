"""A small cohort, its preprocessing and a cached dataset of it, which count what they compute."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    MapTransform,
    NormalizeIntensityd,
    Orientationd,
    ResizeWithPadOrCropd,
    Spacingd,
)

from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.storage.cache import DiskBackend, LMDBBackend, MemoryBackend
from monai_saliency.storage.key import fingerprint
from monai_saliency.transforms import CheckScand

KINDS = ("memory", "disk", "lmdb", "window")
FILED = KINDS[1:]
AFFINE = np.array([[-1.5, 0.2, 0, 10], [0.1, 2, 0, -20], [0, 0, 2.5, 5], [0, 0, 0, 1]])


class Logged(MapTransform):
    """Writes each case that it sees to a file, so that computations are counted in all processes."""

    def __call__(self, data: Any) -> Any:
        with open(os.environ["COMPUTED"], "a") as log:
            log.write(f"{data['case']}\n")
        return data


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def preprocessing(*more: Any, pixdim: float = 2.0, load: bool = True) -> Compose:
    return Compose(
        [
            Logged("image"),
            LoadImaged("image", dtype="float32"),
            EnsureChannelFirstd("image"),
            CheckScand("image"),
            Orientationd("image", axcodes="RAS", labels=None),
            Spacingd("image", pixdim=[pixdim] * 3, mode="bilinear"),
            ResizeWithPadOrCropd("image", spatial_size=[12, 14, 12]),
            NormalizeIntensityd("image", nonzero=True, channel_wise=True),
            *more,
        ]
    )


def scan(path: Path, seed: int) -> None:
    volume = np.random.default_rng(seed).random((11, 12, 13), dtype=np.float32)
    nib.save(nib.Nifti1Image(volume, AFFINE), path)


def dataset(cohort: Path, cache: str, transform: Any = None, **options: Any) -> CachedDataset:
    options = {"cache_dir": cohort.parent / "cache"} | options
    # Not `transform or ...`: the length of a Compose seeds the random transforms nested in it anew.
    transform = preprocessing() if transform is None else transform
    return CachedDataset(find_cases(cohort), transform, cache, **options)


def digest(item: Any) -> str:
    return fingerprint(item)


def expected(cohort: Path, transform: Any = None) -> list[Any]:
    return list(dataset(cohort, "none", transform))


def all_once(count: int = 1) -> Counter[str]:
    return Counter(dict.fromkeys("abcd", count))


def in_children(works: list[Callable[[], None]]) -> None:
    """Run in forked processes at once."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=work) for work in works]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
        if child.is_alive():
            child.kill()
            child.join()
    assert [child.exitcode for child in children] == [0] * len(children)


def behind(backend: Any) -> DiskBackend | LMDBBackend:
    """What holds the entries for good."""
    return backend.behind if isinstance(backend, MemoryBackend) else backend
