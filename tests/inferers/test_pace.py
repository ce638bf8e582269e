"""How rows are cut into batches, and what a round is reported to cost."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.inferers import pace
from monai_saliency.inferers.rounds import batch_size, rows_in_batch

TARGET = ms.ClassScore([0], "none")


def network(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("setting", "size", "expected"), [(4, 8, 4), (100, 8, 65), ("auto", 8, 16), ("auto", 2048, 4), (1, 2048, 1)]
)
def test_rows_in_a_batch(setting: int | str, size: int, expected: int) -> None:
    """As many as the setting allows, at most all; by itself 16, or as many as hold 2^24 values."""
    states, _ = ms.rise(64, 2, target=TARGET).start(torch.zeros(1, 1, size, size))
    assert rows_in_batch(batch_size(setting), states) == expected


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "most", None, True])
def test_a_wrong_batch_size(wrong: object) -> None:
    with pytest.raises(ValueError, match="mask_batch_size"):
        batch_size(wrong)


def test_a_round_is_reported_before_it_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SHARE", 0.0)
    with caplog.at_level(logging.INFO):
        ms.rise(64, 2, target=TARGET).explain(torch.rand(1, 1, 8, 8), network, cases=[ms.Case("ct_7")])
    first, second = [each.getMessage() for each in caplog.records]
    assert first == "ct_7: 65 forwards; that is 65 predictions"
    assert re.fullmatch(r"ct_7: it takes about \d+ seconds?", second)


def test_a_long_map_names_what_makes_it_shorter() -> None:
    reported = pace.Pace(ms.RISEMasks(10), False)
    assert [reported._duration(each) for each in (0.2, 90, 600, 9000)] == [
        "about 1 second",
        "about 90 seconds",
        f"about 10 minutes; shorter with {ms.RISEMasks(10).shorter}",
        f"about 2.5 hours; shorter with {ms.RISEMasks(10).shorter}",
    ]


def test_patches_are_reported_next_to_whole_images(caplog: pytest.LogCaptureFixture) -> None:
    inferer = SlidingWindowInferer((8, 8), 4, overlap=0.5)
    explain = ms.sliding_window(4, 4, target=ms.RegionScore(0, "none", "all"), inferer=inferer)
    with caplog.at_level(logging.INFO):
        (found,) = explain.explain(torch.rand(1, 1, 16, 16), torch.nn.Conv2d(1, 2, 1), cases=[ms.Case("ct_7")])
    line = caplog.records[0].getMessage()
    assert f"at least {found.num_forwards} patch forwards, 9 of them for unperturbed images" in line
    assert "whole images would need 153, " in line
    assert f"that is {found.num_forwards / 9:.1f} predictions" in line
