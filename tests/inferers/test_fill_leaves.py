"""Whether the fill is one: what is left of a score when it hides everything, on networks that are computed by hand."""

import logging
import math
from typing import Any

import pytest
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.data import CachedDataset, CohortLoader
from monai_saliency.engines import CohortEvaluator
from monai_saliency.fills import AutoFill
from monai_saliency.handlers import SaliencyHandler
from monai_saliency.inferers import choose_fill
from monai_saliency.inferers.explanation import Explanation
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
    found = explained(ClassScore([1], "softmax"), share(left))
    wanted = (sigmoid(2 * left) - 0.5) / (sigmoid(2) - 0.5)
    assert float(found.fill_leaves) == pytest.approx(wanted, abs=1e-5)
    in_log = explained(ClassScore([1, 0], "softmax", "log_odds"), share(left))
    assert in_log.fill_leaves.tolist() == pytest.approx([left, left], abs=1e-5)
    assert bool(in_log.fill_problem) == bool(in_log.stopped) == (left > 0.5)
    against = explained(ClassScore([1], "softmax", "log_odds", against=0), share(left))
    assert float(against.fill_leaves) == pytest.approx(left, abs=1e-5)


@pytest.mark.parametrize("left", [0.0, 0.25, 0.6, 1.0])
def test_a_logit_can_move_as_far_as_any_mask_moves_it(left: float) -> None:
    """The sum of the image, of which hiding everything takes less than a mask where the fill of the rest makes up."""

    def network(images: torch.Tensor) -> torch.Tensor:
        total = images.flatten(1).sum(1, keepdim=True)
        return torch.where(total == 0, 16 - 4 * (1 - left), total)

    found = explained(RegressionScore(), network)  # each of four windows takes 4 of 16
    assert float(found.fill_leaves) == pytest.approx(left, abs=1e-6)


def test_a_network_that_ignores_the_image_has_no_fill() -> None:
    found = explained(RegressionScore(), lambda images: images.new_ones(len(images), 1))
    assert found.fill_leaves.tolist() == [1.0]


def test_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "monai_saliency"):
        found = explained(ClassScore([1], "softmax", "log_odds"), share(0.9))
    words = "with everything hidden 90% of class 1 is left, so the map means little: no fill can hide an absence"
    assert found.stopped.startswith(words)
    assert words in caplog.text
    caplog.clear()
    assert explained(ClassScore([1], "softmax", "log_odds"), share(0.9), fill=-9.0).stopped == ""
    assert not caplog.text


def test_the_mean_of_an_ensemble() -> None:
    ensemble = Ensemble([torch.nn.Sequential(torch.nn.Flatten(), each) for each in (linear(0.2), linear(0.6))])
    found = explained(RegressionScore(), ensemble)
    assert float(found.hidden_scores) == pytest.approx(0.4)
    assert float(found.reference_scores) == pytest.approx(1.0)


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
    assert float(found.hidden_scores) == pytest.approx(0.5)
    assert float(found.fill_leaves) == pytest.approx(0.5 / sigmoid(4.0), abs=1e-6)


# The fill of a cohort: the candidate that leaves least when it hides everything, the same for every worker.
HALF = torch.zeros(1, 1, 4, 4)
HALF[..., :2, :] = 3.0


class Zeros(torch.nn.Module):
    """The share of voxels that are 0: hiding by 0 raises it from a half to 1, the mean and a blur take it away."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images == 0).float().mean((1, 2, 3))[:, None]


class Total(torch.nn.Module):
    """The sum, of which the mean leaves everything, a blur nearly so, and 0 nothing."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.sum((1, 2, 3))[:, None]


class Bright(torch.nn.Module):
    """The logit that something is bright, and the one that nothing is."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logit = images.amax((1, 2, 3)) - 2
        return torch.stack([-logit, logit], dim=1)


def chosen(network: Any, *images: torch.Tensor, target: Any = None, **given: Any) -> str:
    explain = ms.sliding_window(2, 2, target=target or ms.RegressionScore(), fill=AutoFill(**given))
    cases = [(image, ms.Case(f"ct_{i}")) for i, image in enumerate(images)]
    return type(choose_fill(explain, network, cases).fill).__name__


def test_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "monai_saliency"):
        # By 0 the share of zeros moves by a half, by the mean and the blur by a half too.
        assert chosen(Zeros(), HALF) == "ConstantFill"
        # By 0 from 0.8 to 1, and by the mean to 0.
        assert chosen(Zeros(), torch.tensor([[[[5.0, 0.0, 0.0, 0.0, 0.0]]]])) == "MeanFill"
        assert chosen(Total(), HALF) == "ConstantFill"
    assert "fill auto: 0 is taken, since hiding everything leaves 0% with 0, 100% with mean" in caplog.text


def test_what_nothing_hides_does_not_count() -> None:
    """A dark image is the absence of something bright, of which a blur takes nothing away, nor does 0."""
    target = ms.ClassScore("predicted", "softmax")
    candidates = {"mean": ms.MeanFill(), "0": ms.ConstantFill(0.0)}
    dark = torch.full((1, 1, 4, 4), 0.1)
    spot = torch.zeros(1, 1, 4, 4)
    spot[..., 1, 1] = 20.0  # its mean is 1.25, which is not bright
    assert chosen(Bright(), dark, dark, target=target, candidates=candidates) == "MeanFill"  # the first
    assert chosen(Bright(), dark, spot, HALF + 2, target=target, candidates=candidates) == "ConstantFill"
    assert chosen(Bright(), target=target, candidates=candidates) == "MeanFill"
    assert chosen(ms.Ensemble([Bright(), Bright()]), HALF + 2, target=target, candidates=candidates) == "ConstantFill"


def test_only_the_first_three_cases_that_can_be_explained_count() -> None:
    broken = torch.full((1, 1, 4, 4), torch.nan)
    other = 0 * HALF + 1
    assert chosen(Total(), broken, HALF, HALF, HALF, other) == "ConstantFill"


@pytest.mark.parametrize("taken", [None, [4], [3, 4]])
def test_law_2_every_worker_chooses_by_the_whole_cohort(taken: list[int] | None) -> None:
    """Alone, the last cases would give another fill."""
    zeros = [torch.zeros(1, 4, 4).index_fill(2, torch.tensor([0]), 5.0)] * 3
    items = [{"case": f"ct_{i}", "image": image} for i, image in enumerate([*zeros, HALF[0], HALF[0]])]
    loader = CohortLoader(CachedDataset(items))
    network = Zeros().eval()
    explain = ms.sliding_window(2, 2, target=ms.RegressionScore(), fill=AutoFill())
    handler = SaliencyHandler(explain, network, lambda item: item)
    part = loader if taken is None else loader.take(taken)
    CohortEvaluator("cpu", val_data_loader=part, network=network, val_handlers=[handler]).run()
    assert isinstance(handler.inferer.fill, ms.MeanFill)
    assert len(handler.explained) == len(taken or items)
    assert chosen(network, HALF) == "ConstantFill"


def test_it_fills_nothing_itself() -> None:
    explain = ms.sliding_window(2, 2, target=ms.RegressionScore(), fill=AutoFill())
    with pytest.raises(ValueError, match="the fill 'auto' is chosen once for a cohort"):
        explain(HALF, Total())
