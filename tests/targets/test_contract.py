"""What every target says of its scores: their words and unit, and whether they are sums over voxels, or linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.examples import target_examples

from monai_saliency.cases import Case
from monai_saliency.targets import BoundTarget, ClassScore, RegionScore, Target

PARTS = [(slice(0, 3), slice(0, 8)), (slice(3, 8), slice(0, 5)), (slice(3, 8), slice(5, 8))]
FLAT = Case("ct_7", torch.zeros(1, 8, 8))


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
    assert target.bind(torch.tensor(output), FLAT).quantity() == expected


@pytest.mark.parametrize(("kind", "target", "output"), target_examples())
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_sums_over_voxels(kind: str, target: Target, output: Callable[[int], Any]) -> None:
    reference = output(2)
    bound = target.bind(reference, FLAT)
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
    torch.testing.assert_close(sums, bound(one))


def test_a_mean_of_logits_is_linear() -> None:
    assert RegionScore(0, "none").is_linear
    assert not RegionScore(0, "softmax").is_linear
