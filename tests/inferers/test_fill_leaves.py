"""Whether the fill is one: what is left of a score when it hides everything, on networks that are computed by hand."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.handler import handler_of
from helpers.tolerances import SINGLE, assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.data import CachedDataset, CohortLoader
from monai_saliency.engines import CohortEvaluator
from monai_saliency.fills import AutoFill
from monai_saliency.inferers import choose_fill
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.masks import RISEMasks
from monai_saliency.networks import Ensemble
from monai_saliency.targets import ClassScore, RegionScore, RegressionScore, Target

IMAGE = torch.ones(1, 1, 4, 4)


def share(left: float) -> Any:
    """A network whose logits fall from 2 to a share of them when the image of ones becomes zeros."""

    def network(images: torch.Tensor) -> torch.Tensor:
        logit = 2 * (left + (1 - left) * images.flatten(1).mean(1))
        return torch.stack([torch.zeros_like(logit), logit], dim=1)

    return network


def explained(target: Target, network: Any, fill: float = 0.0, image: torch.Tensor = IMAGE, **more: Any) -> Explanation:
    explain = ms.sliding_window(2, 2, target=target, fill=ms.ConstantFill(fill), **more)
    return explain.explain(image, network)[0]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("left", [0.0, 0.25, 0.6, 1.0])
def test_a_probability_can_fall_to_chance(left: float) -> None:
    found = explained(ClassScore([1], "softmax", "probability"), share(left))
    wanted = (sigmoid(2 * left) - 0.5) / (sigmoid(2) - 0.5)
    assert_close(found.fill_leaves, wanted, scale=1, within=SINGLE)
    in_log = explained(ClassScore([1, 0], "softmax"), share(left))
    assert_close(in_log.fill_leaves, [left, left], scale=1, within=SINGLE)
    assert bool(in_log.fill_problem) == (left > 0.5)
    assert in_log.stopped == "", "windows do not depend on scores"
    against = explained(ClassScore([1], "softmax", against=0), share(left))
    assert_close(against.fill_leaves, left, scale=1, within=SINGLE)


@pytest.mark.parametrize("left", [0.0, 0.25, 0.6, 1.0])
def test_a_logit_can_move_as_far_as_any_mask_moves_it(left: float) -> None:
    """The sum of the image, of which hiding everything takes less than a mask where the fill of the rest makes up."""

    def network(images: torch.Tensor) -> torch.Tensor:
        total = images.flatten(1).sum(1, keepdim=True)
        return torch.where(total == 0, 16 - 4 * (1 - left), total)

    found = explained(RegressionScore(), network)  # each of four windows takes 4 of 16
    assert_close(found.fill_leaves, left, scale=1, within=SINGLE)


def test_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "monai_saliency"):
        found = explained(ClassScore([1], "softmax"), share(0.9))
    words = "hiding the whole scan leaves 90% of class 1, so this map shows little (expected for an absence, such as"
    assert found.fill_problem.startswith(words)
    assert words in caplog.text
    caplog.clear()
    assert explained(ClassScore([1], "softmax"), share(0.9), fill=-9.0).fill_problem == ""
    assert not caplog.text


def test_the_mean_of_an_ensemble() -> None:
    ensemble = Ensemble([torch.nn.Sequential(torch.nn.Flatten(), each) for each in (linear(0.2), linear(0.6))])
    found = explained(RegressionScore(), ensemble)
    assert_close(found.hidden_scores, 0.4)
    assert_close(found.reference_scores, 1.0)


def linear(hidden: float) -> torch.nn.Linear:
    """1 for the image of ones, ``hidden`` for zeros."""
    made = torch.nn.Linear(16, 1)
    torch.nn.init.constant_(made.weight, (1 - hidden) / 16)
    torch.nn.init.constant_(made.bias, hidden)
    return made.eval()


@pytest.mark.parametrize("patches", [True, False])
def test_under_patches(patches: bool) -> None:
    """A voxel's probability is the sigmoid of its own value: 0.5 is left of it."""
    inferer = SlidingWindowInferer([4, 4], sw_batch_size=3, overlap=0.5)
    image = torch.full((1, 1, 8, 8), 4.0)
    network = torch.nn.Conv2d(1, 1, 1)
    torch.nn.init.ones_(network.weight)
    torch.nn.init.zeros_(network.bias)
    target = RegionScore(0, "sigmoid", "all")
    found = explained(target, network.eval(), image=image, inferer=inferer, patch_memory=patches)
    assert_close(found.hidden_scores, 0.5)
    assert_close(found.fill_leaves, 0.5 / sigmoid(4.0), within=SINGLE)


