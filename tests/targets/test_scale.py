"""A saturated probability is explained by its log-odds, and one class against another by the difference of both."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.examples import target_examples
from helpers.targets import FLAT
from helpers.tolerances import assert_close, assert_same_bits

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.targets import BoundTarget, ClassScore, RegionScore, Target

SURE = torch.tensor([[30.0, -2.0, 1.0]])
VOLUME = torch.tensor([[[[9.0, 8.0]], [[0.0, 1.0]]]])
FLAT_2D = ms.Case("ct_7", torch.zeros(1, 1, 2))


def exact(logits: list[float], each: int, kind: str) -> float:
    """The log-odds of a class, in plain float64."""
    values = np.asarray(logits, np.float64)
    return values[each] - (np.log(np.exp(np.delete(values, each)).sum()) if kind == "softmax" else 0.0)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_log_odds_are_those_of_the_logits_where_the_probability_rounds_to_one(activation: str) -> None:
    bound = ms.ClassScore("all", activation, "auto").bind(SURE, FLAT)
    other = torch.tensor([[0.5, 60.0, -20.0]])
    plain = ms.ClassScore("all", activation, "probability").bind(SURE, FLAT)
    assert float(plain(SURE)[0, 0]) == 1.0
    saturated = [not 0.01 <= score <= 0.99 for score in plain(SURE)[0].tolist()]
    for output in (SURE, other):
        for each, in_log in enumerate(saturated):
            wanted = exact(output[0].tolist(), each, activation) if in_log else float(plain(output)[0, each])
            assert_close(bound(output)[0, each], wanted)
    units = ["log-odds" if each else "probability" for each in saturated]
    assert [each.unit for each in bound.quantities()] == units
    assert bound.quantities()[0].words == f"log-odds of the {activation} probability of the class"
    assert bound.describe()["probability"] == 1.0  # as it is asked for


@pytest.mark.parametrize(("probability", "saturated"), [(0.99, False), (0.9901, True), (0.01, False), (0.0099, True)])
def test_the_unperturbed_probability_of_the_class_itself_decides(probability: float, saturated: bool) -> None:
    logit = math.log(probability / (1 - probability))
    output = torch.tensor([[logit, 0.3]], dtype=torch.float64)
    for classes in ([0], [1, 0]):  # law 11
        bound = ms.ClassScore(classes, "sigmoid", "auto").bind(output, FLAT)
        assert_close(bound(output)[0, -1], logit if saturated else probability)
        quantity = bound.quantities()[-1]
        assert_close(quantity.reported(float(bound(output)[0, -1])), probability)


def test_a_network_without_logits_is_clamped_at_its_rounding(caplog: pytest.LogCaptureFixture) -> None:
    output = torch.tensor([[1.0, 0.0]])
    with caplog.at_level(logging.INFO, "monai_saliency"):
        bound = ms.ClassScore([0, 1], "none", "auto").bind(output, FLAT)
    rounding = 2.0**-23
    wanted = math.log((1 - rounding) / rounding)
    assert_close(bound(output)[0], [wanted, -wanted])
    assert "ct_7: the probability 1, 0 is saturated" in caplog.text
    assert bound.quantities()[0] == ("log-odds of the clamped network output of the class", "log-odds")
    # Logits are not probabilities, however large they are; nor is one number.
    assert ms.ClassScore([0], "none", "auto").bind(SURE, FLAT).quantities()[0].unit == "network output"
    assert ms.ClassScore([0], "none", "auto").bind(torch.tensor([[1.0]]), FLAT).quantities()[0].unit == "network output"
    with pytest.raises(ValueError, match=r"`scale` 'log_odds' needs probabilities, .* lie in \[30, 30\]"):
        ms.ClassScore([0], "none", "log_odds").bind(SURE, FLAT)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_mean_probability_in_a_region(activation: str) -> None:
    """Against the mean in float64; it is a sum over voxels no more."""
    target = ms.RegionScore(0, activation, "all", scale="auto")
    bound = target.bind(VOLUME, FLAT_2D)
    logits = VOLUME.double().numpy()[0, :, 0]
    each = logits[0] - logits[1] if activation == "softmax" else logits[0]
    own, rest = (1 / (1 + np.exp(-each))).mean(), (1 / (1 + np.exp(each))).mean()
    assert_close(bound(VOLUME), math.log(own / rest))
    assert (bound.additive, target.is_additive) == (False, False)
    weak = VOLUME / 9
    bound = target.bind(weak, FLAT_2D)
    assert bound.additive
    assert_same_bits(bound(weak), ms.RegionScore(0, activation, "all").bind(weak, FLAT_2D)(weak))


class TestAgainst:
    OUTPUT = torch.tensor([[2.0, 1.0, -1.0]])

    def test_difference_of_probabilities(self) -> None:
        bound = ms.ClassScore("predicted", "softmax", against=1).bind(self.OUTPUT, FLAT)
        own = self.OUTPUT.softmax(1)[0]
        assert_close(bound(self.OUTPUT), own[0] - own[1])
        assert list(bound.labels) == ["class 0 against class 1"]
        assert bound.quantities() == [("difference of the softmax probability of two classes", "-1 to 1")]

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    def test_difference_of_logits(self, activation: str) -> None:
        """What a third class says does not count."""
        bound = ms.ClassScore([0], activation, "log_odds", 1).bind(self.OUTPUT, FLAT)
        for third in (-1.0, 50.0):
            assert_close(bound(torch.tensor([[2.0, 1.0, third]])), 1.0)
        assert bound.quantities() == [("difference of the logits of two classes", "logits")]
        saturated = ms.ClassScore([0], activation, "auto", 1).bind(SURE, FLAT)
        assert_close(saturated(SURE), 32.0)

    def test_of_the_automatic_target(self) -> None:
        target = ms.AutoTarget(activation="softmax", against=2)
        assert target.choose(self.OUTPUT, FLAT).words.endswith("of the predicted class against class 2")
        assert list(target.bind(self.OUTPUT, FLAT).labels) == ["class 0 against class 2"]
        with pytest.raises(ValueError, match="`against` is for classes of the whole image, and this is segmentation"):
            target.bind(VOLUME, FLAT_2D)

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"against": 0}, "class 0 cannot be explained against itself"),
            ({"against": 3}, r"`against` must be in \[0, 2\]"),
        ],
    )
    def test_refused(self, settings: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ms.ClassScore("predicted", "softmax", **settings).bind(self.OUTPUT, FLAT)


# What every target says of its scores: their words and unit, and whether they are sums over voxels, or linear.
PARTS = [(slice(0, 3), slice(0, 8)), (slice(3, 8), slice(0, 5)), (slice(3, 8), slice(5, 8))]
FLAT_8 = Case("ct_7", torch.zeros(1, 8, 8))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("kind", "target", "output"), target_examples())
def test_every_target_names_its_scores(kind: str, target: Target | None, output: Any, dims: int) -> None:
    if target is None or output is None:
        pytest.fail(f"The target {kind.partition(' ')[0]} has no example in TARGETS of tests/helpers/examples.py")
    bound = target.bind(output(dims), Case("ct_7", torch.zeros(1, *[8] * dims)))
    assert type(bound).quantity is not BoundTarget.quantity
    assert all(bound.quantity())


@pytest.mark.parametrize(
    ("target", "output", "expected"),
    [
        (ClassScore([1], "softmax"), [[0.3, 2.1]], ("softmax probability of the class", "probability")),
        (ClassScore([1], "none"), [[0.3, 2.1]], ("network output of the class", "network output")),
        # Its channel is 0, which beside the prediction 0 would be read as the score of the class 0.
        (ClassScore([0], "sigmoid"), [[-2.0]],
         ("sigmoid probability of prediction 1, the network's one output", "probability")),
    ],
)  # fmt: skip
def test_in_words(target: Target, output: list[list[float]], expected: tuple[str, str]) -> None:
    assert target.bind(torch.tensor(output), FLAT_8).quantity() == expected


@pytest.mark.parametrize(("kind", "target", "output"), target_examples())
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_sums_over_voxels(kind: str, target: Target, output: Callable[[int], Any]) -> None:
    reference = output(2)
    bound = target.bind(reference, FLAT_8)
    assert bound.additive == target.is_additive
    if not target.is_additive:
        assert not target.is_linear
        return
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(*reference.shape, dtype=torch.float64, generator=draw) for _ in range(2))
    middle = bound(0.3 * one + 0.7 * other)
    assert torch.allclose(middle, 0.3 * bound(one) + 0.7 * bound(other), rtol=1e-9) == target.is_linear
    read = slice(None) if bound.channels_read is None else list(bound.channels_read)
    sums = sum(bound.contribution(one[:, read][(..., *box)], box) for box in PARTS)
    assert_close(sums, bound(one))


def test_a_mean_of_logits_is_linear() -> None:
    assert RegionScore(0, "none").is_linear
    assert not RegionScore(0, "softmax").is_linear
