from __future__ import annotations

import gc
import hashlib
import io
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import fork_server
from helpers.caches import FILED, KINDS, behind, in_threads
from helpers.items import assert_same
from helpers.paths import ROOT, TESTS
from monai.data import DataLoader as MonaiDataLoader
from monai.data import LMDBDataset, MetaTensor, PersistentDataset, ThreadDataLoader
from monai.data.utils import pickle_hashing
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    Invertd,
    Lambdad,
    LoadImaged,
    MapTransform,
    NormalizeIntensityd,
    Orientationd,
    RandFlipd,
    RandGaussianNoised,
    RandomizableTransform,
    ResizeWithPadOrCropd,
    Spacingd,
)
from torch.utils.data import DataLoader

from monai_saliency.data.cached_dataset import CachedDataset, cohort_dataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.errors import CaseError
from monai_saliency.storage import backends
from monai_saliency.storage.backends import DiskBackend, LMDBBackend, MemoryBackend
from monai_saliency.storage.serialization import encode
from monai_saliency.transforms import CheckScand

AFFINE = np.array([[-1.5, 0.2, 0, 10], [0.1, 2, 0, -20], [0, 0, 2.5, 5], [0, 0, 0, 1]])


class Logged(MapTransform):
    """Writes each case that it sees to a file, so that computations are counted in all processes."""

    def __call__(self, data: Any) -> Any:
        with open(os.environ["COMPUTED"], "a") as log:
            log.write(f"{data['case']}\n")
        return data


class Object(MapTransform):
    def __call__(self, data: Any) -> Any:
        return {**data, "odd": object()}


class Draws(RandomizableTransform):
    """Draws, and looks a moment later what it drew."""

    def __call__(self, data: Any) -> Any:
        self.drawn = drawn = self.R.random()
        time.sleep(0.01)
        return {**data, "drawn": (drawn, self.drawn)}


class Edits(MapTransform):
    def __call__(self, data: Any) -> Any:
        data["notes"].append("seen")
        return data


class WaitsIn(MapTransform):
    """Waits, but only in one process."""

    def __init__(self, process: int, started: str, go_on: str) -> None:
        super().__init__("image")
        self.process, self.started, self.go_on = process, Path(started), Path(go_on)

    def __call__(self, data: Any) -> Any:
        if os.getpid() == self.process:
            self.started.touch()
            wait_for(self.go_on.exists)
        return data


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def plus_one(x: Any) -> Any:
    return x + 1


def only(batch: list[Any]) -> Any:
    return batch[0]


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


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """How often each case was computed since the last question."""
    log = tmp_path / "computed.txt"
    monkeypatch.setenv("COMPUTED", str(log))

    def read() -> Counter[str]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return Counter(names)

    return read


@pytest.fixture
def cohort(tmp_path: Path, computed: Any) -> Path:
    (tmp_path / "cohort").mkdir()
    for number, name in enumerate("abcd"):
        scan(tmp_path / "cohort" / f"{name}.nii.gz", number)
    return tmp_path / "cohort"


def dataset(cohort: Path, cache: str, transform: Any = None, **options: Any) -> CachedDataset:
    options = {"cache_dir": cohort.parent / "cache"} | options
    # Not `transform or ...`: the length of a Compose seeds the random transforms nested in it anew.
    transform = preprocessing() if transform is None else transform
    return cohort_dataset(find_cases(cohort), transform, cache, **options)


def digest(item: Any) -> str:
    return hashlib.sha256(encode(item, "")).hexdigest()


class Digests(torch.utils.data.Dataset):
    """What a worker process reads, as seen there."""

    def __init__(self, items: CachedDataset) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        return digest(self.items[index])


def expected(cohort: Path, transform: Any = None) -> list[Any]:
    return list(dataset(cohort, "none", transform))


def all_once(count: int = 1) -> Counter[str]:
    return Counter(dict.fromkeys("abcd", count))


# -- the same to the bit --


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


def main(folder: str) -> None:
    """In a second python run: what each cache on disk gives there."""
    for cache in FILED:
        print(" ".join(digest(item) for item in dataset(Path(folder), cache, cache_dir=Path(folder).parent / cache)))


