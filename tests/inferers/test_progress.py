"""What is shown of a run: a price, a line or a bar."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monai_saliency as ms
from monai_saliency.inferers import progress as module
from monai_saliency.inferers.progress import Progress, following
from monai_saliency.inferers.rounds import Plan


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def cases(*names: str, at_most: int = 100) -> list[Any]:
    """Cases of 100 masks in rounds, and an unperturbed image, of which 41 rows are planned first."""
    masks = SimpleNamespace(in_rounds=True, at_most=at_most)
    return [SimpleNamespace(case=SimpleNamespace(name=name), masks=masks, num_rows=41) for name in names]


def test_lines_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """The price once, then a line after two seconds and each minute, with the time that is left."""
    shown = Progress(10)
    shown.begin(Plan(41), cases("a"), 0)
    shown.begin(Plan(60), cases("a"), 1)
    clock.now = 1.0
    shown.advance(1)  # warms up
    for _ in range(10):
        clock.now += 1
        shown.advance(4)
    assert capsys.readouterr().err.splitlines() == [
        "10 cases, up to 101 forwards each: up to 1010 in all",
        # 1005 forwards are left after 4 in a second.
        "case 1 of 10, a: 5 of about 1010 forwards, about 0:04:11 left",
    ]
    shown.end(1)
    shown.begin(Plan(41), cases("b"), 0)
    clock.now = 62.0
    shown.advance(9)  # 41 forwards a case: 410 in all, 49 of 50 since the first in 61 s
    assert capsys.readouterr().err == "case 2 of 10, b: 50 of about 410 forwards, about 0:07:28 left\n"


@pytest.mark.parametrize(
    ("setting", "seconds", "bar"), [(True, 1, True), (None, 4, False), (None, 6, True), (False, 9, False)]
)
def test_a_bar_on_a_terminal(
    setting: bool | None, seconds: float, bar: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """None waits for five seconds; warnings do not break it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with following(setting) as shown:
        shown.begin(Plan(41), cases("a"), 0)
        shown.advance(1)
        clock.now = seconds
        shown.advance(20)
        assert (shown._bar is not None) == bar
        if bar:
            assert (shown._bar.n, shown._bar.total, shown._bar.desc) == (21, 101, "a: ")
            logging.getLogger("monai_saliency").warning("careful")
            assert "careful" in capsys.readouterr().err
    assert shown._bar is None


def test_an_inferer_shows_nothing_in_a_log_file_unless_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    images, network = torch.rand(1, 1, 8, 8), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    ms.rise(20, target=ms.ClassScore([0], "softmax"))(images, network)
    ms.rise(20, target=ms.ClassScore([0], "softmax"), progress=False)(images, network)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match="`progress` must be True, False or None, got 'yes'"):
        ms.rise(20, progress="yes")