# The fill of a cohort: the candidate under which the effects of halves add up best, the same for every worker.
CANDIDATES = {"0": ms.ConstantFill(0.0), "2": ms.ConstantFill(2.0)}


class Squared(torch.nn.Module):
    """The square of the mean, or by how much it is above 4 as the logits of two classes."""

    def __init__(self, classes: bool = False) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = images.mean((1, 2, 3)).square()[:, None]
        return torch.cat([4 - found, found - 4], dim=1) if self.classes else found


def constant(value: float) -> torch.Tensor:
    return torch.full((1, 1, 4, 4), value)


def missed(value: float, fill: float) -> float:
    """For an image of one value, of which a share s is kept: the score is ``(fill + s (value - fill)) ** 2``."""
    shares = RISEMasks(2, 7).bind(IMAGE[0]).render(range(2)).mean((1, 2, 3)).tolist()
    whole = value**2 - fill**2
    effects = [[value**2 - (fill + s * (value - fill)) ** 2 for s in (share, 1 - share)] for share in shares]
    return sum(abs(sum(pair) - whole) for pair in effects) / len(effects) / abs(whole)


def chosen(network: Any, *images: torch.Tensor, target: Any = None, **given: Any) -> Any:
    explain = ms.sliding_window(2, 2, target=target or ms.RegressionScore(), fill=AutoFill(**given))
    cases = [(image, ms.Case(f"ct_{i}")) for i, image in enumerate(images)]
    return choose_fill(explain, network, cases).fill


def test_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "monai_saliency"):
        for value, best in ((3.0, 2.0), (-3.0, 0.0)):
            assert chosen(Squared(), constant(value), candidates=CANDIDATES).value == best
            shares = [f"{fill:.0f} {missed(value, fill):.0%}" for fill in (0.0, 2.0)]
            words = f"(chosen by auto on 1 case). Error of each candidate: {shares[0]}, {shares[1]}."
            assert f"fill: {best:.0f} {words}" in caplog.text


def test_a_fill_that_hides_nothing_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The mean and a blur of an image of one value are that image."""
    with caplog.at_level(logging.INFO, "monai_saliency"):
        assert isinstance(chosen(Squared(), constant(1.0)), ms.ConstantFill)
    assert "mean leaves the score, blur leaves the score" in caplog.text


def test_what_nothing_hides_does_not_count() -> None:
    """A dark image is the absence of something bright, of which neither 0 nor 1 takes anything away. Of a bright one,
    half of it and 1 is neither dark nor bright, and half of it and 0 is dark.
    """
    given: Any = {"target": ms.ClassScore("predicted", "softmax"), "candidates": {"0": ms.ConstantFill(0.0)}}
    given["candidates"]["1"] = ms.ConstantFill(1.0)
    network, dark, bright = Squared(classes=True), constant(0.5), constant(3.0)
    assert chosen(network, dark, dark, **given).value == 0  # the first
    assert chosen(network, dark, dark, bright, **given).value == 1
    assert chosen(network, **given).value == 0
    assert chosen(Ensemble([network, network]), bright, **given).value == 1


def test_only_the_first_three_cases_that_can_be_explained_count() -> None:
    images = [constant(math.nan), *[constant(-3.0)] * 3, constant(3.0)]
    assert chosen(Squared(), *images, candidates=CANDIDATES).value == 0


@pytest.mark.parametrize("taken", [None, [4], [3, 4]])
def test_law_2_every_worker_chooses_by_the_whole_cohort(taken: list[int] | None, tmp_path: Path) -> None:
    """Alone, the last cases would give another fill."""
    values = [-3.0, -3.0, -3.0, 3.0, 3.0]
    items = [{"case": f"ct_{i}", "image": constant(value)[0]} for i, value in enumerate(values)]
    loader = CohortLoader(CachedDataset(items))
    network = Squared().eval()
    explain = ms.sliding_window(2, 2, target=ms.RegressionScore(), fill=AutoFill(CANDIDATES))
    handler = handler_of(tmp_path, explain, network, lambda item: item)
    part = loader if taken is None else loader.take(taken)
    CohortEvaluator("cpu", val_data_loader=part, network=network, val_handlers=[handler]).run()
    assert handler.inferer.fill.value == 0
    assert len(handler.explained) == len(taken or items)
    assert chosen(network, constant(3.0), candidates=CANDIDATES).value == 2


def test_it_fills_nothing_itself() -> None:
    explain = ms.sliding_window(2, 2, target=ms.RegressionScore(), fill=AutoFill())
    with pytest.raises(ValueError, match="the fill 'auto' is chosen once for a cohort"):
        explain(IMAGE, Squared())