def test_a_second_python_run(cohort: Path, computed: Any) -> None:
    uncached = [digest(item) for item in expected(cohort)]
    for cache in FILED:
        list(dataset(cohort, cache, cache_dir=cohort.parent / cache))
    computed()
    code = f"import test_cached_dataset; test_cached_dataset.main({str(cohort)!r})"
    path = os.pathsep.join([str(Path(__file__).parent), str(TESTS), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-W", "error:cached", "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert [line.split() for line in run.stdout.splitlines()] == [uncached] * 3
    assert computed() == {}


@pytest.mark.parametrize("cache", KINDS)
def test_two_threads(cohort: Path, cache: str, computed: Any) -> None:
    """Each case is computed once, whoever comes first."""
    uncached = [digest(item) for item in expected(cohort)]
    computed()
    shared = dataset(cohort, cache)
    found: list[list[str]] = []

    def read() -> None:
        loader = DataLoader(shared, batch_size=1, collate_fn=only, num_workers=0)
        found.append([digest(item) for _ in range(3) for item in loader])

    in_threads([read, read])
    assert found == [uncached * 3] * 2
    assert computed() == all_once()
    assert not shared._locks


@pytest.mark.parametrize("cache", KINDS)
def test_two_worker_processes(cohort: Path, cache: str, computed: Any) -> None:
    """Started while this process's threads use the cache too."""
    uncached = [digest(item) for item in expected(cohort)]
    computed()
    shared = dataset(cohort, cache)
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            shared[3]

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        for _ in range(2):
            assert list(DataLoader(Digests(shared), batch_size=None, num_workers=2)) == uncached
    finally:
        stop.set()
        thread.join()
    assert [digest(item) for item in shared] == uncached
    if cache in {"disk", "lmdb"}:
        # Two processes may both be first, but none computes what it finds.
        assert max(computed().values()) <= 3
        assert [
            digest(item) for item in DataLoader(shared, batch_size=None, num_workers=2, collate_fn=None)
        ] == uncached
        assert computed() == {}


@pytest.mark.parametrize("cache", KINDS)
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


@pytest.mark.parametrize("cache", KINDS)
def test_inverted_from_a_warm_cache(cohort: Path, cache: str) -> None:
    """Back on the scan's own grid: shape, affine, and a smooth map's values."""
    list(dataset(cohort, cache))
    transform = preprocessing()
    items = dataset(cohort, cache, transform)
    list(items)
    for item in items:
        ramp = torch.linspace(0, 1, 12)[None, :, None, None].expand(1, 12, 14, 12)
        item["map"] = MetaTensor(ramp.clone()).copy_meta_from(item["image"])
        back = Invertd("map", transform, orig_keys="image", nearest_interp=False)(item)["map"]
        assert tuple(back.shape) == (1, 11, 12, 13)
        assert np.allclose(back.affine, AFFINE)
        # The scan's first axis runs the other way than RAS.
        assert back[0, 2, 6, 6] > back[0, 8, 6, 6]


# -- nothing stale --


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


def test_a_scan_replaced_under_a_running_dataset(cohort: Path, computed: Any) -> None:
    items = dataset(cohort, "memory")
    list(items)
    scan(cohort / "a.nii.gz", 42)
    for item, reference in zip(items, expected(cohort), strict=True):
        assert_same(item, reference)
    assert computed() == all_once(2) + Counter("a")


def test_checksum(cohort: Path, computed: Any) -> None:
    """A scan replaced by one of the same size and time is noticed; one that was only touched is not computed."""
    plain = cohort / "a.nii"
    scan(plain, 0)
    (cohort / "a.nii.gz").unlink()
    os.utime(plain, ns=(1, 1))
    for _ in range(2):
        list(dataset(cohort, "disk", checksum=True))
    assert computed() == all_once()
    scan(plain, 5)
    os.utime(plain, ns=(1, 1))
    for item, reference in zip(dataset(cohort, "disk", checksum=True), expected(cohort), strict=True):
        assert_same(item, reference)
    assert computed() == all_once() + Counter("a")
    os.utime(plain)
    list(dataset(cohort, "disk", checksum=True))
    assert computed() == {}


def test_other_library(cohort: Path, computed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    list(dataset(cohort, "disk"))
    for library in ("monai", "torch", "numpy", "nibabel"):
        computed()
        monkeypatch.setattr(f"{library}.__version__", "99")
        list(dataset(cohort, "disk"))
        assert computed() == all_once()


def test_a_scan_replaced_while_it_is_read(cohort: Path, computed: Any) -> None:
    """What came of it is given, but not kept."""
    items = dataset(cohort, "disk")
    compute = items._compute

    def replaced(case: Any) -> Any:
        item = compute(case)
        scan(cohort / "a.nii.gz", 77)
        return item

    items._compute = replaced  # type: ignore[method-assign]
    items[0]
    assert not list((cohort.parent / "cache").rglob("*"))


# -- damage --


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


@pytest.mark.parametrize("cache", FILED)
def test_damaged_entries(cohort: Path, cache: str, computed: Any, tmp_path: Path) -> None:
    """Each is computed again, reported once, repaired, and runs nothing."""
    uncached = expected(cohort)
    first = dataset(cohort, cache)
    list(first)
    key, other = (first._key(first.data[i]) for i in range(2))
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
        with pytest.warns(UserWarning, match="is damaged, and is computed again"):
            assert_same(items[0], uncached[0])
        assert computed() == {"a": 1}
        for again in (items, dataset(cohort, cache)):
            assert_same(again[0], uncached[0])
        assert computed() == {}
        assert bytes(behind(first.backend).get(key) or b"") == good
    assert not marker.exists()


@pytest.mark.parametrize("poisoned", [False, True])
def test_damaged_database(cohort: Path, computed: Any, tmp_path: Path, poisoned: bool) -> None:
    """A file that is no database, or lost its end, is set aside: reading it would end the process."""
    uncached = expected(cohort)
    list(dataset(cohort, "lmdb"))
    file = cohort.parent / "cache" / "cache.lmdb"
    backends._before_fork()
    backends._after_fork()
    whole = file.read_bytes()
    marker = tmp_path / "poisoned"
    contents = poisons(marker) if poisoned else [whole[:-4096], whole[:9000], whole[:50], bytes(20000)]
    for content in contents:
        with open(file, "r+b") as opened:
            opened.truncate()
            opened.write(content)
        items = dataset(cohort, "lmdb")
        computed()
        with pytest.warns(UserWarning, match="is not an LMDB database .*renamed to"):
            list(items)
        assert computed() == all_once()
        for item, reference in zip(dataset(cohort, "lmdb"), uncached, strict=True):
            assert_same(item, reference)
        assert computed() == {}
        backends._before_fork()
        backends._after_fork()
    assert not marker.exists()


def test_a_database_that_grows_while_it_is_opened_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits just as this one asks how many pages there are."""
    code = """
import sys
from monai_saliency.storage.backends import LMDBBackend
LMDBBackend(sys.argv[1]).put("theirs", bytes(1 << 20))
"""
    database = LMDBBackend(tmp_path / "x.lmdb")
    environment_of = LMDBBackend._environment

    class Raced:
        def __init__(self, environment: lmdb.Environment) -> None:
            self.environment = environment

        def __getattr__(self, name: str) -> Any:
            return getattr(self.environment, name)

        def info(self) -> dict[str, int]:
            fork_server.run(["-c", code, database.path], check=True)
            return self.environment.info()

    monkeypatch.setattr(LMDBBackend, "_environment", lambda self: Raced(environment_of(self)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        database.put("ours", b"sound")
        assert bytes(database.get("ours") or b"") == b"sound"
        assert len(database.get("theirs") or b"") == 1 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.lmdb", "x.lmdb-lock"]


def test_a_database_removed_while_open(cohort: Path, computed: Any) -> None:
    list(dataset(cohort, "lmdb"))
    shutil.rmtree(cohort.parent / "cache")
    items = dataset(cohort, "lmdb")
    list(items)
    assert computed() == all_once(2)
    list(dataset(cohort, "lmdb"))
    assert computed() == {}


@contextmanager
def as_nobody() -> Iterator[Path]:
    """A folder that root may not simply write to, as root is not who we are."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    changed = os.geteuid() == 0
    if changed:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if changed:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="no user ids here")
@pytest.mark.parametrize("cache", FILED)
def test_read_only_cache(cohort: Path, cache: str, computed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; every item comes all the same."""
    uncached = expected(cohort)
    items = dataset(cohort, cache, transform=Compose([FromMemory("image", [item["image"] for item in uncached])]))
    with as_nobody() as folder:
        if os.geteuid() != 65534:
            folder.chmod(0o555)
        behind(items.backend).__init__(  # type: ignore[misc]
            folder / "cache" if cache != "lmdb" else folder / "cache" / "cache.lmdb"
        )
        with pytest.warns(UserWarning, match="^preprocessed scans cannot be (read|written) in the cache") as caught:
            found = list(items) + list(items)
        assert len(caught) == 1
    for item, reference in zip(found, uncached * 2, strict=True):
        assert_same(item["image"], reference["image"])


class FromMemory(MapTransform):
    """Loads without the file system."""

    def __init__(self, keys: str, images: list[Any]) -> None:
        super().__init__(keys)
        self.images = images

    def __call__(self, data: Any) -> Any:
        return {"image": self.images["abcd".index(data["case"])].clone()}


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="no user ids here")
def test_unreadable_entry(cohort: Path) -> None:
    uncached = expected(cohort)
    items = dataset(cohort, "disk", transform=Compose([FromMemory("image", [item["image"] for item in uncached])]))
    with as_nobody() as folder:
        if os.geteuid() == 65534:
            os.seteuid(0)
            folder.chmod(0o777)
            os.seteuid(65534)
        backend = items.backend = DiskBackend(folder)
        items[0]
        (entry,) = (path for path in folder.rglob("*") if path.is_file())
        assert entry == backend.path(items._key(items.data[0]))
        entry.chmod(0o000)
        with pytest.warns(UserWarning, match="cannot be read in the cache, .*Permission denied"):
            assert_same(items[0]["image"], uncached[0]["image"])
        # It was replaced.
        assert os.access(entry, os.R_OK)


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
        (warning,) = caught
        assert "preprocessed scans cannot be" in str(warning.message)

    in_children([child])
    # Nothing half written is left.
    assert not [path for path in (cohort.parent / "cache").rglob("*") if path.is_file() and "lmdb" not in path.name]
    assert [digest(item) for item in dataset(cohort, cache)] == uncached


def test_cache_dir_is_a_file(cohort: Path) -> None:
    (cohort.parent / "cache").write_text("x")
    for cache in FILED:
        items = dataset(cohort, cache)
        with pytest.warns(UserWarning, match="cannot be (read|written) .*Make room, .* choose another `cache_dir`"):
            assert len(list(items)) == 4


# -- what cannot be cached --


@pytest.mark.parametrize("cache", KINDS)
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


def test_named_functions_are_cached(cohort: Path, computed: Any) -> None:
    for _ in range(2):
        list(dataset(cohort, "disk", preprocessing(Lambdad("image", plus_one))))
    assert computed() == all_once()


def test_plain_callables_run_at_each_read(cohort: Path, computed: Any) -> None:
    with pytest.warns(
        UserWarning, match="plus_one, is not cached, .* it is not a monai Transform, so it may be random"
    ):
        dataset(cohort, "memory", Compose([Logged("image"), plus_one]))
    assert cohort_dataset(find_cases(cohort), Compose([Lambdad("image", lambda x: x)]), "none")[0]["case"] == "a"


def test_items_that_cannot_be_stored(cohort: Path, computed: Any) -> None:
    items = dataset(cohort, "disk", preprocessing(Object("image")))
    with pytest.warns(UserWarning, match=r"as they hold .*item\['odd'\] is of type builtins.object") as caught:
        assert all("odd" in item for item in [*items, *items])
    assert len(caught) == 1
    assert computed() == all_once(2)


def test_cases_that_cannot_be_told(cohort: Path) -> None:
    cases = [{**case, "loader": lambda: 1} for case in find_cases(cohort)]
    items = cohort_dataset(cases, preprocessing(), "memory")
    with pytest.warns(UserWarning, match="cases are not cached, since they cannot be identified: a lambda"):
        assert len(list(items)) == 4


# -- copies, random transforms --


@pytest.mark.parametrize("cache", KINDS)
def test_edits_in_place(cohort: Path, cache: str) -> None:
    uncached = expected(cohort)
    items = dataset(cohort, cache)
    for _ in range(3):
        item = items[0]
        assert_same(item, uncached[0])
        item["image"].zero_()
        item["image"].affine[0, 0] = 9
        item["image"].meta["filename_or_obj"] = "x"
        item["image"].meta["pixdim"][:] = 0
        item["image"].applied_operations[1]["extra_info"]["mode"] = "x"
        item["image"].applied_operations.pop()
        item["case"] = "x"
        assert items.data[0]["case"] == "a"


def test_cases_stay_as_they_are(cohort: Path) -> None:
    """Also those that a transform edits."""
    cases = [{**case, "notes": []} for case in find_cases(cohort)]
    for cache in ("none", "memory"):
        items = cohort_dataset(cases, preprocessing(Edits("image")), cache)
        for _ in range(2):
            assert items[0]["notes"] == ["seen"]
    assert cases[0]["notes"] == []


def test_draws_of_two_threads_stay_apart(cohort: Path) -> None:
    items = cohort_dataset(find_cases(cohort), Compose([Logged("image"), Draws()]), "memory")
    found: list[tuple[float, float]] = []
    in_threads([lambda: found.extend(item["drawn"] for item in items)] * 2)
    assert len({first for first, _ in found}) == 8
    assert all(first == later for first, later in found)


def random_pipeline() -> Compose:
    return preprocessing(RandGaussianNoised("image", prob=1.0), Compose([RandFlipd("image", prob=0.5)]))


@pytest.mark.parametrize("cache", KINDS)
def test_random_transforms_stay_random(cohort: Path, cache: str, computed: Any) -> None:
    """They draw anew at each read, as without a cache, to the bit."""
    reads = []
    for kind in ("none", cache):
        items = dataset(cohort, kind, random_pipeline().set_random_state(3))
        reads.append([items[i]["image"].as_tensor() for _ in range(2) for i in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*reads, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(reads[1][:4], reads[1][4:], strict=True))
    assert computed() == all_once(3)


def test_workers_draw_differently(cohort: Path) -> None:
    """MONAI's loader seeds its workers through the dataset."""
    items = cohort_dataset([find_cases(cohort)[0]] * 4, random_pipeline(), "memory")
    loader = MonaiDataLoader(items, batch_size=1, num_workers=2)
    assert len({digest(batch["image"].as_tensor()) for batch in loader}) == 4


def test_nested_compose_keeps_its_state(cohort: Path) -> None:
    transform = random_pipeline().set_random_state(3)
    before = transform.transforms[-1].transforms[0].R.get_state()[1].copy()
    dataset(cohort, "memory", transform)
    assert np.array_equal(transform.transforms[-1].transforms[0].R.get_state()[1], before)


# -- several at once, sizes --


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


def test_a_fork_while_a_scan_is_computed(cohort: Path) -> None:
    """The child does not wait for a thread that did not follow it."""
    signs = [str(cohort.parent / name) for name in ("started", "go_on")]
    items = dataset(cohort, "memory", preprocessing(WaitsIn(os.getpid(), *signs)))
    thread = threading.Thread(target=lambda: items[0])
    thread.start()
    wait_for(Path(signs[0]).exists)
    try:
        in_children([lambda: items[0]])
    finally:
        Path(signs[1]).touch()
        thread.join()


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path / "cache")
    contents = [bytes([number]) * 10**5 for number in range(4)]

    def write(data: bytes) -> None:
        for _ in range(30):
            backend.put("k" * 64, data)
            assert backend.get("k" * 64) in contents

    in_threads([lambda data=data: write(data) for data in contents])  # type: ignore[misc]
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["k" * 64]


@pytest.mark.parametrize("cache", FILED)
def test_two_processes_on_one_cache(cohort: Path, cache: str, computed: Any) -> None:
    uncached = [digest(item) for item in expected(cohort)]
    own = dataset(cohort, cache)
    computed()

    def child() -> None:
        items = dataset(cohort, cache)
        for _ in range(5):
            assert [digest(item) for item in items] == uncached

    in_children([child, child])
    assert max(computed().values()) <= 2
    assert [digest(item) for item in own] == uncached
    assert computed() == {}
    assert not list((cohort.parent / "cache").rglob(".tmp-*"))


def test_two_datasets_share_a_database(cohort: Path, computed: Any) -> None:
    """LMDB forbids a process to open it twice; whatever the path is written like, it does not."""
    one = dataset(cohort, "lmdb")
    two = dataset(cohort, "lmdb", cache_dir=cohort / ".." / "cache")
    (cohort.parent / "link").symlink_to(cohort.parent / "cache")
    three = dataset(cohort, "lmdb", cache_dir=cohort.parent / "link")
    for items in (one, two, three, one):
        assert len(list(items)) == 4
    assert computed() == all_once()


def test_database_grows(cohort: Path, computed: Any) -> None:
    """Beyond its first size, in threads, and in a process that did not make it grow."""
    database = LMDBBackend(cohort.parent / "cache" / "x.lmdb", map_size=1 << 16)
    other = LMDBBackend(cohort.parent / "cache" / "x.lmdb")
    payload = {f"{number:064d}": os.urandom(20000 + number) for number in range(30)}

    started, go_on = (cohort.parent / name for name in ("started", "go_on"))

    def child() -> None:
        started.touch()
        wait_for(go_on.exists)
        for key, data in payload.items():
            database.put(f"c{key[1:]}", data)

    def write(keys: list[str]) -> None:
        for key in keys:
            database.put(key, payload[key])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    wait_for(started.exists)
    # Open here while the child makes it grow.
    database.put("0" * 64, b"first")
    go_on.touch()
    process.join()
    assert process.exitcode == 0
    assert len(database.get(f"c{'29':0>63}") or b"") == 20029
    keys = list(payload)
    in_threads([lambda: write(keys[::2]), lambda: write(keys[1::2])])
    for key, data in payload.items():
        assert database.get(key) == data
        assert other.get(f"c{key[1:]}") == data
    small = dataset(cohort, "lmdb", map_size=1 << 16)
    list(small)
    computed()
    list(small)
    assert computed() == {}


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


@pytest.mark.parametrize("cache", ["disk", "lmdb", "window"])
def test_memory_does_not_grow(cohort: Path, cache: str, tmp_path: Path) -> None:
    """No item outlives its use, but in the window."""
    for number in range(8):
        scan(cohort / f"more{number}.nii.gz", number)
    items = dataset(cohort, cache, window=2)
    living = count_images()
    for item in items:
        assert item["image"].any()
    del item
    assert count_images() <= living
    if isinstance(items.backend, MemoryBackend):
        assert len(items.backend) == 2


def count_images() -> int:
    gc.collect()
    return sum(type(found) is MetaTensor for found in gc.get_objects())


# -- arguments, MONAI --


def test_arguments(cohort: Path) -> None:
    with pytest.raises(ValueError, match=r"`cache` must be one of \['disk', .*\], got 'ram'"):
        dataset(cohort, "ram")
    for cache in ("disk", "lmdb"):
        with pytest.raises(ValueError, match="needs `cache_dir`"):
            dataset(cohort, cache, cache_dir=None)
    with pytest.raises(ValueError, match="`window` must be a whole number of at least 1, got 0"):
        dataset(cohort, "window", window=0)


def test_monai_loses_meta_data(cohort: Path, tmp_path: Path) -> None:
    """Why its datasets are not used. When this fails, look whether they can be."""
    cases = find_cases(cohort)
    persistent = PersistentDataset(cases, preprocessing(), tmp_path / "persistent")
    assert isinstance(persistent[0]["image"], MetaTensor)
    assert not isinstance(persistent[0]["image"], MetaTensor)
    stale = PersistentDataset(cases, preprocessing(pixdim=4.0), tmp_path / "persistent")
    assert torch.equal(stale[0]["image"], persistent[0]["image"])
    database = LMDBDataset(cases, preprocessing(), tmp_path / "lmdb", progress=False, hash_transform=pickle_hashing)
    assert not isinstance(database[0]["image"], MetaTensor)


def test_with_monais_thread_loader(cohort: Path) -> None:
    uncached = expected(cohort)
    items = dataset(cohort, "lmdb")
    for _ in range(2):
        batches = list(ThreadDataLoader(items, batch_size=1, num_workers=2, use_thread_workers=True))
        for batch, reference in zip(batches, uncached, strict=True):
            assert torch.equal(batch["image"][0].as_tensor(), reference["image"].as_tensor())
            assert torch.equal(batch["image"][0].affine, reference["image"].affine)


def test_lmdb_guard_is_still_needed(tmp_path: Path) -> None:
    """Why all datasets of a process share one connection."""
    first = lmdb.open(str(tmp_path / "x.lmdb"), subdir=False)
    with pytest.raises(lmdb.Error, match="already open in this process"):
        lmdb.open(str(tmp_path / "x.lmdb"), subdir=False)
    first.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_lmdb_keeps_few_pages_mapped(tmp_path: Path) -> None:
    """Pages that were read count as memory of the process: 48 MiB were read here, of which a third may stay."""
    backend = LMDBBackend(tmp_path / "cache.lmdb")
    entries = {f"key {i}": bytes([i]) * (4 << 20) for i in range(12)}
    for key, data in entries.items():
        backend.put(key, data)
    for key, data in entries.items():
        assert backend.get(key) == data
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("cache.lmdb"))
    resident = next(line for line in lines[start:] if line.startswith("Rss:"))
    assert int(resident.split()[1]) <= 17 * 1024  # kB
