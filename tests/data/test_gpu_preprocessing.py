"""Preprocessing on a GPU, by CuPy and by cuCIM, and its cache. Without a GPU, all but what is marked runs on stand-ins:
tensors on the CPU that count as a GPU's, and a CuPy that holds NumPy's arrays.
"""

from __future__ import annotations

import builtins
import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cached_cohort, mapped_cohort
from helpers.cached_cohort import AFFINE, all_once, expected
from helpers.caches import FILED, KINDS
from helpers.fake_cupy import fake_cupy
from helpers.items import assert_same
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    CuCIMd,
    EnsureTyped,
    Invertd,
    MapTransform,
    RandomizableTrait,
    ToCupyd,
    ToDeviced,
    Transform,
)
from monai.utils import OptionalImportError

import monai_saliency as ms
from monai_saliency.data import cached_dataset
from monai_saliency.data.cached_dataset import cohort_dataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.loader import CohortLoader
from monai_saliency.errors import CaseError
from monai_saliency.storage import serialization
from monai_saliency.storage.backends import MemoryBackend
from monai_saliency.storage.key import fingerprint, library_versions, package_version
from monai_saliency.transforms import SaveSaliencyd

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class RandZero(MapTransform, RandomizableTrait):
    """Changes in place what it is given, as a random transform may."""

    def __call__(self, data: Any) -> Any:
        for key in self.keys:
            data[key][...] = 0
        return data


class OnGpu(Transform):
    """What torch and CuPy say where a GPU was used before the fork."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __call__(self, data: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(self.words)
        return data


@pytest.fixture
def staying(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All tensors count as tensors on a GPU, whose memory has room. Their sizes, as they are asked for."""
    asked: list[int] = []
    monkeypatch.setattr(serialization, "stays", lambda tensor: asked.append(tensor.nbytes) or True)
    return asked


# Tensors on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", KINDS)
def test_every_cache_gives_the_same(cohort: Path, cache: str, computed: Any, staying: list[int]) -> None:
    """Whatever a reader does to its copy, and with all that Invertd needs."""
    uncached = expected(cohort)
    computed()
    transform = cached_cohort.preprocessing()
    items = cached_cohort.dataset(cohort, cache, transform)
    for _ in range(3):
        for item, reference in zip(items, uncached, strict=True):
            assert_same(item, reference)
            back = Invertd("image", transform, nearest_interp=False)(item)["image"]
            assert np.allclose(back.affine, AFFINE)
            item["image"].zero_()
            item["image"].affine[0, 0] = 9
    assert computed() == all_once()
    assert bool(staying) == (cache == "memory")  # the window has files behind it
    if cache in FILED:
        assert_same(cached_cohort.dataset(cohort, cache)[0], uncached[0])


def test_a_window_without_a_folder_keeps_its_scans_on_the_gpu(cohort: Path, staying: list[int]) -> None:
    items = cached_cohort.dataset(cohort, "window", window=2, cache_dir=None)
    size = [item["image"].nbytes for item in items][-1]
    assert isinstance(items.backend, MemoryBackend)
    entries: Any = items.backend._entries.values()
    assert [max(tensor.nbytes for tensor in entry.kept) for entry in entries] == [size, size]


@pytest.mark.parametrize("cache", KINDS)
def test_a_random_transform_may_change_its_copy(cohort: Path, cache: str, staying: list[int]) -> None:
    items = cached_cohort.dataset(cohort, cache, cached_cohort.preprocessing(RandZero("image")))
    for _ in range(2):
        assert not items[0]["image"].any()
    items = cached_cohort.dataset(cohort, cache)
    assert items[0]["image"].any()


@pytest.mark.parametrize("cache", KINDS)
def test_maps_are_equal_with_every_cache(
    tmp_path: Path, cache: str, notes: Any, computed: Any, staying: list[int]
) -> None:
    items = mapped_cohort.dataset(mapped_cohort.write_cohort(tmp_path / "maps"), cache)
    for _ in range(2):
        for item in items:
            assert torch.equal(item["saliency"].as_tensor(), mapped_cohort.expected_map(item["image"].as_tensor()))
            item["image"].zero_()
            item["saliency"].zero_()
    assert notes() == {"scans": 3, "maps": 3}


def test_what_decides_on_the_values_is_in_the_key(cohort: Path, computed: Any) -> None:
    items = cached_cohort.dataset(cohort, "memory")
    items[0]
    computed()
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with torch.autocast("cpu", dtype=torch.bfloat16):
        items[0]
    with torch.device("meta"), pytest.raises(CaseError):  # where NumPy's arrays become tensors without values
        items[0]
    matmul.fp32_precision = "tf32"
    try:
        items[0]
    finally:
        matmul.fp32_precision = before
    assert computed() == {"a": 3}
    items[0]
    assert computed() == {}


