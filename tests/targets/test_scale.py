"""A probability is explained by its log-odds, and one class against another by the difference of both."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.examples import target_examples
from helpers.targets import FLAT
from helpers.tolerances import DOUBLE, SINGLE, assert_close, assert_same_bits

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_log_odds_of_logits_are_finite_where_the_probability_rounds_to_one(activation: str, dtype: torch.dtype) -> None:
    sure = torch.tensor([[60.0, -2.0, 1.0]], dtype=dtype)
    bound = ms.ClassScore("all", activation).bind(sure, FLAT)
    assert float(ms.ClassScore([0], activation, "probability").bind(sure, FLAT)(sure)) == 1.0
    for output in (sure, torch.tensor([[0.5, 90.0, -20.0]], dtype=dtype)):
        wanted = [exact(output[0].tolist(), each, activation) for each in range(3)]
        assert_close(bound(output)[0], wanted, within=SINGLE if dtype == torch.float32 else DOUBLE)
        assert bound(output).dtype == dtype
    assert bound.quantity() == (f"log-odds of the {activation} probability of the class", "log-odds")
    assert bound.describe()["probability"] == 1.0


def test_by_hand() -> None:
    """Logits 40, 0 and 0: the odds are e^40 to 2, and the probability is 1 in single precision."""
    sure = torch.tensor([[40.0, 0.0, 0.0]])
    bound = ms.ClassScore([0, 1], "softmax").bind(sure, FLAT)
    assert sure.softmax(1)[0, 0] == 1.0
    assert_close(bound(sure)[0], [40 - math.log(2), -40.0], within=SINGLE)
    assert_close(bound(torch.zeros(1, 3))[0], [-math.log(2)] * 2, within=SINGLE)
    # Odds of 2^25 to 1: single precision has 24 digits.
    one = torch.tensor([[math.log(2.0**25)]])
    sigmoid = ms.ClassScore([0], "sigmoid").bind(one, FLAT)
    assert one.sigmoid() == 1.0
    assert_close(sigmoid(one), math.log(2.0**25), within=SINGLE)
    assert_close(sigmoid.quantity().reported([0.0, math.log(3.0)]), [0.5, 0.75])


@pytest.mark.parametrize("classes", [[0], [1, 0], "all"])
@pytest.mark.parametrize("probability", [1e-4, 0.5, 0.98, 0.9999])
def test_every_scan_is_explained_by_one_quantity(probability: float, classes: Any) -> None:
    logit = math.log(probability / (1 - probability))
    output = torch.tensor([[logit, 1.3]], dtype=torch.float64)
    bound = ms.ClassScore(classes, "sigmoid").bind(output, FLAT)
    score = float(bound(output)[0, list(bound.labels).index(0)])
    assert_close(score, logit)
    assert_close(bound.quantity().reported(score), probability)
    assert_same_bits(ms.ClassScore(classes, "sigmoid", "log_odds").bind(output, FLAT)(output), bound(output))


def test_a_network_without_logits_is_clipped_at_its_rounding() -> None:
    output = torch.tensor([[1.0, 0.0]])
    bound = ms.ClassScore([0, 1], "none", "log_odds").bind(output, FLAT)
    limit = math.log((1 - 2.0**-23) / 2.0**-23)
    assert_close(limit, 15.942385, within=SINGLE)
    assert_close(bound(output)[0], [limit, -limit])
    assert bound.quantity() == ("log-odds of the clamped network output of the class", "log-odds")
    # By default nothing is taken for probabilities.
    assert ms.ClassScore([0], "none").bind(output, FLAT).quantity().unit == "network output"
    with pytest.raises(ValueError, match=r"`scale` 'log_odds' needs probabilities, .* lie in \[30, 30\]"):
        ms.ClassScore([0], "none", "log_odds").bind(SURE, FLAT)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_mean_probability_in_a_region(activation: str) -> None:
    """Against the mean in float64; its log-odds are a sum over voxels no more."""
    target = ms.RegionScore(0, activation, "all", scale="log_odds")
    bound = target.bind(VOLUME, FLAT_2D)
    logits = VOLUME.double().numpy()[0, :, 0]
    each = logits[0] - logits[1] if activation == "softmax" else logits[0]
    own, rest = (1 / (1 + np.exp(-each))).mean(), (1 / (1 + np.exp(each))).mean()
    assert_close(bound(VOLUME), math.log(own / rest))
    assert not bound.additive
    plain = ms.RegionScore(0, activation, "all").bind(VOLUME, FLAT_2D)
    assert plain.additive
    assert_close(plain(VOLUME), own, within=SINGLE)
    assert_close(bound.quantity().reported(bound(VOLUME)), own, within=SINGLE)


class TestAgainst:
    OUTPUT = torch.tensor([[2.0, 1.0, -1.0]])

    def test_difference_of_probabilities(self) -> None:
        bound = ms.ClassScore("predicted", "softmax", "probability", against=1).bind(self.OUTPUT, FLAT)
        own = self.OUTPUT.softmax(1)[0]
        assert_close(bound(self.OUTPUT), own[0] - own[1])
        assert list(bound.labels) == ["class 0 against class 1"]
        assert bound.quantity() == ("difference of the softmax probability of two classes", "-1 to 1")

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    def test_difference_of_logits(self, activation: str) -> None:
        """What a third class says does not count."""
        bound = ms.ClassScore([0], activation, against=1).bind(self.OUTPUT, FLAT)
        for third in (-1.0, 50.0):
            assert_close(bound(torch.tensor([[2.0, 1.0, third]])), 1.0)
        assert bound.quantity() == ("difference of the logits of two classes", "logits")
        assert_close(ms.ClassScore([0], activation, against=1).bind(SURE, FLAT)(SURE), 32.0)

    def test_of_the_automatic_target(self) -> None:
        target = ms.AutoTarget(activation="softmax", against=2)
        assert target.choose(self.OUTPUT, FLAT).words.endswith("of the predicted class against class 2")
        assert list(target.bind(self.OUTPUT, FLAT).labels) == ["class 0 against class 2"]
        with pytest.raises(ValueError, match=r"`against` is for classes of the whole image .*: leave it out"):
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
        (ClassScore([1], "softmax"), [[0.3, 2.1]], ("log-odds of the softmax probability of the class", "log-odds")),
        (ClassScore([1], "softmax", "probability"), [[0.3, 2.1]],
         ("softmax probability of the class", "probability")),
        (ClassScore([1], "none"), [[0.3, 2.1]], ("network output of the class", "network output")),
        # Its channel is 0, which beside the prediction 0 would be read as the score of the class 0.
        (ClassScore([0], "sigmoid"), [[-2.0]],
         ("log-odds of the sigmoid probability of prediction 1, the network's one output", "log-odds")),
    ],
)  # fmt: skip
def test_in_words(target: Target, output: list[list[float]], expected: tuple[str, str]) -> None:
    assert target.bind(torch.tensor(output), FLAT_8).quantity() == expected


@pytest.mark.parametrize(("kind", "target", "output"), target_examples())
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_sums_over_voxels(kind: str, target: Target, output: Callable[[int], Any]) -> None:
    reference = output(2)
    bound = target.bind(reference, FLAT_8)
    is_mean = kind == "AutoTarget 1" or (isinstance(target, RegionScore) and target.scale == "probability")
    assert bound.additive == is_mean
    if not bound.additive:
        assert not bound.linear
        return
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(*reference.shape, dtype=torch.float64, generator=draw) for _ in range(2))
    middle = bound(0.3 * one + 0.7 * other)
    assert torch.allclose(middle, 0.3 * bound(one) + 0.7 * bound(other), rtol=1e-9) == bound.linear
    read = slice(None) if bound.channels_read is None else list(bound.channels_read)
    sums = sum(bound.contribution(one[:, read][(..., *box)], box) for box in PARTS)
    assert_close(sums, bound(one))


def test_a_mean_of_logits_is_linear() -> None:
    assert RegionScore(0, "none", "all").bind(VOLUME, FLAT_2D).linear
    assert not RegionScore(0, "softmax", "all").bind(VOLUME, FLAT_2D).linear
