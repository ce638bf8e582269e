"""Cached maps of a cohort: nothing stale, nothing computed in vain, and what cannot be cached."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.caches import behind
from helpers.items import assert_same
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
    Lambdad,
    RandFlipd,
    ScaleIntensityd,
)

import monai_saliency as ms
from monai_saliency.data.cached_dataset import cohort_dataset
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
    list(cohort_dataset(find_cases(cohort), preprocessing(), "disk", cohort.parent / "cache"))
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


@pytest.mark.parametrize("what", ["scan", "weights"])
def test_changed_while_it_is_explained(cohort: Path, notes: Any, what: str) -> None:
    """The map that comes of it is given, and not kept for what is there afterwards."""
    network = BoxSum()

    items = dataset(cohort, network=network, network_id="one" if what == "scan" else None)
    explain_case, changes = items._explain, []

    def interrupted(*args: Any) -> Any:
        found = explain_case(*args)
        if not changes:
            changes.append(what)
            if what == "scan":
                scan(cohort / "a.nii.gz", 7)
            else:
                network.weight.data.fill_(7)
        return found

    items._explain = interrupted  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="changed while"):
        assert items[0]["saliency"].max() == 64
    assert changes
    notes()
    for _ in range(2):
        assert items[0]["saliency"].max() == 7 * 64
    assert notes() == {"scans": int(what == "scan"), "maps": 1}


class Holding(BoxSum):
    """Holds something beside its weights."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self._held = held


def test_what_a_network_holds_tells_it_from_others(cohort: Path, notes: Any) -> None:
    """Equal weights, equal print, another map: functions, whole numbers, tensors and containers of them count too."""
    relu, gelu = torch.nn.functional.relu, torch.nn.functional.gelu
    for held in (relu, gelu, 1, 3, {"act": relu}, [torch.zeros(2)], [torch.ones(2)]):
        for maps in (3, 0):
            list(dataset(cohort, "disk", network=Holding(held)))
            assert notes()["maps"] == maps
    # It is noticed while a dataset is in use, in place too.
    network = Holding([1, 3])
    items = dataset(cohort, "disk", network=network)
    for number, maps in ((3, 3), (4, 3), (4, 0)):
        network._held[1] = number
        list(items)
        assert notes()["maps"] == maps
    # What cannot be identified may be anything.
    for _ in range(2):
        with pytest.warns(UserWarning, match="the network holds .*: give it a network_id") as caught:
            list(dataset(cohort, "disk", network=Holding([lambda: 1])))
        assert len(our_warnings(caught)) == 1
        assert notes()["maps"] == 3


def test_a_network_that_holds_a_lambda_is_not_cached(cohort: Path, notes: Any) -> None:
    items = dataset(cohort, network=Holding(lambda x: x))
    with pytest.warns(UserWarning, match="computed at each read: the network holds a lambda .*: give it a network_id"):
        assert torch.equal(items[0]["saliency"].as_tensor(), items[0]["saliency"].as_tensor())
    assert notes()["maps"] == 2
    items = dataset(cohort, network=Holding(lambda x: x), network_id="one")
    assert torch.equal(items[0]["saliency"].as_tensor(), items[0]["saliency"].as_tensor())
    assert notes()["maps"] == 1


class Counting(BoxSum):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_maps_under_autocast_are_kept_apart(cohort: Path, notes: Any) -> None:
    """What bfloat16 rounds is not served to a reader in float32."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 12 * 8, 1))
    items = dataset(cohort, network=network)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = items[0]["saliency"].as_tensor()
        assert torch.equal(items[0]["saliency"].as_tensor(), rounded)
    whole = items[0]["saliency"].as_tensor()
    assert not torch.equal(whole, rounded)
    assert torch.equal(whole, dataset(cohort, "none", network=network)[0]["saliency"].as_tensor())


def test_a_network_that_counts_its_calls_is_not_cached(cohort: Path, notes: Any) -> None:
    items = dataset(cohort, network=Counting())
    with pytest.warns(UserWarning, match="the network changed while .* network_id") as caught:
        found = [items[0], items[0]]
    for item in found:
        assert torch.equal(item["saliency"].as_tensor(), expected_map(item["image"].as_tensor()))
    assert len(our_warnings(caught)) == 1
    assert notes()["maps"] == 2
    items = dataset(cohort, network=Counting(), network_id="one")
    items[0], items[0]
    assert notes()["maps"] == 1


@pytest.mark.parametrize("cache", ["disk", "window"])
def test_damaged_entries(cohort: Path, cache: str, notes: Any) -> None:
    reference = list(dataset(cohort, "none"))
    list(dataset(cohort, cache))
    notes()
    items = dataset(cohort, cache)
    backend = behind(items.backend)
    keys: list[str] = []
    stored = items._stored
    items._stored = lambda backend, key, what: keys.append(key.digest) or stored(backend, key, what)  # type: ignore
    items[1]
    scan_key, map_key = keys
    entry, other = (bytes(backend.get(key) or b"") for key in (map_key, scan_key))
    for damage in (entry[:-9], entry[:-1] + bytes([entry[-1] ^ 1]), b"", other):
        backend.put(map_key, damage)
        items = dataset(cohort, cache)
        with pytest.warns(UserWarning, match="of the saliency maps is damaged, and is computed again"):
            assert_same(items[1], reference[1])
        assert_same(dataset(cohort, cache)[1], reference[1])
        assert notes() == {"scans": 0, "maps": 1}


def test_what_cannot_be_told_is_not_cached(cohort: Path, notes: Any) -> None:
    class LocalFill(ms.ConstantFill):
        pass

    not_cached = "^saliency maps are not cached, but computed at each read: "
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"{not_cached}the network is not a module: give it a network_id", {"network": box_sum}),
        (f"{not_cached}how they are made cannot be identified: the local class .*LocalFill", {"fill": LocalFill(0.0)}),
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


def test_a_lambda_before_the_map(cohort: Path, notes: Any) -> None:
    """The network is given what it changed, and the map made of that is not kept."""
    for number in (1, 2):
        transform = preprocessing(Lambdad("image", lambda x, n=number: x * n), RandFlipd(BOTH, prob=0.5))
        with pytest.warns(UserWarning, match="^transform 5 of 6, Lambdad, is not cached") as caught:
            found = [item for items in [dataset(cohort, "disk", transform)] for item in [*items, *items]]
        _, second = our_warnings(caught)
        assert "saliency maps are not cached, but computed at each read: Lambdad, " in second
        for item in found:
            assert torch.equal(item["saliency"].as_tensor(), expected_map(item["image"].as_tensor()))
            assert item["image"].max() in (number, 2 * number, 3 * number)
    assert notes() == {"scans": 3, "maps": 12}
