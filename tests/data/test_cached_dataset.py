"""A cached dataset: the same to the bit, nothing stale, copies, random transforms, the window."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch
from helpers.cached_cohort import FILED, KINDS, all_once, dataset, expected, preprocessing, scan
from helpers.items import assert_same
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    EnsureTyped,
    RandFlipd,
    RandGaussianNoised,
)
from monai.utils.enums import MetaKeys

from monai_saliency.errors import CaseError
from monai_saliency.storage.cache import MemoryBackend


@pytest.mark.parametrize("cache", KINDS)
def test_cold_and_warm(cohort: Path, cache: str, computed: Any) -> None:
    """Keys, voxels, affine, meta data, applied operations, types; in one dataset, the next, and one sent by pickle."""
    uncached = expected(cohort)
    assert computed() == all_once()
    cold = dataset(cohort, cache)
    again = pickle.loads(pickle.dumps(cold))
    assert len(cold) == 4
    for _ in range(2):
        for item, reference in zip(cold, uncached, strict=True):
            assert_same(item, reference)
    assert computed() == all_once()
    for later in (dataset(cohort, cache), again, pickle.loads(pickle.dumps(cold))):
        for item, reference in zip(later, uncached, strict=True):
            assert_same(item, reference)
        assert computed() == (all_once() if cache == "memory" else {})
    image = uncached[0]["image"]
    assert isinstance(image, MetaTensor)
    assert image.meta["filename_or_obj"].endswith("a.nii.gz")
    assert len(image.applied_operations) == 3


def test_enumerations_as_early_python_3_11_pickles_them(cohort: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``getattr``, which a store that runs no code does not read."""
    monkeypatch.setattr(MetaKeys, "__reduce_ex__", lambda self, _: (getattr, (MetaKeys, self.name)))
    assert_same(dataset(cohort, "memory")[0], expected(cohort)[0])


def test_no_database_stays_open(cohort: Path) -> None:
    """LMDB refuses to open one twice in a process."""
    read = dataset(cohort, "lmdb")
    assert len(list(read)) == 4
    with lmdb.open(str(cohort.parent / "cache/cache.lmdb"), subdir=False, lock=False) as environment:
        assert environment.stat()["entries"] == 4
    assert read[0]["case"] == "a"


@pytest.mark.parametrize("cache", ["memory", "lmdb"])
def test_a_broken_scan_is_alone(cohort: Path, cache: str, computed: Any) -> None:
    whole = (cohort / "b.nii.gz").read_bytes()
    (cohort / "b.nii.gz").write_bytes(whole[: len(whole) // 2])
    items = dataset(cohort, cache)
    (cohort / "c.nii.gz").unlink()
    for _ in range(2):
        for index, what in ((1, "b: .*b.nii.gz could not be loaded"), (2, "c: .*c.nii.gz does not exist")):
            with pytest.raises(CaseError, match=f"^case {what}"):
                items[index]
        assert items[0]["case"] == "a"
        assert items[3]["case"] == "d"
    # What failed is tried again, and found when it is mended.
    assert computed() == {"a": 1, "d": 1, "b": 2, "c": 2}
    (cohort / "b.nii.gz").write_bytes(whole)
    assert items[1]["case"] == "b"
    # A scan that is removed is not served from the cache.
    (cohort / "a.nii.gz").unlink()
    with pytest.raises(CaseError, match="case a"):
        items[0]


@pytest.mark.parametrize("cache", FILED)
def test_what_changed_is_computed(cohort: Path, cache: str, computed: Any) -> None:
    list(dataset(cohort, cache))
    computed()
    list(dataset(cohort, cache))
    assert computed() == {}
    list(dataset(cohort, cache, preprocessing(pixdim=2.5)))
    assert computed() == all_once()
    os.utime(cohort / "b.nii.gz", ns=(1, 1))
    list(dataset(cohort, cache))
    assert computed() == {"b": 1}
    scan(cohort / "c.nii.gz", 99)
    for item, reference in zip(dataset(cohort, cache), expected(cohort), strict=True):
        assert_same(item, reference)
    assert computed() == all_once() + Counter("c")
    list(dataset(cohort, cache))
    list(dataset(cohort, cache, preprocessing(pixdim=2.5)))
    assert computed() == {"b": 1, "c": 1}


def test_checksums(cohort: Path, computed: Any) -> None:
    """A scan replaced by one of the same size and time is noticed; one that was only touched is not computed."""
    plain = cohort / "a.nii"
    scan(plain, 0)
    (cohort / "a.nii.gz").unlink()
    os.utime(plain, ns=(1, 1))
    list(dataset(cohort, "disk", checksum=True))
    computed()
    scan(plain, 5)
    os.utime(plain, ns=(1, 1))
    assert_same(dataset(cohort, "disk", checksum=True)[0], expected(cohort)[0])
    computed()
    os.utime(plain)
    list(dataset(cohort, "disk", checksum=True))
    assert computed() == {}


def random_pipeline() -> Compose:
    return preprocessing(RandGaussianNoised("image", prob=1.0), Compose([RandFlipd("image", prob=0.5)]))


@pytest.mark.parametrize("cache", ["memory", "window"])
def test_random_transforms_stay_random(cohort: Path, cache: str, computed: Any) -> None:
    """They draw anew at each read, as without a cache, to the bit."""
    reads = []
    for kind in ("none", cache):
        items = dataset(cohort, kind, random_pipeline().set_random_state(3))
        reads.append([items[i]["image"].as_tensor() for _ in range(2) for i in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*reads, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(reads[1][:4], reads[1][4:], strict=True))
    assert computed() == all_once(3)


@pytest.mark.parametrize("folder", [None, "cache"])
def test_window(cohort: Path, folder: str | None, computed: Any) -> None:
    """The whole cohort, each case once a pass; the last two in memory, the others computed again or from files."""
    uncached = expected(cohort)
    computed()
    items = dataset(cohort, "window", window=2, cache_dir=cohort.parent / folder if folder else None)
    assert isinstance(items.backend, MemoryBackend)
    assert len(items) == 4
    for _ in range(2):
        for item, reference in zip(items, uncached, strict=True):
            assert_same(item, reference)
            assert len(items.backend) <= 2
    assert computed() == all_once(1 if folder else 2)
    for path in (cohort.parent / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    assert [items[i]["case"] for i in (3, 2, 3, 2)] == list("dcdc")
    assert computed() == {}
    # The one used last but one goes.
    items[0]
    items[2]
    assert computed() == {"a": 1}
    items[3]
    assert computed() == {"d": 1}


@pytest.mark.cuda
@pytest.mark.parametrize("cache", KINDS)
def test_tensors_of_a_gpu_come_back_there(cohort: Path, cache: str) -> None:
    on_gpu = preprocessing(EnsureTyped("image", device="cuda"))
    for _ in range(2):
        for item, reference in zip(dataset(cohort, cache, on_gpu), expected(cohort, on_gpu), strict=True):
            assert item["image"].is_cuda
            assert_same(item, reference)
