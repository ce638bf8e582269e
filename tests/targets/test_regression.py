from __future__ import annotations

import pytest
import torch
from helpers.targets import FLAT, LOGITS

from monai_saliency.errors import CaseError
from monai_saliency.targets import (
    RegressionScore,
)


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
        with pytest.raises(
            CaseError, match=r"case ct_7: value 3 is out of range: the network gives 3 values.*\[0, 2\]"
        ):
            RegressionScore(3).bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match="case ct_7: `names` has 1 entries for 2 values"):
            RegressionScore([0, 1], ["age"]).bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match=r"case ct_7: RegressionScore .* a dict; .*output='age' reads \(B, 3\)"):
            RegressionScore(0).bind({"age": LOGITS}, FLAT)
        with pytest.raises(ValueError, match="`values` must be a list of indices or 'all', got 'age'"):
            RegressionScore("age")
