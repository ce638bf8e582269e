"""The trace that a flag gives."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import monai.bundle
import pytest
from helpers.own_bundle import settings
from helpers.scans import LPS, write_scan

STAGES = ["perturb", "forward", "read scores", "map", "save"]


def events(folder: Path) -> list[list[dict]]:
    """The finished operations of each trace file, oldest file first."""
    files = sorted(folder.glob("*.pt.trace.json.gz"), key=lambda path: path.stat().st_mtime_ns)
    traces = [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in files]
    return [[event for event in trace if event["ph"] == "X"] for trace in traces]


@pytest.mark.parametrize("num_masks", [30, 100])
def test_stages_and_operators_are_in_the_trace(num_masks: int, tmp_path: Path) -> None:
    """The end of a case and its saving too, however many masks it has; and no more of its batches than a few."""
    for seed in range(4):
        write_scan(tmp_path / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    folder = tmp_path / "trace"
    monai.bundle.run(**settings(tmp_path, "out", num_masks=num_masks, profile=str(folder)))
    traces = events(folder)
    assert len(traces) == 2
    for trace in traces:
        counts = Counter(event["name"] for event in trace)
        assert counts["aten::conv3d"] >= counts["saliency: forward"] >= 10
        # With 25 batches a case, most are left out.
        assert counts["saliency: forward"] < 20
    everything = [event for trace in traces for event in trace]
    assert {event["name"] for event in everything} >= {f"saliency: {stage}" for stage in STAGES}
    threads = {name: {event["tid"] for event in everything if event["name"] == f"saliency: {name}"} for name in STAGES}
    assert threads["perturb"] == threads["forward"] == threads["map"]
    assert not threads["save"] & threads["forward"]


def test_a_run_of_one_case(tmp_path: Path) -> None:
    write_scan(tmp_path / "cohort" / "s.nii.gz", (13, 12, 14), LPS)
    monai.bundle.run(**settings(tmp_path, "out", num_masks=20, profile=str(tmp_path / "trace")))
    (trace,) = events(tmp_path / "trace")
    assert {event["name"] for event in trace} >= {f"saliency: {stage}" for stage in STAGES} | {"aten::conv3d"}


def test_no_trace_unless_asked_for(tmp_path: Path) -> None:
    write_scan(tmp_path / "cohort" / "s.nii.gz", (13, 12, 14), LPS)
    monai.bundle.run(**settings(tmp_path, "out"))
    assert not list(tmp_path.rglob("*.pt.trace.json*"))
