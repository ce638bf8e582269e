"""A loader that cannot lose a case, and what is lost without it."""

import threading
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.files import rows_of
from helpers.scans import LPS, OBLIQUE, write_scan
from helpers.tolerances import assert_same_bits
from monai.data import Dataset
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, Orientationd, ResizeWithPadOrCropd

import monai_saliency as ms
from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.loader import CohortLoader
from monai_saliency.errors import CaseError
from monai_saliency.storage.tables import Failures
from monai_saliency.transforms import CheckScand

NUM_SCANS = 5
LOAD = [LoadImaged("image"), EnsureChannelFirstd("image"), CheckScand("image")]
PREPROCESSING = Compose([*LOAD, Orientationd("image", "RAS", labels=None), ResizeWithPadOrCropd("image", (10, 10, 10))])
EXPLAIN = ms.sliding_window(5, 5, target=ms.ClassScore([0], activation="none"))


def network(x: torch.Tensor) -> torch.Tensor:
    return (x**2).mean(dim=(1, 2, 3, 4))[:, None]


@pytest.fixture
def cases(tmp_path: Path) -> list[dict[str, Any]]:
    for seed in range(NUM_SCANS):
        write_scan(tmp_path / "in" / f"s{seed}.nii.gz", (11 + seed, 9, 12), OBLIQUE if seed % 2 else LPS, seed=seed)
    return find_cases(tmp_path / "in")


def spoil(kind: str, cases: list[dict[str, Any]]) -> set[str]:
    """Spoil the third scan; the names of the cases that are lost by right."""
    path = Path(cases[2]["image"])
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:300])
    elif kind == "missing":
        path.unlink()
    elif kind == "NaN":
        import nibabel as nib

        data = nib.load(path).get_fdata()
        data[0, 0, 0] = np.nan
        nib.save(nib.Nifti1Image(data, LPS), path)
    return set() if kind == "good" else {"s2"}


def collect(loader: CohortLoader) -> dict[str, list[torch.Tensor]]:
    """Maps by case, as many as there were."""
    maps: dict[str, list[torch.Tensor]] = {}
    for batch in loader:
        for name, saliency in zip(batch["case"], EXPLAIN(batch["image"].as_tensor(), network), strict=True):
            maps.setdefault(name, []).append(saliency)
    return maps


WORKERS = {"no workers": (0, False), "2 threads": (2, False), "2 processes": (2, True)}


