"""The words above a picture, with the probability without the place of the peak, on networks computed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import SINGLE, assert_close

import monai_saliency as ms
from monai_saliency.handlers.summary import case_title, summarize
from monai_saliency.networks import Ensemble

ONES = torch.ones(1, 1, 4, 4)


class Corners(torch.nn.Module):
    """Two logits: 0, and 1 for each voxel of the upper left quarter and a half for each of the lower right one."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.times = times

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        half = images.shape[-1] // 2
        logit = images[..., :half, :half].mean((1, 2, 3)) + images[..., half:, half:].mean((1, 2, 3)) / 2
        return torch.stack([torch.zeros_like(logit), 4 * self.times * logit], dim=1)


def explained(make: Any, target: Any, network: Any = None, image: torch.Tensor = ONES, **given: Any) -> ms.Explanation:
    given |= {} if isinstance(target, ms.targets.Target) else {"activation": "softmax"}
    (found,) = make(target=target, **given).explain(image, network or Corners(), names=["ct_7"])
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


WINDOWS = {"window_size": 2, "stride": 2}


def test_a_class_with_the_window_of_its_peak_hidden() -> None:
    """6 log-odds, of which the upper left window has 4."""
    found = explained(ms.sliding_window, 1, **WINDOWS)
    assert_close(found.without_peak, [2.0], within=SINGLE)
    assert case_title(found) == (
        "ct_7\npredicted 1 (0.998), explained: class 1 has probability 0.998, and 0.881 without this place"
    )
    assert (f"{sigmoid(6):.3f}", f"{sigmoid(2):.3f}") == ("0.998", "0.881")
    plain = explained(ms.sliding_window, ms.ClassScore([1], "softmax", "probability"), **WINDOWS)
    assert_close(plain.without_peak, [sigmoid(2)], within=SINGLE)
    assert case_title(plain) == case_title(found)


def test_the_window_that_hides_the_peak_and_not_the_one_that_costs_most() -> None:
    """One window of two voxels costs 5, and its neighbours nothing; the windows of the last two voxels cost 4 each."""

    def network(images: torch.Tensor) -> torch.Tensor:
        first, last = images[..., 3:5].amax((1, 2, 3)), images[..., 6:].amin((1, 2, 3))
        return torch.stack([torch.zeros_like(first), 5 * first + 4 * last], dim=1)

    found = explained(ms.sliding_window, 1, network, torch.ones(1, 1, 1, 8), window_size=(1, 2), stride=(1, 1))
    assert_close(found.saliency[0, 0], torch.tensor([0, 0, 0, 2.5, 2.5, 2.0, 4.0, 4.0]))
    assert float(found.scores.min()) == 4.0
    assert_close(found.without_peak, [5.0], within=SINGLE)


def test_several_classes_and_none_that_supports() -> None:
    """Every window speaks against class 0."""
    found = explained(ms.sliding_window, [0, 1], **WINDOWS)
    assert_close(found.without_peak, [math.nan, 2.0], within=SINGLE)
    assert case_title(found).endswith(
        "explained: class 0 has probability 0.002; class 1 has probability 0.998, and 0.881 without this place"
    )


def test_other_scores_are_no_probabilities() -> None:
    found = explained(ms.sliding_window, ms.ClassScore([1], "none"), **WINDOWS)
    assert_close(found.without_peak, [2.0], within=SINGLE)
    assert case_title(found).endswith("explained: class 1 scores 6.000")


@pytest.mark.parametrize("method", ["rise", "random_grid"])
def test_random_masks_hide_no_place_alone(method: str) -> None:
    found = explained(getattr(ms, method), 1, num_masks=20)
    assert found.without_peak.isnan().all()
    assert case_title(found).endswith("explained: class 1 has probability 0.998")


