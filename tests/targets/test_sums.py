"""What a target says of its scores before it is bound: whether they are sums over voxels, and whether linear ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.examples import target_examples

from monai_saliency.cases import Case
from monai_saliency.targets import BoundTarget, RegionScore, Target

PARTS = [(slice(0, 3), slice(0, 8)), (slice(3, 8), slice(0, 5)), (slice(3, 8), slice(5, 8))]


def check_sums(bound: BoundTarget, reference: torch.Tensor) -> None:
    """Scores are made of sums, and these of what boxes contribute, but for constants."""
    outputs = torch.randn(2, *reference.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = bound.sums(outputs)
    torch.testing.assert_close(bound.of_sums(sums), bound(outputs))
    parts = sum(bound.contribution(outputs[(..., *box)], box) for box in PARTS)
    torch.testing.assert_close(parts[1] - parts[0], sums[1] - sums[0])


@pytest.mark.parametrize(("kind", "target", "output"), target_examples())
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_it_holds_of_the_bound_target(kind: str, target: Target, output: Callable[[int], Any]) -> None:
    reference = output(2)
    bound = target.bind(reference, Case("a", torch.zeros(1, 8, 8)))
    assert bound.additive == target.is_additive
    if bound.summed:
        check_sums(bound, reference)
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
    assert [RegionScore(0, activation).is_linear for activation in ("none", "softmax", "sigmoid")] == [True] + [
        False
    ] * 2
