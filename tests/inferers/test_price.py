"""What an explanation costs, as it is told before it begins."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch
from helpers.patches import WHOLE, Network, images
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.inferers.price import Price


@pytest.mark.parametrize(
    ("price", "words"),
    [
        (Price(1001), "1001 predictions"),
        (Price(1001, seconds_each=0.05), "1001 predictions, about 50 seconds"),
        (Price(21, 20, 0.05), "1.1 predictions, about 1 second"),
        (Price(1001, 100, 0.05, "a smaller divide"), "10 predictions, about 50 seconds"),
        (
            Price(1001, 1, 0.5, "a smaller num_masks"),
            "1001 predictions, about 8 minutes; shorter with a smaller num_masks",
        ),
        (Price(1001, 1, 30.0), "1001 predictions, about 8.3 hours"),
    ],
)
def test_words(price: Price, words: str) -> None:
    assert str(price) == words


class Slow(torch.nn.Module):
    """Twenty milliseconds a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 * len(x))
        return torch.cat([x, -x], 1)


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [r.getMessage() for r in caplog.records if "that is" in r.getMessage()]
    return line


def test_patches_are_timed_by_those_of_the_unperturbed_image(caplog: pytest.LogCaptureFixture) -> None:
    explain = ms.patch_windows(SlidingWindowInferer((8, 8), 4, 0.5), 2, target=WHOLE)
    caplog.set_level(logging.INFO)
    start = time.perf_counter()
    (explanation,) = explain.explain(images(1, 1, 16, 16), Slow())
    took = time.perf_counter() - start
    assert explanation.per_prediction == 9
    predictions = explanation.num_forwards / 9
    line = told(caplog)
    assert f"at least {explanation.num_forwards} patch forwards" in line
    assert f"that is {predictions:.0f} predictions" in line
    seconds = int(re.search(r"about (\d+) second", line)[1])  # type: ignore[index]
    assert abs(seconds - took) <= 1


def test_whole_images_are_timed_by_what_is_known_of_the_case(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    explain = ms.sliding_window(6, 5, target=ms.ClassScore([0], "none"))
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    explain.explain(images(1, 2, 20, 18), network, cases=[ms.Case("x", seconds=60.0)])
    assert told(caplog) == (
        "x: 17 forwards; that is 17 predictions, about 17 minutes; shorter with a larger window_size or stride, for a "
        "coarser map"
    )
    caplog.clear()
    explain.replace(mask_batch_size=4).explain(images(1, 2, 20, 18), network, cases=[ms.Case("x")])
    assert [r.getMessage() for r in caplog.records][1:] == ["x: it takes about 1 second"]
    caplog.clear()
    explain.explain(images(1, 2, 20, 18), network, cases=[ms.Case("x")])
    assert told(caplog) == "x: 17 forwards; that is 17 predictions"


def test_under_autocast_patches_are_remembered_too(caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU nothing is autocast, as in MONAI's evaluators, so that the scores are those of whole images."""
    explain = ms.sliding_window(6, 5, target=WHOLE, inferer=SlidingWindowInferer((8, 8), 3, 0.5), autocast={})
    (ours,) = explain.explain(images(1, 1, 20, 18), Network(2))
    (plain,) = explain.replace(patch_memory=None).explain(images(1, 1, 20, 18), Network(2))
    assert ours.num_forwards < ours.per_prediction * plain.num_forwards / 2
    torch.testing.assert_close(ours.scores, plain.scores, rtol=0, atol=1e-6)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