@needs_gpu
@pytest.mark.parametrize("workers", [(0, False), (2, False), (2, True)], ids=["no workers", "2 threads", "2 processes"])
@pytest.mark.parametrize("cache", KINDS)
def test_on_a_gpu(cohort: Path, cache: str, workers: tuple[int, bool]) -> None:
    """Also by forked workers, which cannot use the GPU, where a cache on disk is full."""
    torch.zeros(1, device="cuda")
    on_gpu = cached_cohort.preprocessing(EnsureTyped("image", device="cuda"))
    uncached = expected(cohort, on_gpu)
    items = cached_cohort.dataset(cohort, cache, on_gpu)
    for _ in range(2):
        for item, reference in zip(items, uncached, strict=True):
            assert_same(item, reference)
            item["image"].zero_()
    if workers[1] and cache in ("memory", "window"):
        return
    loader = CohortLoader(items, num_workers=workers[0], processes=workers[1], device="cuda")
    for batch, reference in zip(loader, uncached, strict=True):
        assert torch.equal(batch["image"][0].as_tensor(), reference["image"].as_tensor())


@needs_gpu
def test_maps_of_a_scan_on_a_gpu_lie_on_the_scan(cohort: Path, tmp_path: Path) -> None:
    """Explained on the GPU and on the CPU, inverted and saved from the device where the scan is."""
    import nibabel as nib

    explain = ms.sliding_window(6, target=ms.ClassScore([0], "none"))
    steps = cached_cohort.preprocessing(EnsureTyped("image", device="cuda"))
    written = []
    for device in (None, "cpu", "cuda"):
        item = cached_cohort.dataset(cohort, "memory", steps)[0]
        item = ms.Saliencyd("image", network, explain, "saliency", device)(item)
        assert item["saliency"].is_cuda
        item = Invertd("saliency", steps, orig_keys="image", nearest_interp=False)(item)
        item = SaveSaliencyd("saliency", tmp_path / str(device))(item)
        written.append(nib.load(item["saliency_path"]).get_fdata())
    assert np.abs(written[0]).max() > 0
    for other in written[1:]:
        np.testing.assert_allclose(other, written[0], atol=1e-5 * np.abs(written[0]).max())


def network(x: torch.Tensor) -> torch.Tensor:
    return (x**2).mean(dim=(1, 2, 3, 4))[:, None]


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
        "start method",
        "cudaErrorInitializationError: initialization error",
    ],
    ids=["torch", "CuPy"],
)
def test_a_gpu_in_a_forked_worker_is_named(cohort: Path, words: str) -> None:
    items = cached_cohort.dataset(cohort, "disk", cached_cohort.preprocessing(OnGpu(words)))
    match = r"^case a: a GPU cannot be used in a forked worker process: use threads .*'spawn', or fill a disk or lmdb"
    with pytest.raises(CaseError, match=match):
        list(CohortLoader(items, num_workers=1, processes=True))
    list(items)  # which fills the cache
    assert len(list(CohortLoader(items, num_workers=1, processes=True))) == 4


# CuPy and cuCIM -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["none", *KINDS])
def test_arrays_of_cupy_before_a_random_transform(
    cohort: Path, cache: str, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where RandCuCIMd is the first random transform. Nothing of the meta data is left, as in MONAI."""
    cupy = fake_cupy(monkeypatch)
    voxels = [item["image"].numpy() for item in expected(cohort)]
    computed()
    for more in ((), (RandZero("image"), EnsureTyped("image"))):
        items = cached_cohort.dataset(cohort, cache, cached_cohort.preprocessing(ToCupyd("image"), *more))
        for _ in range(2):
            for item, reference in zip(items, voxels, strict=True):
                assert type(item["image"]) is (MetaTensor if more else cupy.ndarray)
                if not more:
                    assert np.array_equal(item["image"].get(), reference)
                    item["image"][...] = 0
                assert not np.asarray(item["image"] if more else item["image"].get()).any()
    assert computed() == all_once({"none": 4, "memory": 2}.get(cache, 1))


def test_cupy_that_cannot_be_imported_where_the_cache_is_read(
    cohort: Path, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another version, or none, is installed, the scan is computed again."""
    monkeypatch.setattr(cached_dataset, "library_versions", lambda: {"cupy": "14.2"})
    steps = cached_cohort.preprocessing(ToCupyd("image"))
    with monkeypatch.context() as here:
        fake_cupy(here)
        list(cached_cohort.dataset(cohort, "disk", steps))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CaseError, match=r"^case a: the cached item holds .*be imported: pip install cupy-cuda12x"):
        cached_cohort.dataset(cohort, "disk", steps)[0]
    assert computed() == all_once()


@pytest.mark.parametrize(("name", "package"), [("cupy", "cupy-cuda12x"), ("cucim", "cucim-cu12")])
def test_a_package_that_is_not_installed(name: str, package: str, cohort: Path) -> None:
    """As MONAI says it where a transform needs it."""

    def needs(item: Any) -> Any:
        raise OptionalImportError(f"import {name} (No module named '{name}').\n\nFor details about installing")

    with pytest.raises(CaseError, match=rf"^case a: {name} is not installed: pip install {package}, or .* CUDA$"):
        cohort_dataset(find_cases(cohort), needs, "none")[0]


