"""Cached maps of a cohort: nothing stale, nothing computed in vain, and what cannot be cached."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mapped_cohort import (
    BOTH,
    NUM_MASKS,
    BoxSum,
    box_sum,
    dataset,
    expected_map,
    explain,
    preprocessing,
    scan,
    write_cohort,
)
from helpers.warned import our_warnings
from monai.transforms import (
    RandFlipd,
    ScaleIntensityd,
)

import monai_saliency as ms
from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.cohort import find_cases


@pytest.fixture
def cohort(tmp_path: Path, notes: Any) -> Path:
    return write_cohort(tmp_path / "cohort")


def test_what_changed_is_computed(cohort: Path, notes: Any) -> None:
    cache = "disk"
    list(dataset(cohort, cache))
    assert notes() == {"scans": 3, "maps": 3}
    list(dataset(cohort, cache))
    assert notes() == {"scans": 0, "maps": 0}

    def changed(scans: int, maps: int, *more: Any, **options: Any) -> None:
        for expected in ({"scans": scans, "maps": maps}, {"scans": 0, "maps": 0}):
            found = [item["saliency"].as_tensor() for item in dataset(cohort, cache, preprocessing(*more), **options)]
            assert notes() == expected
        reference = [item["saliency"].as_tensor() for item in dataset(cohort, "none", preprocessing(*more), **options)]
        assert all(torch.equal(*maps) for maps in zip(found, reference, strict=True))
        notes()

    # The network and how it is explained: maps alone.
    changed(0, 3, network=BoxSum(2.0))
    changed(0, 3, network=box_sum, network_id="v1")
    changed(0, 3, network=box_sum, network_id="v2")
    changed(0, 3, inferer=explain(fill=ms.ConstantFill(1.0)))
    changed(0, 3, inferer=explain(estimator=ms.RISEScoring(form="plain")))
    # What changes no map.
    changed(0, 0, inferer=explain(mask_batch_size=NUM_MASKS + 1))
    changed(0, 0, RandFlipd(BOTH, prob=0.0))
    # The scans: all of it.
    changed(3, 3, ScaleIntensityd("image"))
    os.utime(cohort / "b.nii.gz", ns=(1, 1))
    changed(1, 1)
    scan(cohort / "c.nii.gz", 9)
    changed(1, 1)


def test_scans_are_shared_with_a_dataset_without_maps(cohort: Path, notes: Any) -> None:
    list(CachedDataset(find_cases(cohort), preprocessing(), "disk", cohort.parent / "cache"))
    list(dataset(cohort, "disk"))
    assert notes() == {"scans": 3, "maps": 3}


@pytest.mark.parametrize("how", ["in place", "behind autograd's back"])
def test_weights_changed_under_a_running_dataset(cohort: Path, notes: Any, how: str) -> None:
    network = BoxSum()
    items = dataset(cohort, network=network)
    list(items)
    if how == "in place":
        with torch.no_grad():
            network.weight.add_(2)
    else:
        network.weight.data.mul_(3)
    for _ in range(2):
        for item in items:
            assert torch.equal(item["saliency"].as_tensor(), 3 * expected_map(item["image"].as_tensor()))
    assert notes() == {"scans": 3, "maps": 6}


def test_what_cannot_be_told_is_not_cached(cohort: Path, notes: Any) -> None:
    class LocalFill(ms.ConstantFill):
        pass

    not_cached = "^saliency maps are not cached, but computed at each read: "
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"{not_cached}the network is not a module: give it a network_id", {"network": box_sum}),
        (f"{not_cached}the local class .*LocalFill", {"fill": LocalFill(0.0)}),
        (f"{not_cached}the network holds a tensor of layout .*sparse", {"sparse": True}),
    ]
    for match, options in cases:
        network = options.get("network") or BoxSum()
        if options.get("sparse"):
            network.register_buffer("odd", torch.eye(2).to_sparse())
        inferer = explain(fill=options.get("fill"))
        with pytest.warns(UserWarning, match=match) as caught:
            found = [item for items in [dataset(cohort, network=network, inferer=inferer)] for item in [*items, *items]]
        assert len(our_warnings(caught)) == 1
        for item in found:
            assert torch.equal(item["saliency"].as_tensor(), expected_map(item["image"].as_tensor()))
        assert notes() == {"scans": 3, "maps": 6}
    # Nothing is to be said where nothing is to be kept.
    assert len(list(dataset(cohort, "none", network=box_sum))) == 3