@pytest.mark.parametrize(
    ("kind", "cache", "workers"),
    [
        ("good", "disk", "2 processes"),
        ("truncated", "lmdb", "2 threads"),
        ("missing", "none", "no workers"),
        ("NaN", "disk", "2 threads"),
        ("truncated", "window", "2 processes"),
    ],
)
def test_every_good_case_once_and_every_bad_one_listed(
    kind: str, cache: str, workers: str, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    """What is wrong with a scan, where scans are kept and who loads them do not depend on each other."""
    expected = {case["case"]: EXPLAIN(PREPROCESSING({**case})["image"].as_tensor()[None], network)[0] for case in cases}
    bad = spoil(kind, cases)
    dataset = CachedDataset(cases, PREPROCESSING, cache, cache_dir=tmp_path / "cache", window=2)
    num_workers, processes = WORKERS[workers]
    for _ in ("cold", "warm"):
        failures = Failures(tmp_path / "failures.csv")
        loader = CohortLoader(dataset, failures, batch_size=2, num_workers=num_workers, processes=processes)
        maps = collect(loader)
        assert set(maps) == set(expected) - bad
        for name, found in maps.items():
            assert len(found) == 1
            assert_same_bits(found[0], expected[name])
        if bad:
            rows = rows_of(failures.path)
            assert [(row["case"], row["stage"]) for row in rows] == [("s2", "load")]
            assert "\n" not in rows[0]["error"]
        else:
            assert not failures.path.exists()


def test_strict_stops_at_the_first(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    spoil("missing", cases)
    for failures in (Failures(tmp_path / "failures.csv", strict=True), None):
        loader = CohortLoader(CachedDataset(cases, PREPROCESSING, "none"), failures, num_workers=2)
        seen = []
        with pytest.raises(CaseError, match="case s2: "):
            seen.extend(batch["case"] for batch in loader)
        assert seen == [["s0"], ["s1"]]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("CohortLoader")]


class Items:
    """Items of given shapes; ``loaded`` notes which were asked for."""

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        seconds: float = 0.0,
        broken: Container[int] = (),
        images: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.data = [{"case": f"c{i}"} for i in range(len(shapes))]
        self.shapes, self.seconds, self.loaded = shapes, seconds, [0] * len(shapes)
        self.broken = broken
        self.images = images or [torch.full(shape, float(index)) for index, shape in enumerate(shapes)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.loaded[index] += 1
        if index in self.broken:
            raise RuntimeError("broken")
        return {**self.data[index], "image": self.images[index]}


A, B, C = (1, 4, 4), (1, 5, 4), (1, 4, 5)


def batches(loader: CohortLoader) -> list[str]:
    """The cases of each batch, by their numbers, each checked to hold what it says."""
    found = []
    for batch in loader:
        assert [float(image.max()) for image in batch["image"]] == [float(name[1:]) for name in batch["case"]]
        found.append(" ".join(name[1:] for name in batch["case"]))
    return found


@pytest.mark.parametrize("workers", [(0, False), (3, False), (2, True)], ids=["no workers", "3 threads", "2 processes"])
@pytest.mark.parametrize(
    ("shapes", "options", "expected"),
    [
        ([A, A, A, B, B, A], {}, ["0 1", "3 4", "2 5"]),
        ([A, B, A, B, A, B], {}, ["0 2", "1 3", "4", "5"]),
        ([A, B, C, A, B, C], {"batch_size": 1}, ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_cases_of_one_shape_share_a_batch(shapes: Any, options: Any, expected: list[str], workers: Any) -> None:
    loader = CohortLoader(Items(shapes), num_workers=workers[0], processes=workers[1], **{"batch_size": 2} | options)
    assert batches(loader) == expected
    assert not hasattr(loader, "__len__")


@pytest.mark.parametrize("num_workers", [0, 3])
def test_queues_are_bounded_and_an_early_stop_leaves_no_thread(num_workers: int) -> None:
    items = Items([(1, 2, 2)] * 50)
    iterator = iter(CohortLoader(items, num_workers=num_workers))
    next(iterator)
    time.sleep(0.5)
    assert sum(items.loaded) <= 1 + 2 + 1 + num_workers + 1
    iterator.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("CohortLoader")]


def test_cases_that_do_not_fit_together_go_alone_and_what_fits_no_batch_is_listed(tmp_path: Path) -> None:
    items = Items([(1, 2, 2)] * 4)
    items.data[0]["extra"] = 1  # which the second item lacks
    items.data[2]["none"] = None
    failures = Failures(tmp_path / "failures.csv")
    batches = [batch["case"] for batch in CohortLoader(items, failures, batch_size=2)]
    assert batches == [["c0"], ["c1"], ["c3"]]
    (row,) = failures.rows
    assert (row["case"], row["stage"]) == ("c2", "load")
    assert "no batch can be made of it" in row["error"]
    with pytest.raises(CaseError, match="case c2: no batch"):
        list(CohortLoader(items, batch_size=2))


def test_an_item_that_cannot_be_sent_is_listed(tmp_path: Path) -> None:
    """A worker's queue drops it with a traceback on the terminal, and its reader would wait for ever."""
    items = Items([A] * 3)
    items.data[1]["extra"] = (i for i in range(3))
    failures = Failures(tmp_path / "failures.csv")
    assert batches(CohortLoader(items, failures, num_workers=1, processes=True)) == ["0", "2"]
    (row,) = failures.rows
    assert row["case"] == "c1"
    assert "cannot pickle" in row["error"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_threads_use_the_gpu_of_the_one_that_started_them(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current GPU is the first one: a rank's preprocessing on `cuda` would land there."""
    current = threading.local()
    current.number = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "number", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(current, "number", number))
    seen = lambda item: {**item, "gpu": torch.cuda.current_device()}  # noqa: E731
    cases = [{"case": str(number), "image": torch.zeros(1, 2, 2)} for number in range(4)]
    loaded = list(CohortLoader(Dataset(cases, seen), num_workers=num_workers))
    assert [int(batch["gpu"]) for batch in loaded] == [3] * 4


def test_an_item_without_an_image_is_listed(tmp_path: Path) -> None:
    failures = Failures(tmp_path / "failures.csv")
    assert batches(CohortLoader(Items([A]), failures, image_key="scan")) == []
    (row,) = failures.rows
    assert "the item has no 'scan', but ['case'," in row["error"]
