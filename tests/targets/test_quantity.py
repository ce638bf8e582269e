"""Every target says what its scores are, and in which unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.examples import target_examples

from monai_saliency.cases import Case
from monai_saliency.targets import BoundTarget, ClassScore, Target


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("kind", "target", "output"), target_examples())
def test_every_target_names_its_scores(
    kind: str, target: Target | None, output: Callable[[int], Any] | None, dims: int
) -> None:
    if target is None or output is None:
        pytest.fail(f"The target {kind.partition(' ')[0]} has no example in TARGETS of tests/helpers/examples.py")
    bound = target.bind(output(dims), Case("ct_7", torch.zeros(1, *[8] * dims)))
    assert type(bound).quantity is not BoundTarget.quantity
    assert all(bound.quantity())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (ClassScore([1], "softmax"), ("softmax probability of the class", "probability")),
        (ClassScore([1], "none"), ("network output of the class", "network output")),
    ],
)
def test_in_words(target: Target, expected: tuple[str, str]) -> None:
    assert target.bind(torch.tensor([[0.3, 2.1]]), Case("ct_7", torch.zeros(1, 8, 8))).quantity() == expected


def test_a_single_output_is_that_of_prediction_1() -> None:
    """Its channel is 0, which beside the prediction 0 would be read as the score of the class 0."""
    bound = ClassScore("predicted", "sigmoid").bind(torch.tensor([[-2.0]]), Case("ct_7", torch.zeros(1, 8, 8)))
    assert bound.describe()["prediction"] == 0
    assert bound.quantity().words == "sigmoid probability of prediction 1, the network's one output"
