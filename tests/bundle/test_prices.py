"""The price that is told of a case is what it takes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import monai.bundle
import pytest
import torch
from helpers.files import rows_of
from helpers.layouts import Bundle
from helpers.paths import BUNDLE
from monai.networks.nets import NetAdapter, UNet

from monai_saliency.data.demo import make_cohort


def prices(said: str, case: str) -> list[float]:
    """The seconds that a case was said to take."""
    return [float(seconds) for seconds in re.findall(rf"{case}: [^\r]*about ([\d.]+) exactly", said)]


def check(said: str, folder: Path, rounds: int = 1) -> None:
    """Within 20 %, by the summary; each round is told with all before it."""
    for row in rows_of(folder / "summary.csv"):
        *before, told = found = prices(said, row["case"])
        assert len(found) == rounds
        assert all(each < told for each in before)
        assert abs(told - float(row["seconds"])) <= 0.2 * float(row["seconds"])


@pytest.fixture
def _exact_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_saliency.inferers.price._duration", lambda seconds: f"about {seconds:.3f} exactly")


@pytest.mark.timing
@pytest.mark.parametrize(("method", "rounds"), [("auto", 4), ("patch_windows", 1)])
@pytest.mark.usefixtures("_exact_seconds")
def test_of_a_sliding_window_bundle(
    method: str,
    rounds: int,
    make: Callable[[str], Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where the network takes a known time."""
    forward = UNet.forward

    def slowly(self: UNet, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return forward(self, x)

    bundle = make("spleen_ct_segmentation")
    monkeypatch.setattr(UNet, "forward", slowly)
    out = tmp_path / "maps"
    bundle.explain(few_masks=False, saliency_dir=str(out), saliency_picture=False, saliency_method=method)
    check(capfd.readouterr().err, out, rounds)


@pytest.mark.timing
@pytest.mark.usefixtures("_exact_seconds")
def test_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """By windows, which come in one round, in CPU seconds of the thread that explains: others draw pictures.

    An image takes the network 10 ms on this clock, which is about right. How fast a shared machine multiplies changes
    by more than 20 % from minute to minute. All else takes what it takes.
    """
    forward, networks = NetAdapter.forward, [0.0]  # by how much the clock is off for the network's sake

    def steadily(self: NetAdapter, x: torch.Tensor) -> torch.Tensor:
        start = time.thread_time()
        output = forward(self, x)
        networks[0] += 0.01 * len(x) - (time.thread_time() - start)
        return output

    monkeypatch.setattr(NetAdapter, "forward", steadily)
    clock = SimpleNamespace(perf_counter=lambda: time.thread_time() + networks[0])
    monkeypatch.setattr("monai_saliency.utils.timing.time", clock)
    make_cohort(tmp_path / "demo", num_scans=3)
    monai.bundle.run(
        bundle_root=str(BUNDLE),
        config_file=str(BUNDLE / "configs" / "inference.yaml"),
        dataset_dir=str(tmp_path / "demo"),
        output_dir=str(tmp_path / "maps"),
        method="sliding_window",
        window_size=10,
        stride=8,
        device="cpu",
    )
    assert networks[0]
    check(capfd.readouterr().err, tmp_path / "maps")
