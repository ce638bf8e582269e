"""How busy the network was, against sums by hand, and the trace that a flag gives."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import monai.bundle
import pytest
import torch
from helpers.own_bundle import BATCH, BATCHES, settings
from helpers.scans import write_scans

from monai_saliency.utils import timing
from monai_saliency.utils.timing import BusyMeter

STAGES = ["perturb", "forward", "read scores", "map", "save"]


def events(folder: Path) -> list[list[dict]]:
    """The finished operations of each trace file, oldest file first."""
    files = sorted(folder.glob("*.pt.trace.json.gz"), key=lambda path: path.stat().st_mtime_ns)
    traces = [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in files]
    return [[event for event in trace if event["ph"] == "X"] for trace in traces]


def test_stages_and_operators_are_in_the_trace(tmp_path: Path) -> None:
    """Four cases of 8 batches each: with their maps and with their saving, which another thread does."""
    write_scans(tmp_path, 4)
    monai.bundle.run(**settings(tmp_path, "out", profile=str(tmp_path / "trace")))
    (trace,) = events(tmp_path / "trace")
    counts = Counter(event["name"] for event in trace)
    assert counts["saliency: forward"] == 4 * BATCHES < 50
    assert counts["aten::conv3d"] >= 4 * BATCHES
    assert set(counts) >= {f"saliency: {stage}" for stage in STAGES}
    threads = {name: {event["tid"] for event in trace if event["name"] == f"saliency: {name}"} for name in STAGES}
    assert threads["perturb"] == threads["forward"] == threads["map"]
    assert not threads["save"] & threads["forward"]


def test_a_trace_ends_after_50_batches(tmp_path: Path) -> None:
    """So that it stays small, whatever the number of masks."""
    write_scans(tmp_path, 2)
    monai.bundle.run(**settings(tmp_path, "out", num_masks=120, profile=str(tmp_path / "trace")))
    (trace,) = events(tmp_path / "trace")
    counts = Counter(event["name"] for event in trace)
    assert counts["saliency: forward"] == 50
    assert counts["saliency: map"] == 1


@pytest.mark.parametrize("waiting", [64, 1])
def test_share_by_hand(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy from 10 to 12, from 15 to 18 and from 19 to 20: 6 of 10 seconds."""
    clock = iter([10.0, 12.0, 15.0, 18.0, 19.0, 20.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "_WAITING", waiting)
    meter = BusyMeter()
    for images in (1, 16, 3):
        with meter.call(torch.ones(images, 2)):
            pass
    busy = "network busy 60.0 % of the 10.0 s between its first and last forward"
    assert str(meter) == f"{busy} (20 images, with the predictions, checks and padding)"


def test_the_run_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a network that takes 20 ms. Of each case three images go through it alone or to predict."""
    write_scans(tmp_path, 2)
    monai.bundle.run(**settings(tmp_path, "out", seconds=0.02), fill=0.0)
    assert not list(tmp_path.rglob("*.pt.trace.json*"))  # unless it is asked for
    (found,) = re.findall(r"network busy (\S+) % of the (\S+) s .* \((\d+) images, with", capsys.readouterr().out)
    share, wall, images = float(found[0]), float(found[1]), int(found[2])
    assert images == 2 * (3 + BATCHES * BATCH)
    assert 0.02 * 2 * (BATCHES + 2) <= share / 100 * wall + 0.1 <= wall + 0.1
