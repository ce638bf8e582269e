from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.targets import FLAT, LOGITS

from monai_saliency.targets import FunctionScore, RegressionScore


class TestRegressionScore:
    def test_values_and_names(self) -> None:
        output = torch.tensor([[61.5, 1200.0, -3.0]])
        bound = RegressionScore([2, 0], ["tilt (degrees)", "age (years)"]).bind(output, FLAT)
        assert list(bound.labels) == ["tilt (degrees)", "age (years)"]
        assert torch.equal(bound(output * 2), torch.tensor([[-6.0, 123.0]]))
        assert bound.describe() == {"prediction": "-3 61.5"}
        assert list(RegressionScore("all").bind(output, FLAT).labels) == ["value 0", "value 1", "value 2"]

    @pytest.mark.parametrize("shape", [(2,), (2, 1)])
    def test_one_number_an_image(self, shape: tuple[int, ...]) -> None:
        output = torch.tensor([3.0, 5.0]).reshape(shape)
        assert torch.equal(RegressionScore().bind(output[:1], FLAT)(output), torch.tensor([[3.0], [5.0]]))

    def test_coordinates_of_landmarks(self) -> None:
        output = torch.arange(12.0).reshape(2, 3, 2)
        assert torch.equal(RegressionScore([5, 0]).bind(output[:1], FLAT)(output), torch.tensor([[5.0, 0], [11, 6]]))

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"value 3 is out of range: the network gives 3 values.*\[0, 2\]"):
            RegressionScore(3).bind(LOGITS, FLAT)
        with pytest.raises(ValueError, match="`names` has 1 entries for 2 values"):
            RegressionScore([0, 1], ["age"]).bind(LOGITS, FLAT)
        with pytest.raises(ValueError, match=r"RegressionScore .* a dict; .*output='age' reads \(B, 3\)"):
            RegressionScore(0).bind({"age": LOGITS}, FLAT)
        with pytest.raises(ValueError, match="`values` must be a list of indices or 'all', got 'age'"):
            RegressionScore("age")


class TestFunctionScore:
    def test_one_score_and_several(self) -> None:
        bound = FunctionScore(lambda output: output.sum(1)).bind(LOGITS, FLAT)
        assert bound.labels == ["score"]
        torch.testing.assert_close(bound(LOGITS.expand(2, -1)), LOGITS.sum().expand(2, 1))
        assert FunctionScore(lambda output: output).bind(LOGITS, FLAT).labels == ["score 1", "score 2", "score 3"]
        assert FunctionScore(lambda output: output, ["a", "b", "c"]).bind(LOGITS, FLAT).labels == ["a", "b", "c"]

    def test_of_a_list_by_image(self) -> None:
        counts = FunctionScore(lambda images: torch.tensor([float(len(image["boxes"])) for image in images]))
        output = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 5)]
        assert torch.equal(counts.bind(output[:1], FLAT)(output), torch.tensor([[2.0], [0.0], [5.0]]))

    @pytest.mark.parametrize(
        ("function", "match"),
        [
            (lambda output: output.sum(), r"\(B, K\), one row per image; it gave shape \(\) for 1 images"),
            (lambda output: output[0], r"it gave shape \(3,\) for 1 images"),
            (lambda output: output[:, None, :], r"it gave shape \(1, 1, 3\)"),
            (lambda output: 0.5, "it gave a float"),
        ],
    )
    def test_shapes_that_are_no_scores(self, function: Any, match: str) -> None:
        with pytest.raises(ValueError, match=f"`function` must give a tensor .*{match}"):
            FunctionScore(function).bind(LOGITS, FLAT)
