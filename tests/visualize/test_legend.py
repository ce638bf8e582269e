"""What a picture's colours mean, for every method and kind of score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monai_saliency as ms
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.masks import Supervoxels
from monai_saliency.visualize.legend import Legend

#: the probability of class 1 rises with the bright corner of the image
IMAGE = torch.zeros(1, 1, 16, 16)
IMAGE[..., 2:6, 8:12] = 1

METHODS: dict[str, Callable[..., Any]] = {
    "sliding_window": lambda **given: ms.sliding_window(4, 4, **given),
    "rise": lambda **given: ms.rise(40, 4, **given),
    "hierarchical_occlusion": lambda **given: ms.hierarchical_occlusion(8, 3, **given),
    "focused_rise": lambda **given: ms.focused_rise(40, **given),
    "shapley": lambda **given: ms.shapley(regions=Supervoxels(6), **given),
    "hsic": lambda **given: ms.hsic(40, 4, **given),
    "sobol": lambda **given: ms.sobol(8, 4, **given),
    "minimal_region": lambda **given: ms.minimal_region(window_size=8, levels=2, **given),
    "mc_rise": lambda **given: ms.mc_rise(40, 4, more_fills=(), **given),
    "squared_difference": lambda **given: ms.squared_difference(4, 4, **given),
    "sbsm": lambda **given: ms.sbsm(4, 4, **given),
    "drise": lambda **given: ms.drise(40, 4, **given),
}


def explained(method: str = "sliding_window", gain: float = 1.0, activation: str = "softmax") -> Explanation:
    """A network whose logit of class 1 is ``gain`` times the sum of the bright part, less 8."""

    def network(x: torch.Tensor) -> torch.Tensor:
        logit = gain * (x[:, 0, 2:6, 8:12].sum(dim=(1, 2)) - 8)
        return torch.stack([torch.zeros_like(logit), logit], dim=1)

    target = ms.ClassScore([1], activation, "probability")
    (found,) = METHODS[method](target=target).explain(IMAGE, network)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_what_the_colour_bar_says_of_each_method(method: str) -> None:
    (legend,) = Legend.of(explained(method))
    drop = "change of the score (softmax probability of the class)"
    expected = {
        "hierarchical_occlusion": (
            3,
            "score change, summed over 3 window sizes (softmax probability of the class)",
        ),
        "hsic": (0.25, "dependence of the score (HSIC), without sign"),
        "sobol": (1, "share of the score's variance (Sobol)"),
        "minimal_region": (1, "1 in the smallest set that keeps the score"),
        "mc_rise": (1, "change of the score against each fill (softmax probability of the class)"),
        "squared_difference": (0.5, "half the squared change of the score"),
        "sbsm": (1, "loss of the score (softmax probability of the class)"),
    }.get(method, (1, drop))
    assert (legend.scale, legend.words) == expected
    assert legend.in_score_unit == (method not in ("hsic", "sobol", "minimal_region", "squared_difference"))
    assert legend.signed == (legend.in_score_unit and method != "sbsm")
    assert legend.note == ""


@pytest.mark.parametrize("method", METHODS)
def test_a_score_that_hardly_changes_has_no_map(method: str) -> None:
    """HSIC and Sobol indices have no unit: they are as large for a probability that changes by a thousandth."""
    weak, strong = explained(method, gain=1e-4), explained(method)
    for explanation, nothing in ((weak, True), (strong, False)):
        maps = explanation.saliency.numpy()
        legends = Legend.of(explanation)
        assert [legend.is_nothing(each) for legend, each in zip(legends, maps, strict=True)] == [nothing]
        words = " ".join(legend.verdict(each, None) for legend, each in zip(legends, maps, strict=True))
        assert ("changes the score by more than" in words) == nothing
    change = float((weak.scores - weak.reference_scores).abs().max())
    assert 0 < change < 0.01
    if method in ("hsic", "sobol"):
        assert float(weak.saliency.max()) > 0.1 * float(strong.saliency.max())
        (legend,) = Legend.of(weak)
        assert legend.verdict(weak.saliency[0].numpy(), None) == (
            f"no mask changes the score by more than {change:.2g}"
        )


@pytest.mark.parametrize(("gain", "scale"), [(1.0, 10), (0.1, 1), (4.0, 50)])
def test_logits_are_drawn_on_the_scale_of_the_case_unless_one_is_given(gain: float, scale: float) -> None:
    """8 times the gain, for the whole image and with a minus for none of it."""
    explanation = explained(gain=gain, activation="none")
    (own,), (given,) = Legend.of(explanation), Legend.of(explanation, 20)
    assert (own.scale, own.note) == (scale, "on this scan's own scale")
    assert (given.scale, given.note) == (20, "")
    assert own.span == given.span == pytest.approx(8 * gain)
    assert not own.is_nothing(explanation.saliency[0].numpy())
