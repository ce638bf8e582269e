"""What a picture's colours mean, for every method and kind of score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.masks import Supervoxels
from monai_saliency.visualize.legend import CHANCE, COLD, WARM, Legend, blended, is_noise, verdict_of

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


# May be chance. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "noise", "error", "chance", "nothing"),
    [
        (0.5, 0.2, None, True, False),  # within five times the noise
        (0.5, 0.09, None, False, False),
        (0.5, 0.09, 0.3, True, False),  # beyond the map's noise, but not its own error
        (0.5, 0.09, 0.2, False, False),
        (0.005, 0.002, 0.001, True, True),
        (0.005, 0.0, 0.001, True, True),  # no value that matters is beyond its error
        (0.0, 0.0, None, True, True),
    ],
)
def test_one_predicate_for_what_may_be_chance(
    peak: float, noise: float, error: float | None, chance: bool, nothing: bool
) -> None:
    """The verdict, the colours, and the rows of the table agree."""
    saliency, legend = np.zeros((4, 5)), Legend(1.0, 1.0, noise=noise)
    saliency[1, 2] = peak
    errors = None if error is None else np.full((4, 5), error)
    verdict = legend.verdict(saliency, errors)
    assert (CHANCE in verdict, "changes the score by more than" in verdict) == (chance, nothing)
    assert legend.coloured(saliency, errors).any() == (not verdict)
    row = {"peak_saliency": peak, "lowest_saliency": 0.0, "noise": noise, "verdict": verdict}
    assert is_noise(row) == chance
    assert verdict_of(row) == verdict


# Colours, seen otherwise. ---------------------------------------------------------------------------------------------

# Deuteranopia, from Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009), severity 1, for linear RGB.
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
# From linear sRGB to XYZ, relative to the white point D65.
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lightness_and_yellow(colours: np.ndarray, seen_by: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """CIELAB's L* and b* of sRGB colours ``(n, 3)`` in [0, 1]; b* is positive for yellow and negative for blue."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    linear = linear if seen_by is None else (linear @ np.asarray(seen_by).T).clip(0, 1)
    xyz = linear @ TO_XYZ.T / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * f[:, 1] - 16, 200 * (f[:, 1] - f[:, 2])


def strengths(colours: tuple[str, ...]) -> np.ndarray:
    """101 colours from the weakest to the strongest."""
    stops = np.array([[int(each[i : i + 2], 16) / 255 for i in (1, 3, 5)] for each in colours])
    return np.stack([np.interp(np.linspace(0, len(stops) - 1, 101), range(len(stops)), each) for each in stops.T], 1)


def test_lightness_grows_with_strength_on_a_dark_scan() -> None:
    values = np.linspace(0.01, 1, 50)
    for sign in (1, -1):
        picture = blended(np.full((1, 50), 0.1), sign * values[None], np.ones((1, 50), bool), 1.0)
        lightness, _ = lightness_and_yellow(picture[0] / 255)
        assert (np.diff(lightness) > -0.3).all()  # up to the rounding to 8 bits
        assert lightness[-1] > lightness[0] + 15


def test_the_sign_survives_deuteranopia_and_grey_print() -> None:
    """Every warm colour is lighter than every cold one, and yellow stays yellow."""
    (warm, yellow), (cold, blue) = (
        lightness_and_yellow(strengths(colours), DEUTERANOPIA) for colours in (WARM, COLD[::-1])
    )
    assert yellow.min() > 30 > -30 > blue.max()
    assert warm.min() > cold.max() + 8
    (warm, _), (cold, _) = (lightness_and_yellow(strengths(colours)) for colours in (WARM, COLD[::-1]))
    assert warm.min() > cold.max() + 8
