"""The fill of a cohort: the candidate that leaves least when it hides everything, the same for every worker."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import monai_saliency as ms
from monai_saliency.data import CachedDataset, CohortLoader
from monai_saliency.engines import CohortEvaluator
from monai_saliency.fills import AutoFill
from monai_saliency.handlers import SaliencyHandler
from monai_saliency.inferers import choose_fill
from monai_saliency.networks import Ensemble

IMAGE = torch.zeros(1, 1, 4, 4)
IMAGE[..., :2, :] = 3.0


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
        assert chosen(Zeros(), IMAGE) == "ConstantFill"
        # By 0 from 0.8 to 1, and by the mean to 0.
        assert chosen(Zeros(), torch.tensor([[[[5.0, 0.0, 0.0, 0.0, 0.0]]]])) == "MeanFill"
        assert chosen(Total(), IMAGE) == "ConstantFill"
    assert "fill auto: 0 is taken, since hiding everything leaves 0% with 0, 100% with mean" in caplog.text


def test_what_nothing_hides_does_not_count() -> None:
    """A dark image is the absence of something bright, of which a blur takes nothing away, nor does 0."""
    target = ms.ClassScore("predicted", "softmax")
    candidates = {"mean": ms.MeanFill(), "0": ms.ConstantFill(0.0)}
    dark = torch.full((1, 1, 4, 4), 0.1)
    spot = torch.zeros(1, 1, 4, 4)
    spot[..., 1, 1] = 20.0  # its mean is 1.25, which is not bright
    assert chosen(Bright(), dark, dark, target=target, candidates=candidates) == "MeanFill"  # the first
    assert chosen(Bright(), dark, spot, IMAGE + 2, target=target, candidates=candidates) == "ConstantFill"
    assert chosen(Bright(), target=target, candidates=candidates) == "MeanFill"
    assert chosen(Ensemble([Bright(), Bright()]), IMAGE + 2, target=target, candidates=candidates) == "ConstantFill"


def test_only_the_first_three_cases_that_can_be_explained_count() -> None:
    broken = torch.full((1, 1, 4, 4), torch.nan)
    other = 0 * IMAGE + 1
    assert chosen(Total(), broken, IMAGE, IMAGE, IMAGE, other) == "ConstantFill"


@pytest.mark.parametrize("taken", [None, [4], [3, 4]])
def test_law_2_every_worker_chooses_by_the_whole_cohort(taken: list[int] | None) -> None:
    """Alone, the last cases would give another fill."""
    zeros = [torch.zeros(1, 4, 4).index_fill(2, torch.tensor([0]), 5.0)] * 3
    items = [{"case": f"ct_{i}", "image": image} for i, image in enumerate([*zeros, IMAGE[0], IMAGE[0]])]
    loader = CohortLoader(CachedDataset(items))
    network = Zeros().eval()
    explain = ms.sliding_window(2, 2, target=ms.RegressionScore(), fill=AutoFill())
    handler = SaliencyHandler(explain, network, lambda item: item)
    part = loader if taken is None else loader.take(taken)
    evaluator = CohortEvaluator("cpu", val_data_loader=part, network=network, val_handlers=[handler])
    evaluator.run()
    assert isinstance(handler.inferer.fill, ms.MeanFill)
    assert len(handler.explained) == len(taken or items)
    assert chosen(network, IMAGE) == "ConstantFill"


def test_it_fills_nothing_itself() -> None:
    explain = ms.sliding_window(2, 2, target=ms.RegressionScore(), fill=AutoFill())
    with pytest.raises(ValueError, match="the fill 'auto' is chosen once for a cohort"):
        explain(IMAGE, Total())
