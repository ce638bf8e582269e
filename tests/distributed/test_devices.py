"""Several devices in one process, against one: three threads on the CPU, each with a network of its own."""

import itertools
import threading
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import monai.bundle
import pytest
import torch
from helpers.files import voxels
from helpers.own_bundle import settings
from helpers.scans import write_scans
from helpers.tolerances import assert_close, assert_same_bits
from monai.inferers import SlidingWindowInferer
from torch import nn

import monai_saliency as ms
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.distributed import DevicesEngine, MasksOverDevices
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.utils.precision import exact_arithmetic, network_arithmetic

CPUS = ["cpu", "cpu", "cpu"]
TARGET = ms.ClassScore("all", activation="softmax")


class Network(nn.Module):
    """Normalises by running statistics, and notes in which thread it sees what."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)
        )
        self.body[1].running_mean.normal_()
        self.body[1].running_var.uniform_(0.5, 2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.body(x)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 1, 12, 10, generator=torch.Generator().manual_seed(1))


def rise(num_masks: int = 30, mask_batch_size: int = 4, **overrides: Any) -> ms.PerturbationInferer:
    return ms.rise(num_masks, 3, target=TARGET, mask_batch_size=mask_batch_size, **overrides)


def over_devices(inferer: ms.PerturbationInferer, devices: Any) -> ms.PerturbationInferer:
    return inferer.replace(sharing=MasksOverDevices(devices))


class Counting(nn.Conv2d):
    """Counts the batches that each copy of a network runs."""

    counts: ClassVar[Counter[int]] = Counter()
    lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.counts[id(self)] += len(x) > 1  # else it is an image alone, which a row is compared with
        return super().forward(x)


def batches(network: nn.Module) -> Counter[int]:
    """How many batches the network runs from now on, and each copy of it."""
    Counting.counts = Counter()
    network.body[0].__class__ = Counting
    return Counting.counts


def none_left() -> bool:
    return not any("monai_saliency-device" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("num_masks", [30, 2])
@pytest.mark.parametrize("devices", [["cpu"], CPUS])
def test_maps_are_equal_to_the_bit(images: torch.Tensor, devices: list[str], num_masks: int) -> None:
    """Also where there are fewer batches than devices, and where the network comes in training mode."""
    network = Network().train()
    network.body[0].eval()
    plain = rise(num_masks).explain(images, network)
    shared = over_devices(rise(num_masks), devices).explain(images, network)
    for a, b in zip(shared, plain, strict=True):
        assert_same_bits(a.saliency, b.saliency)
        assert_same_bits(a.scores, b.scores)
        assert_same_bits(a.reference_scores, b.reference_scores)
        assert a.name == b.name
    parts = (network, network.body, network.body[0], network.body[1])
    assert [part.training for part in parts] == [True, True, False, True]


def test_remembered_patches(images: torch.Tensor) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))
    explain = ms.sliding_window(
        4,
        3,
        target=ms.RegionScore(1, "none", region="all"),
        inferer=SlidingWindowInferer((6, 5), sw_batch_size=3, sw_device="cpu"),
    )
    assert_same_bits(over_devices(explain, CPUS)(images, network), explain(images, network))


def test_copies_are_never_stale(images: torch.Tensor) -> None:
    """Whatever changes: weights in place, buffers, an attribute, the network itself."""
    network = Network()
    explain = over_devices(rise(), CPUS)

    def check() -> torch.Tensor:
        maps = explain(images, network)
        assert_same_bits(maps, rise()(images, network))
        return maps

    seen = [check()]

    def data() -> None:
        network.body[5].weight.data.mul_(2)

    def buffer() -> None:
        network.body[1].running_mean -= 0.5

    def attribute() -> None:
        network.scale = 0.5

    for change in (data, buffer, attribute):
        change()
        seen.append(check())
    network = Network(seed=7)
    seen.append(check())
    network = network.double()
    images = images.double()
    assert check().dtype == torch.float64
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_stored_scores(images: torch.Tensor, tmp_path: Path) -> None:
    """A run that stops in one thread goes on where all were, on any number of devices."""
    (whole,) = rise().explain(images[:1], Network())
    for devices in (["cpu"], CPUS):
        scores = ScoreStore(tmp_path / str(len(devices))).open("case", "key")
        network = Network()
        counts = batches(network)
        # The image, all hidden, the first batch and the check of its rows: then batches whose scores can be kept.
        stopping = StopsLater(network, 6)
        with pytest.raises(RuntimeError, match="out of memory"):
            over_devices(rise(), CPUS).explain(images[:1], stopping, stored=[scores])
        kept = len(scores.ranges())
        assert kept >= 1
        before = sum(counts.values())
        stopping.after = None
        (resumed,) = over_devices(rise(), devices).explain(images[:1], stopping, stored=[scores])
        assert_same_bits(resumed.saliency, whole.saliency)
        # Of 8 batches the first is run by all, and what is stored by none.
        assert sum(counts.values()) - before == len(devices) + 8 - kept
        # All in one file now, and the plain inferer takes it.
        assert [(start, stop) for start, stop, _ in scores.ranges()] == [(0, 30)]
        (again,) = rise().explain(images[:1], stopping, stored=[scores])
        assert again.num_forwards == 4
        assert_same_bits(again.saliency, whole.saliency)


class StopsLater(nn.Module):
    """Its copies fail in the batch after so many."""

    def __init__(self, network: nn.Module, after: int | None) -> None:
        super().__init__()
        self.network = network
        self.after = after
        self.seen = 0
        self.original = id(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.after is not None and self.seen > self.after and id(self) != self.original:
            raise RuntimeError("out of memory")
        return self.network(x)


def test_an_error_stops_all(images: torch.Tensor) -> None:
    network = Network()
    counts = batches(network)
    with pytest.raises(RuntimeError, match="out of memory"):
        over_devices(rise(3000), CPUS).explain(images, StopsLater(network, 5))
    assert sum(counts.values()) < 1500 / 2
    assert none_left()


def test_a_network_that_cannot_be_copied(images: torch.Tensor) -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :2]

    with pytest.raises(ValueError, match=r"the network \(network\) cannot be copied to 3 devices \(it is not a torch"):
        over_devices(rise(), CPUS)(images, network)
    assert_same_bits(over_devices(rise(), ["cpu"])(images, network), rise()(images, network))
    locked = Network()
    locked.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"the network \(Network\) cannot be copied .*cannot pickle.* `torchrun`"):
        over_devices(rise(), CPUS)(images, locked)


def test_no_network_runs_while_another_thread_has_tf32_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is the whole process's: threads that run networks, and threads that render masks, take turns."""
    matmul, conv = (types.SimpleNamespace(fp32_precision="tf32") for _ in range(2))
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends.cudnn, "conv", conv)
    cuda, seen = torch.device("cuda"), []

    def explain() -> None:
        for _ in range(50):
            with exact_arithmetic(cuda):
                time.sleep(0.0005)
                seen.append(("exact", matmul.fp32_precision, conv.fp32_precision))
            with network_arithmetic(cuda):
                time.sleep(0.0005)
                seen.append(("network", matmul.fp32_precision, conv.fp32_precision))

    threads = [threading.Thread(target=explain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(seen) == {("exact", "ieee", "ieee"): 200, ("network", "tf32", "tf32"): 200}
    assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")


def test_devices_that_are_not_there() -> None:
    for devices in ([], "cpu"):
        with pytest.raises(ValueError, match="`devices` must be a list of at least one device"):
            over_devices(rise(), devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_no_cuda_device() -> None:
    with pytest.raises(ValueError, match="this machine has no CUDA device: run without the overlay"):
        DevicesEngine()


def test_the_overlay(tmp_path: Path) -> None:
    """Maps with the bytes of the plain run's, whose scores it would also have used."""
    write_scans(tmp_path, 2)
    same = {"network_id": "counting"}  # else the file in which it counts tells it from the other
    monai.bundle.run(**settings(tmp_path, "plain", **same))
    shared = settings(tmp_path, "shared", saliency_devices=CPUS, **same)
    shared["config_file"] = [shared["config_file"], str(overlay_path("devices"))]
    monai.bundle.run(**shared)
    found = voxels(tmp_path / "shared")
    assert sorted(found) == ["s0_saliency.nii.gz", "s1_saliency.nii.gz"]
    assert found == voxels(tmp_path / "plain")
    keys = [{path.parent.name for path in (tmp_path / out / "scores").rglob("0-30.npy")} for out in ("plain", "shared")]
    assert keys[0] == keys[1]


@pytest.mark.cuda
class TestCUDA:
    def test_two_threads_on_one_gpu_equal_to_the_bit(self, images: torch.Tensor) -> None:
        network = Network().cuda()
        plain = rise()(images.cuda(), network)
        assert_same_bits(over_devices(rise(), ["cuda", "cuda"])(images.cuda(), network), plain)

    def test_a_gpu_and_the_cpu(self, images: torch.Tensor) -> None:
        network = Network().cuda()
        plain = rise()(images.cuda(), network)
        maps = over_devices(rise(), ["cpu", "cuda"])(images.cuda(), network)
        assert maps.device.type == "cuda"
        assert_close(maps, plain)
