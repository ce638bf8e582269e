"""What an explanation costs, as it is told before it begins."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
import torch
from helpers.patches import WHOLE, Network, images
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.inferers.price import Price
from monai_saliency.storage.score_store import ScoreStore


@pytest.mark.parametrize(
    ("price", "words"),
    [
        (Price(1001), "1001 predictions"),
        (Price(1001, seconds=50.05), "1001 predictions, about 50 seconds"),
        (Price(21, 20, seconds=1.05), "1.1 predictions, about 1 second"),
        (Price(1001, 100, seconds=50.05, shorter="a smaller divide"), "10 predictions, about 50 seconds"),
        (
            Price(1001, seconds=500.5, shorter="a smaller num_masks"),
            "1001 predictions, about 8 minutes; shorter with a smaller num_masks",
        ),
        (Price(1001, seconds=30030.0), "1001 predictions, about 8.3 hours"),
    ],
)
def test_words(price: Price, words: str) -> None:
    assert str(price) == words


class Slow(torch.nn.Module):
    """Takes a time for each row, and more for the first call of all."""

    def __init__(self, seconds: float = 0.01, first: float = 0.5) -> None:
        super().__init__()
        self.seconds, self.first = seconds, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x) + self.first)
        self.first = 0.0
        return torch.cat([x, -x], 1)


def slow_sum(output: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return output[:, 0].flatten(1).sum(1)


SLIDING = {"inferer": SlidingWindowInferer((8, 8), 4, 0.5)}
PRICED = {
    "whole images": ms.sliding_window(4, 2, target=WHOLE, mask_batch_size=8),
    "patches": ms.patch_windows(SLIDING["inferer"], 2, target=WHOLE),
    "a target that takes its time": ms.sliding_window(6, 5, target=ms.FunctionScore(slow_sum), **SLIDING),
}


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [r.getMessage() for r in caplog.records if "that is" in r.getMessage()]
    return line


def seconds_told(caplog: pytest.LogCaptureFixture) -> list[float]:
    lines = [r.getMessage() for r in caplog.records]
    return [float(found[1]) for line in lines if (found := re.search(r"about ([\d.]+) s$", line))]


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Seconds are not rounded."""
    monkeypatch.setattr("monai_saliency.inferers.price._duration", lambda seconds: f"about {seconds:.3f} s")
    caplog.set_level(logging.INFO)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("explain", PRICED.values(), ids=PRICED)
def test_what_is_told_is_what_it_takes(explain: ms.PerturbationInferer, caplog: pytest.LogCaptureFixture) -> None:
    """Within 20 %, for the first case, whose first forward is slow and whose rows are checked, and for the second."""
    network = Slow()
    for _ in range(2):
        caplog.clear()
        start = time.perf_counter()
        explain.explain(images(1, 1, 16, 16), network)
        took = time.perf_counter() - start
        (seconds,) = seconds_told(caplog)
        assert abs(seconds - took) <= 0.2 * took


def test_the_second_case_of_a_network_has_its_price_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    explain = ms.sliding_window(6, 5, target=WHOLE, mask_batch_size=4)
    network = Slow(0.01, 0.0)
    explain.explain(images(1, 1, 20, 18), network, cases=[ms.Case("x")])
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["x: 17 forwards; that is 17 predictions", "x: it takes about 1 second"]
    caplog.clear()
    explain.explain(images(1, 1, 20, 18), network, cases=[ms.Case("y")])
    assert [r.getMessage() for r in caplog.records] == ["y: 17 forwards; that is 17 predictions, about 1 second"]


def test_a_long_case_has_the_setting_that_makes_it_shorter(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monai_saliency.inferers.price._LONG", 0.1)
    caplog.set_level(logging.INFO)
    ms.sliding_window(6, 5, target=WHOLE, mask_batch_size=4).explain(images(1, 1, 20, 18), Slow())
    assert caplog.messages[-1].endswith(
        "it takes about 1 second; shorter with a larger window_size or stride, for a coarser map"
    )


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("kept", [slice(0, 31), slice(0, None)], ids=["a part", "all"])
def test_scores_on_disk_cost_nothing(kept: slice, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which of them are used is known after the first batch, so only then it is told how long the rest takes."""
    explain, network = PRICED["whole images"], Slow(first=0.0)
    (state,) = explain.score(images(1, 1, 16, 16), network)
    scores, stored = state.state.scores[kept], ScoreStore(tmp_path).open("x", "key")
    stored.resume(state.state.reference_scores, repr(state.masks.key), state.target.vouch)
    stored.add(0, len(scores), scores)
    stored.flush()
    caplog.clear()
    start = time.perf_counter()
    explain.explain(images(1, 1, 16, 16), network, stored=[stored])
    took = time.perf_counter() - start
    assert "65 forwards; at the most, since scores are on disk; that is 65 predictions" in told(caplog)
    assert len(seconds_told(caplog)) == (kept.stop is not None)
    assert all(abs(seconds - took) <= 0.2 * took for seconds in seconds_told(caplog))


def test_under_autocast_patches_are_remembered_too(caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU nothing is autocast, as in MONAI's evaluators, so that the scores are those of whole images."""
    explain = ms.sliding_window(6, 5, target=WHOLE, inferer=SlidingWindowInferer((8, 8), 3, 0.5), autocast={})
    (ours,) = explain.explain(images(1, 1, 20, 18), Network(2))
    (plain,) = explain.replace(patch_memory=None).explain(images(1, 1, 20, 18), Network(2))
    assert ours.num_forwards < ours.per_prediction * plain.num_forwards / 2
    torch.testing.assert_close(ours.scores, plain.scores, rtol=0, atol=1e-6)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