CUCIM = """
def image_flip(array, spatial_axis):
    return array[tuple(slice(None, None, -1 if axis in spatial_axis else 1) for axis in range(array.ndim))] * 1

def scale(array, factor):
    return array * factor
"""


def write_cucim(folder: Path, version: str, text: str = CUCIM) -> None:
    """An installed package of the name, with the functions that MONAI looks for."""
    inside = folder / "site-packages" / "cucim" / "core" / "operations" / "expose"
    inside.mkdir(parents=True, exist_ok=True)
    for package in (inside, *inside.parents[:3]):
        (package / "__init__.py").write_text("")
    (inside / "transform.py").write_text(text)
    for old in (folder / "site-packages").glob("cucim_cu12-*"):
        (old / "METADATA").unlink()
        (old / "top_level.txt").unlink()
        old.rmdir()
    about = folder / "site-packages" / f"cucim_cu12-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cucim-cu12\nVersion: {version}\n")
    (about / "top_level.txt").write_text("cucim\n")


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    importlib.invalidate_caches()
    package_version.cache_clear()


@pytest.fixture
def cucim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path / "packages" / "site-packages"))
    write_cucim(tmp_path / "packages", "24.2")
    forget("cucim")
    yield tmp_path / "packages"
    monkeypatch.undo()
    forget("cucim")


def test_another_function_of_cucim_is_another_entry(
    cohort: Path, cucim: Path, computed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are its arguments, and another version of cuCIM."""
    fake_cupy(monkeypatch)

    def first(**settings: Any) -> np.ndarray:
        steps = cached_cohort.preprocessing(ToCupyd("image"), CuCIMd("image", **settings), EnsureTyped("image"))
        found: np.ndarray = cached_cohort.dataset(cohort, "disk", steps)[0]["image"].numpy()
        return found

    plain = expected(cohort)[0]["image"].numpy()
    computed()
    for _ in range(2):
        assert np.array_equal(first(name="image_flip", spatial_axis=(1,)), plain[:, ::-1])
        assert np.array_equal(first(name="image_flip", spatial_axis=(2,)), plain[:, :, ::-1])
        assert np.array_equal(first(name="scale", factor=2.0), 2 * plain)
    assert computed() == {"a": 3}
    write_cucim(cucim, "25.4")
    forget("cucim")
    assert np.array_equal(first(name="scale", factor=2.0), 2 * plain)
    assert computed() == {"a": 1}
    assert library_versions()["cucim"] == "25.4"


def test_cucim_that_is_not_installed(cohort: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset can be made, and each case says what is missing."""
    found = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "cucim":
            raise ModuleNotFoundError("No module named 'cucim'")
        return found(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    fake_cupy(monkeypatch)
    steps = cached_cohort.preprocessing(ToCupyd("image"), CuCIMd("image", name="image_flip", spatial_axis=(1,)))
    with pytest.warns(UserWarning, match=r"transform 10 of 10, CuCIMd, is not cached"):
        items = cached_cohort.dataset(cohort, "memory", steps)
    with pytest.raises(CaseError, match=r"^case a: cucim is not installed: pip install cucim-cu12"):
        items[0]


def test_cucims_own_functions_differ() -> None:
    pytest.importorskip("cucim.core.operations.expose.transform", reason="needs cuCIM")
    steps = [
        CuCIMd("image", name="image_flip", spatial_axis=(1,)),
        CuCIMd("image", name="image_flip", spatial_axis=(2,)),
        CuCIMd("image", name="image_rotate_90", spatial_axis=(1, 2)),
        CuCIMd("image", name="scale_intensity_range", a_min=0, a_max=1, b_min=0, b_max=2),
    ]
    assert len({fingerprint(step) for step in steps}) == len(steps)
    assert {"cupy", "cucim"} <= library_versions().keys()


def test_the_device_of_a_transform_is_another_entry() -> None:
    """Voxels that were computed on a GPU differ in their last bits."""
    steps = [EnsureTyped("image"), *(EnsureTyped("image", device=name) for name in ("cpu", "cuda", "cuda:1"))]
    steps += [ToDeviced("image", name) for name in ("cpu", "cuda")]
    assert len({fingerprint(step) for step in steps}) == len(steps)


def test_maps_of_what_cupy_made_are_not_put_on_the_scan(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of CuPy has neither affine nor record of transforms, so nobody knows where its map lies."""
    fake_cupy(monkeypatch)
    steps = cached_cohort.preprocessing(ToCupyd("image"), EnsureTyped("image"))
    item = cohort_dataset(find_cases(cohort), Compose(steps), "memory")[0]
    item = ms.Saliencyd("image", network, ms.sliding_window(6, target=ms.ClassScore([0], "none")), "saliency")(item)
    with pytest.raises(CaseError, match=r"^case a: "):
        SaveSaliencyd("saliency", tmp_path / "out")(item)
    assert not (tmp_path / "out").exists()
