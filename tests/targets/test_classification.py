from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.targets import FLAT, LOGITS

from monai_saliency.cases import Case
from monai_saliency.targets import ClassScore, RegionScore


class TestClassScore:
    def test_softmax_by_hand(self) -> None:
        bound = ClassScore([1, 0], "softmax").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT)
        scores = bound(torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]]))
        torch.testing.assert_close(scores, torch.tensor([[0.75, 0.25], [0.2, 0.8]]))
        assert list(bound.labels) == [1, 0]

    def test_sigmoid_by_hand(self) -> None:
        bound = ClassScore(1, "sigmoid").bind(LOGITS, FLAT)
        torch.testing.assert_close(bound(LOGITS), torch.tensor([[0.75]]))

    @pytest.mark.parametrize("classes", [2, np.int64(2), (2,), np.array([2]), torch.tensor([2])])
    def test_one_class_in_many_forms(self, classes: Any) -> None:
        assert list(ClassScore(classes, "none").bind(LOGITS, FLAT).labels) == [2]
        assert RegionScore(classes, "none").channels == [2]

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
    def test_predicted_is_frozen(self, activation: str) -> None:
        """The class is the unperturbed image's, whatever the perturbed output prefers."""
        bound = ClassScore("predicted", activation).bind(LOGITS, FLAT)
        assert list(bound.labels) == [1]
        moved = torch.tensor([[5.0, 0.0, 0.0]])
        all_scores = ClassScore("all", activation).bind(LOGITS, FLAT)(moved)
        assert torch.equal(bound(moved), all_scores[:, 1:2])

    def test_describe(self) -> None:
        described = ClassScore([0], "softmax").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT).describe()
        assert described["prediction"] == 1
        assert described["probability"] == pytest.approx(0.75)

    @pytest.mark.parametrize(("score", "expected"), [(0.7, {"prediction": 1}), (0.3, {}), (3.0, {"prediction": 1})])
    def test_one_number_that_may_be_a_logit_or_a_probability(self, score: float, expected: dict[str, int]) -> None:
        """A logit of 0.3 is class 1, a probability of 0.3 class 0."""
        assert ClassScore([0], "none").bind(torch.tensor([[score]]), FLAT).describe() == expected

    @pytest.mark.parametrize(
        ("output", "activation"),
        [([[0.2, 0.8]], "softmax"), ([[0.9, 0.8]], "sigmoid")],
    )
    def test_warns_of_an_activation_on_probabilities(self, output: list, activation: str) -> None:
        with pytest.warns(UserWarning, match=".*already looks like probabilities.*activation='none'"):
            ClassScore([0], activation).bind(torch.tensor(output), FLAT)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_law_9_half_precision_is_scored_in_float32_and_double_stays_double(self, dtype: torch.dtype) -> None:
        output = LOGITS.to(dtype)
        expected = (output if dtype == torch.float64 else output.float()).softmax(dim=1)
        torch.testing.assert_close(ClassScore("all", "softmax").bind(output, FLAT)(output), expected, rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("classes", "output", "match"),
        [
            ([3], LOGITS, r"class 3 is out of range: the network gives 3 classes.*\[0, 2\]"),
            ([0], torch.zeros(1, 3, 2, 3), r".*\(B, 3, 2, 3\); use RegionScore for a segmentation"),
            ([0], torch.zeros(1), r"ClassScore reads one row of class scores per image"),
            ([0], {"logits": LOGITS}, "ClassScore reads a tensor, .* a dict; .*: output='logits' reads \\(B, 3\\)$"),
        ],
    )
    def test_outputs_it_cannot_read(self, classes: list, output: object, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ClassScore(classes, "none").bind(output, FLAT)


class TestPositiveClasses:
    OUTPUT = torch.tensor([[0.1, -3.0, 2.0, 0.0]])

    def test_all_above_one_half(self) -> None:
        bound = ClassScore("positive", "sigmoid").bind(self.OUTPUT, FLAT)
        assert list(bound.labels) == [0, 2]
        torch.testing.assert_close(bound(-self.OUTPUT), torch.sigmoid(-self.OUTPUT)[:, [0, 2]])

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"no class scores above 0.5 \(the highest: 0.119\)"):
            ClassScore("positive", "sigmoid").bind(torch.tensor([[-3.0, -2.0]]), FLAT)
        with pytest.raises(ValueError, match=r"compares probabilities .* lie in \[-3, 2\]; use activation='sigmoid'"):
            ClassScore("positive", "none").bind(self.OUTPUT, FLAT)


def test_an_image_with_nan_is_named_as_the_cause() -> None:
    image = torch.zeros(1, 4, 5)
    image[0, 1, 2], image[0, 3, 3] = float("nan"), float("inf")
    output = torch.tensor([[0.0, float("nan")]])
    with pytest.raises(ValueError, match="NaN or infinite, and so is the image that it gets, in 2 of 20 values"):
        ClassScore(0, "none").bind(output, Case("ct_2", image))
    with pytest.raises(ValueError, match="the image is not; check the scan"):
        ClassScore(0, "none").bind(output, Case("ct_2", torch.zeros(1, 4, 5)))
