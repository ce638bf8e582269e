"""A cached dataset: the same to the bit, nothing stale, copies, random transforms, the window."""

import io
import multiprocessing
import os
import pickle
import resource
import struct
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import Trap
from helpers.warned import our_warnings
from monai.data import MetaTensor
from monai.utils.enums import MetaKeys

from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.errors import CaseError
from monai_saliency.storage.cache import DiskBackend, LMDBBackend, MemoryBackend, decode, encode
from monai_saliency.storage.key import fingerprint
from monai_saliency.transforms import CheckScand

KINDS = ("memory", "disk", "lmdb", "window")
FILED = KINDS[1:]
AFFINE = np.array([[-1.5, 0.2, 0, 10], [0.1, 2, 0, -20], [0, 0, 2.5, 5], [0, 0, 0, 1]])


class Logged(mt.MapTransform):
    """Writes each case that it sees to a file, so that computations are counted in all processes."""

    def __call__(self, data: Any) -> Any:
        with open(os.environ["COMPUTED"], "a") as log:
            log.write(f"{data['case']}\n")
        return data


def preprocessing(*more: Any, pixdim: float = 2.0) -> mt.Compose:
    return mt.Compose(
        [
            Logged("image"),
            mt.LoadImaged("image", dtype="float32"),
            mt.EnsureChannelFirstd("image"),
            CheckScand("image"),
            mt.Orientationd("image", axcodes="RAS", labels=None),
            mt.Spacingd("image", pixdim=[pixdim] * 3, mode="bilinear"),
            mt.ResizeWithPadOrCropd("image", spatial_size=[12, 14, 12]),
            mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True),
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


def assert_same(a: Any, b: Any) -> None:
    """Equal to the bit, in type, order of keys, and memory's order too."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert len(a) == len(b)
        for (key_a, value_a), (key_b, value_b) in zip(a.items(), b.items(), strict=True):
            assert_same(key_a, key_b)
            assert_same(value_a, value_b)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for value_a, value_b in zip(a, b, strict=True):
            assert_same(value_a, value_b)
    elif isinstance(a, torch.Tensor):
        plain_a, plain_b = a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert plain_a.contiguous().flatten().view(torch.uint8).equal(plain_b.contiguous().flatten().view(torch.uint8))
        assert_same(a.__dict__, b.__dict__)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert a.dtype.byteorder == b.dtype.byteorder
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b


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


@pytest.mark.parametrize("cache", KINDS)
def test_cold_and_warm(cohort: Path, cache: str, computed: Any) -> None:
    """Keys, voxels, affine, meta data, applied operations, types; in one dataset, the next, and one sent by pickle."""
    uncached = expected(cohort)
    assert computed() == all_once()
    cold = dataset(cohort, cache)
    again = pickle.loads(pickle.dumps(cold))
    assert len(cold) == 4
    for _ in range(2):
        assert_same(list(cold), uncached)
    assert computed() == all_once()
    for later in (dataset(cohort, cache), again, pickle.loads(pickle.dumps(cold))):
        assert_same(list(later), uncached)
        assert computed() == (all_once() if cache == "memory" else {})
    image = uncached[0]["image"]
    assert isinstance(image, MetaTensor)
    assert image.meta["filename_or_obj"].endswith("a.nii.gz")
    assert len(image.applied_operations) == 3


def test_enumerations_as_early_python_3_11_pickles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``getattr``, which a store that runs no code does not read."""
    monkeypatch.setattr(MetaKeys, "__reduce_ex__", lambda self, _: (getattr, (MetaKeys, self.name)))
    item = {"key": MetaKeys.AFFINE}
    assert decode(encode(item, "scan"), "scan") == item


def test_no_database_stays_open(cohort: Path) -> None:
    """LMDB refuses to open one twice in a process."""
    read = dataset(cohort, "lmdb")
    assert len(list(read)) == 4
    with lmdb.open(str(cohort.parent / "cache/cache.lmdb"), subdir=False, lock=False) as environment:
        assert environment.stat()["entries"] == 4
    assert read[0]["case"] == "a"


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_step_that_fails_is_named_and_not_the_scan(cohort: Path, cache: str) -> None:
    steps = [mt.LoadImaged("image"), mt.EnsureChannelFirstd("image"), mt.ResizeWithPadOrCropd("image", (4, 4))]
    items = CachedDataset(find_cases(cohort), steps, cache)
    with pytest.raises(
        CaseError, match=r"^case a: ResizeWithPadOrCropd? of the preprocessing failed: .* settings of R"
    ):
        items[0]


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
    assert_same(list(dataset(cohort, cache)), expected(cohort))
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


@pytest.mark.parametrize("cache", ["memory", "window"])
def test_random_transforms_stay_random(cohort: Path, cache: str, computed: Any) -> None:
    """They draw anew at each read, as without a cache, to the bit."""
    reads = []
    for kind in ("none", cache):
        steps = preprocessing(mt.RandGaussianNoised("image", prob=1.0), mt.Compose([mt.RandFlipd("image", prob=0.5)]))
        items = dataset(cohort, kind, steps.set_random_state(3))
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
            assert len(items.backend._entries) <= 2
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
    on_gpu = preprocessing(mt.EnsureTyped("image", device="cuda"))
    for _ in range(2):
        for item, reference in zip(dataset(cohort, cache, on_gpu), expected(cohort, on_gpu), strict=True):
            assert item["image"].is_cuda
            assert_same(item, reference)


# A cached dataset whose cache is damaged or full, or whose items cannot be cached.
class Object(mt.MapTransform):
    def __call__(self, data: Any) -> Any:
        return {**data, "odd": object()}


def plus_one(x: Any) -> Any:
    return x + 1


def poisons(marker: Path) -> list[bytes]:
    saved = io.BytesIO()
    torch.save(Trap(marker), saved)
    old = io.BytesIO()
    torch.save(Trap(marker), old, _use_new_zipfile_serialization=False)
    array = io.BytesIO()
    np.save(array, np.array([Trap(marker)], dtype=object), allow_pickle=True)
    return [pickle.dumps(Trap(marker)), saved.getvalue(), old.getvalue(), array.getvalue()]


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
        assert_same(items, uncached)
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
        transform = preprocessing(mt.Lambdad("image", lambda x, n=number: x + n), mt.Lambdad("image", plus_one))
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


# A cached dataset in several threads and processes at once.
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