def test_regions() -> None:
    labels = torch.tensor([[1, 1, 2, 2]] * 2 + [[3, 3, 4, 4]] * 2)[None]
    (found,) = ms.region_occlusion(target=1, activation="softmax").explain(ONES, Corners(), labels=labels[None])
    assert_close(found.without_peak, [2.0], within=SINGLE)


def test_the_place_that_focused_masks_look_into() -> None:
    """The network's own score of the image with the place hidden, of no evidence elsewhere."""
    image = torch.zeros(1, 1, 40, 40)
    image[..., 8:14, 20:26] = 1

    def network(images: torch.Tensor) -> torch.Tensor:
        logit = images[..., 8:14, 20:26].mean((1, 2, 3))
        return torch.stack([torch.zeros_like(logit), 9 * logit - 3], dim=1)

    found = explained(ms.focused_rise, 1, network, image, num_masks=200)
    assert_close(found.without_peak, [-3.0], within=0.01)
    left = sigmoid(float(found.without_peak))
    assert case_title(found).endswith(f"class 1 has probability 0.998, and {left:.3f} without this place")


def test_no_place_where_the_strongest_voxel_opposes_the_score_or_may_be_chance() -> None:
    image = torch.ones(1, 1, 40, 40)

    def network(images: torch.Tensor) -> torch.Tensor:
        logit = images[..., 8:14, 20:26].mean((1, 2, 3)) - 4 * images[..., 28:34, 8:14].mean((1, 2, 3))
        return torch.stack([torch.zeros_like(logit), logit], dim=1)

    found = explained(ms.focused_rise, 1, network, image, num_masks=200)
    assert float(found.saliency.max()) > 0
    assert found.without_peak.isnan().all()
    noise = replace(found, maps=-found.saliency)
    vars(noise)["noise"] = found.saliency.abs().max()[None]
    assert noise.without_peak.isnan().all()


def test_an_ensemble() -> None:
    """The mean of the members' scores; where each member has masks of its own, no mask tells."""
    members = [Corners(), Corners(3.0)]
    found = explained(ms.sliding_window, 1, Ensemble(members), **WINDOWS)
    assert_close(found.without_peak, [(2.0 + 6.0) / 2], within=SINGLE)
    assert explained(ms.focused_rise, 1, Ensemble(members), torch.ones(1, 1, 20, 20), num_masks=40).without_peak.isnan()


def test_the_row_of_the_summary_has_both_probabilities() -> None:
    found = explained(ms.sliding_window, [0, 1], **WINDOWS)
    rows = summarize("ct_7", found, found.saliency.numpy(), np.eye(4))
    assert [(row["score_without_peak"], row["unit"]) for row in rows] == [
        ("", "log-odds"),
        (pytest.approx(sigmoid(2)), "log-odds"),
    ]
    assert rows[1]["score"] == pytest.approx(sigmoid(6))


def test_no_probability_is_rounded_to_0_or_1() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False))
    network[1].weight = torch.nn.Parameter(torch.tensor([[0.0, 0, 0, 0], [20, 0, 0, 0]]))
    image = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
    (found,) = ms.sliding_window(1, target=ms.ClassScore([0, 1], "softmax")).explain(image, network)
    assert "class 0 has probability below 0.001" in case_title(found)
    assert "class 1 has probability above 0.999, and 0.500 without this place" in case_title(found)
    assert "predicted 1 (above 0.999)" in case_title(found)


def test_a_map_that_shows_nothing_has_no_place_worth_a_word() -> None:
    """A mask of a whole place may change the score by far more than the map that was made."""
    found = explained(ms.sliding_window, ms.ClassScore([1], "softmax"), **WINDOWS)
    assert "without this place" in case_title(found)
    weak = replace(found, maps=found.saliency * 1e-6)
    assert case_title(weak).endswith("class 1 has probability 0.998")
    (row,) = summarize("ct_7", weak, weak.saliency.numpy(), np.eye(4))
    assert row["verdict"].startswith("no part of this scan changes the score")
    assert row["score_without_peak"] == ""
