"""How busy the network was, against sums by hand."""

from __future__ import annotations

import re
import time
from pathlib import Path

import monai.bundle
import pytest
import torch
from helpers.own_bundle import BATCH, NUM_MASKS, settings
from helpers.scans import LPS, write_scan
from monai.inferers import SimpleInferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.targets import BoundTarget
from monai_saliency.utils import timing
from monai_saliency.utils.timing import BusyMeter, Timestamp


def test_share_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy from 10 to 12, from 15 to 18 and from 19 to 20: 6 of 10 seconds."""
    clock = iter([10.0, 12.0, 15.0, 18.0, 19.0, 20.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    meter = BusyMeter()
    inferer = meter.watch(SimpleInferer())
    for images in (1, 16, 3):
        assert torch.equal(inferer(torch.ones(images, 2), lambda x, factor: x * factor, 3), torch.full((images, 2), 3))
    assert (meter.busy_seconds, meter.wall_seconds, meter.images) == (6.0, 10.0, 20)
    assert str(meter) == "network busy 60.0 % of the 10.0 s between its first and last forward (20 images)"


def test_a_network_that_never_ran() -> None:
    meter = BusyMeter()
    assert (meter.busy_seconds, meter.wall_seconds, meter.images) == (0.0, 0.0, 0)
    assert str(meter).startswith("network busy 0.0 %")


class Slow(ms.ClassScore):
    """Reads scores in 5 s of a clock."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__([0], activation="none")
        self.clock = clock

    def bind(self, reference_output: torch.Tensor, case: Case) -> BoundTarget:
        bound = super().bind(reference_output, case)

        def slow(output: torch.Tensor) -> torch.Tensor:
            self.clock[0] += 5
            return bound(output)

        return slow  # type: ignore[return-value]


def test_only_the_networks_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches and three images alone of 2 s each; scores are read between them."""
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def network(x: torch.Tensor) -> torch.Tensor:
        clock[0] += 2
        return x.flatten(1)[:, :2]

    meter = BusyMeter()
    ms.rise(31, 3, target=Slow(clock), mask_batch_size=8, meter=meter)(torch.rand(1, 1, 12, 12), network)
    assert (meter.busy_seconds, meter.images) == (14, 3 + 32)
    assert meter.wall_seconds > 14


def test_the_prediction_is_left_as_it_is() -> None:
    """Whatever inferer is watched, with its own arguments."""
    image, network = torch.rand(1, 1, 40, 40), torch.nn.Conv2d(1, 2, 3, padding=1)
    window = SlidingWindowInferer((16, 16), overlap=0.25)
    with torch.no_grad():
        assert torch.equal(BusyMeter().watch(window)(image, network), window(image, network))


def test_the_run_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cohort of three, with a network that takes 20 ms: the images are all it saw, the wall time is the run's."""
    for seed in range(3):
        write_scan(tmp_path / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    start = time.perf_counter()
    monai.bundle.run(**settings(tmp_path, "out", seconds=0.02))
    total = time.perf_counter() - start
    (found,) = re.findall(r"network busy (\S+) % of the (\S+) s .* \((\d+) images\)", capsys.readouterr().out)
    share, wall, images = float(found[0]), float(found[1]), int(found[2])
    batches = 3 * -(-(NUM_MASKS + 1) // BATCH)
    assert images == 3 * 3 + batches * BATCH == sum(map(int, (tmp_path / "out.log").read_text().split()))
    assert 0.02 * (batches + 3) <= wall + 0.05 <= total + 0.05
    assert 100 * 0.02 * (batches + 3) / (wall + 0.05) <= share <= 100


@pytest.mark.timing
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_devices_time_counts() -> None:
    """Not the time that it takes to give it work: a few ms there, against the time of a network that waits."""
    device = torch.device("cuda")
    cycles = int(2e8)
    start = Timestamp(device)
    torch.cuda._sleep(cycles)
    alone = Timestamp(device).seconds_since(start)
    meter = BusyMeter()
    inferer = meter.watch(SimpleInferer())

    def network(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return x

    before = time.perf_counter()
    for _ in range(5):
        inferer(torch.ones(2, 1, device=device), network)
    assert time.perf_counter() - before < alone  # nothing waited
    assert meter.busy_seconds == pytest.approx(5 * alone, rel=0.1)
    assert meter.wall_seconds == pytest.approx(5 * alone, rel=0.1)
