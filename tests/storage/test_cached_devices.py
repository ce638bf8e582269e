"""Where cached voxels come back. Without a GPU, a tensor on the CPU is taken for one that stays on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_cupy import fake_cupy
from helpers.items import assert_same
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.storage import devices, serialization
from monai_saliency.storage.serialization import DamagedEntry, NotStorable, decode, encode

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")
LAYOUTS = [
    torch.rand(3, 4, 5),
    torch.rand(3, 4, 5).permute(2, 0, 1),
    torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.rand(6, 6)[1::2, ::3],
    torch.rand(3, 1).expand(3, 4),
    torch.tensor([1 + 2j, -3j]).conj(),
    torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
    torch.tensor(-1.5, dtype=torch.float64),
    torch.empty(2, 0, 3, dtype=torch.int32),
]


@pytest.fixture
def staying(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors count as tensors on a GPU, whose memory has room."""
    monkeypatch.setattr(serialization, "stays", lambda tensor: True)


@pytest.mark.parametrize("value", LAYOUTS, ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_what_stays_is_what_goes_through_bytes(value: torch.Tensor, staying: None) -> None:
    """In its values, and in the order in memory, which decides the last bits of what is computed of it."""
    found, expected = (decode(encode(value, "k", on_device=each), "k") for each in (True, False))
    assert_same(found, expected)
    assert found.stride() == expected.stride()


def test_what_stays_is_read_as_a_copy(staying: None) -> None:
    image = MetaTensor(torch.rand(1, 64, 64), affine=torch.eye(4) * 2, meta={"name": "a"})
    item = {"image": image, "same": image, "array": np.ones(3)}
    expected = decode(encode(item, "k"), "k")
    data = encode(item, "k", on_device=True)
    assert len(data) < image.nbytes  # its voxels are not in the host's memory
    image.zero_()
    for _ in range(2):
        found = decode(data, "k")
        assert_same(found, expected)
        found["image"].zero_()
        found["image"].affine[0, 0] = 9
        assert found["same"].any()


def test_bytes_alone_do_not_hold_what_stays(staying: None) -> None:
    data = encode(torch.rand(3), "k", on_device=True)
    with pytest.raises(DamagedEntry, match="IndexError"):
        decode(bytes(data), "k")


def test_only_a_gpu_keeps_tensors() -> None:
    image = torch.rand(64, 64)
    assert not devices.stays(image)
    assert decode(bytes(encode(image, "k", on_device=True)), "k").equal(image)


@pytest.mark.parametrize(("free", "does"), [(100, True), (61, True), (59, False), (0, False)])
def test_half_of_a_gpu_is_left_to_the_network(free: int, does: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 160 bytes in all, torch holds 30 that it does not use, and the tensor takes 10."""

    class OnGpu:
        is_cuda, device, nbytes = True, CUDA, 10

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 160))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    tensor: Any = OnGpu()
    assert devices.stays(tensor) is does


def test_the_current_gpu_is_stored_without_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each process of a run reads an entry to its own."""
    monkeypatch.setattr(devices, "_current", lambda kind: torch.device(kind, 1))
    names = [devices.device_name(torch.device(each)) for each in ("cuda:1", "cuda:0", "cpu")]
    assert names == ["cuda", "cuda:0", "cpu"]


@pytest.mark.parametrize(
    ("name", "accelerator", "count", "lost", "moved"),
    [
        ("cuda", "cuda", 2, False, "cuda"),
        ("cuda:1", "cuda", 2, False, "cuda:1"),
        ("cuda:2", "cuda", 2, False, None),
        ("cuda", "cuda", 0, False, None),  # a build for CUDA on a machine without a GPU
        ("cuda", "cuda", 2, True, None),  # a forked worker
        ("cuda", None, 0, False, None),
        ("mps", "cuda", 2, False, None),
        ("meta", "cuda", 2, False, None),
        ("cpu", "cuda", 2, False, None),
    ],
)
def test_where_a_tensor_comes_back(
    name: str, accelerator: str | None, count: int, lost: bool, moved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its device where the process can use it, and otherwise on the CPU."""
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(devices, "cuda_is_lost", lambda: lost)
    asked = []
    monkeypatch.setattr(devices, "copied", lambda tensor, device: asked.append(str(device)) or tensor)
    tensor = torch.rand(3)
    assert devices.restored(tensor, name) is tensor
    assert asked == ([] if moved is None else [moved])


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is there")
def test_an_entry_of_a_gpu_comes_back_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "device_name", lambda device: "cuda:3")
    image = MetaTensor(torch.rand(1, 2, 3), meta={"name": "a"})
    assert_same(decode(encode(image, "k"), "k"), image)


def test_a_full_device_is_named_and_is_no_damage(monkeypatch: pytest.MonkeyPatch, staying: None) -> None:
    data = encode(torch.rand(3), "k", on_device=True)

    def to(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(AdviceError, match=r"cannot be put on cpu \(CUDA out of memory\): free .* ToDeviced"):
        decode(data, "k")


def test_without_values_nothing_is_stored() -> None:
    with pytest.raises(NotStorable, match=r"item\['x'\] is a tensor on the meta device"):
        encode({"x": torch.empty(2, device="meta")}, "k")


def test_a_default_device_does_not_damage() -> None:
    """What is read is made on the CPU first, whatever the default device is."""
    data = encode(torch.arange(3), "k")
    with torch.device("meta"):
        assert decode(data, "k").tolist() == [0, 1, 2]


@needs_gpu
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("value", LAYOUTS, ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_on_a_gpu(value: torch.Tensor, on_device: bool) -> None:
    placed = value.to(CUDA)
    data = encode(placed, "k", on_device)
    for _ in range(2):
        found = decode(data, "k")
        assert found.device == placed.device
        assert_same(found.cpu(), placed.cpu().resolve_conj())
        found.zero_()


# CuPy -----------------------------------------------------------------------------------------------------------------

ARRAYS = [
    np.arange(24, dtype=np.float16).reshape(2, 3, 4),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::-2],
    np.array(3, dtype=np.int16),
    np.zeros((0, 3)),
    np.array([True, False]),
]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}-{value.shape}")
def test_arrays_of_cupy(value: np.ndarray, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(monkeypatch)
    array = cupy.array(value)
    data = encode({"x": [array]}, "k", on_device)
    for _ in range(2):
        (found,) = decode(data, "k")["x"]
        assert type(found) is cupy.ndarray
        assert_same(found.get(), value)
        assert found.flags == array.flags
        found[...] = 1


def test_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(monkeypatch)
    data = encode(cupy.array([1.0]), "k")
    monkeypatch.delitem(sys.modules, "cupy")
    with pytest.raises(AdviceError, match=r"CuPy, which cannot be imported: pip install cupy-cuda12x .*Ensure"):
        decode(data, "k")


def test_cupy_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(fake_cupy(monkeypatch).array([1.0]), "k")
    fake_cupy(monkeypatch, gpus=0)
    with pytest.raises(AdviceError, match=r"cannot be put on a GPU \(cudaErrorNoDevice.*: read it where there is one"):
        decode(data, "k")


def test_cupys_own_arrays() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for value in ARRAYS:
        array = cupy.array(value)
        found = decode(encode(array, "k"), "k")
        assert type(found) is cupy.ndarray
        assert_same(cupy.asnumpy(found, order="A"), cupy.asnumpy(array, order="A"))
