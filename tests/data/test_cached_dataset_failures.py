"""A cached dataset whose cache is damaged or full, or whose items cannot be cached."""

from __future__ import annotations

import io
import os
import pickle
import resource
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cached_cohort import FILED, all_once, behind, dataset, digest, expected, in_children, preprocessing
from helpers.items import assert_same
from helpers.warned import our_warnings
from monai.transforms import (
    Lambdad,
    MapTransform,
)


class Object(MapTransform):
    def __call__(self, data: Any) -> Any:
        return {**data, "odd": object()}


def plus_one(x: Any) -> Any:
    return x + 1


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def poisons(marker: Path) -> list[bytes]:
    saved = io.BytesIO()
    torch.save(Evil(marker), saved)
    old = io.BytesIO()
    torch.save(Evil(marker), old, _use_new_zipfile_serialization=False)
    array = io.BytesIO()
    np.save(array, np.array([Evil(marker)], dtype=object), allow_pickle=True)
    return [pickle.dumps(Evil(marker)), saved.getvalue(), old.getvalue(), array.getvalue()]


@pytest.mark.parametrize("cache", ["disk", "lmdb"])
def test_damaged_entries(cohort: Path, cache: str, computed: Any, tmp_path: Path) -> None:
    """Each is computed again, reported once, repaired, and runs nothing."""
    uncached = expected(cohort)
    first = dataset(cohort, cache)
    list(first)
    key, other = (first._key_of(first.data[i]) for i in range(2))
    good = bytes(behind(first.backend).get(key) or b"")
    marker = tmp_path / "poisoned"
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 16
    damaged = [good[:-1], good[: len(good) // 2], bytes(flipped), bytes(len(good)), b"", good + b"x"]
    damaged += [bytes(behind(first.backend).get(other) or b""), *poisons(marker)]
    computed()
    for data in damaged:
        behind(first.backend).put(key, data)
        items = dataset(cohort, cache)
        with pytest.warns(UserWarning, match="cannot be read, and are computed again"):
            assert_same(items[0], uncached[0])
        assert computed() == {"a": 1}
        for again in (items, dataset(cohort, cache)):
            assert_same(again[0], uncached[0])
        assert computed() == {}
        assert bytes(behind(first.backend).get(key) or b"") == good
    assert not marker.exists()


def test_damaged_database(cohort: Path, tmp_path: Path) -> None:
    """Its items are computed at each read, and the warning says where it is."""
    uncached = expected(cohort)
    list(dataset(cohort, "lmdb"))
    file = cohort.parent / "cache" / "cache.lmdb"
    whole = file.read_bytes()
    marker = tmp_path / "poisoned"
    for content in (whole[:50], whole[: len(whole) // 2], bytes(20000), *poisons(marker)):
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=r"cannot be read, and are computed .*cache\.lmdb"):
            items = list(dataset(cohort, "lmdb"))
        for item, reference in zip(items, uncached, strict=True):
            assert_same(item, reference)
    assert not marker.exists()


@pytest.mark.parametrize("cache", FILED)
def test_full_disk(cohort: Path, cache: str) -> None:
    """A limit on the size of files, which the kernel enforces as it does a full disk. In a child, where it may stay."""
    uncached = [digest(item) for item in expected(cohort)]

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            items = dataset(cohort, cache)
            assert [digest(item) for item in items] + [digest(item) for item in items] == uncached * 2
        (warning,) = our_warnings(caught)
        assert "preprocessed scans cannot be" in warning

    in_children([child])
    # Nothing half written is left.
    assert not [path for path in (cohort.parent / "cache").rglob("*") if path.is_file() and "lmdb" not in path.name]
    assert [digest(item) for item in dataset(cohort, cache)] == uncached


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_lambda_is_not_cached(cohort: Path, cache: str, computed: Any) -> None:
    """Nor what follows it; what stands before it is."""
    for number in (1, 2):
        transform = preprocessing(Lambdad("image", lambda x, n=number: x + n), Lambdad("image", plus_one))
        with pytest.warns(UserWarning, match=r"transform 9 of 10, Lambdad, is not cached, .*a lambda \(.*<lambda>\)"):
            items = dataset(cohort, cache, transform)
        for _ in range(2):
            for item, reference in zip(items, expected(cohort), strict=True):
                assert torch.equal(item["image"].as_tensor(), reference["image"].as_tensor() + number + 1)
        assert computed() == all_once(3 if cache == "memory" or number == 1 else 2)


def test_items_that_cannot_be_stored(cohort: Path, computed: Any) -> None:
    items = dataset(cohort, "disk", preprocessing(Object("image")))
    with pytest.warns(UserWarning, match="cannot be stored, .*: it holds a object") as caught:
        assert all("odd" in item for item in [*items, *items])
    assert len(our_warnings(caught)) == 1
    assert computed() == all_once(2)
