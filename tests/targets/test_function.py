from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.targets import FLAT, LOGITS

from monai_saliency.errors import CaseError
from monai_saliency.targets import (
    FunctionScore,
)


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
        with pytest.raises(CaseError, match=f"case ct_7: `function` must give a tensor .*{match}"):
            FunctionScore(function).bind(LOGITS, FLAT)

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="`function` must be a function of the network's output, got 3"):
            FunctionScore(3)
        with pytest.raises(CaseError, match="case ct_7: `function` gave 3 scores per image for 1 `labels`"):
            FunctionScore(lambda output: output, ["a"]).bind(LOGITS, FLAT)
