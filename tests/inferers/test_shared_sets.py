"""Sets of windows that are searched in rounds: the same answer however the work is shared, resumed or batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore

SHAPE = (12, 12)


class Spots(torch.nn.Module):
    """Two scores: weighted sums of voxels. Counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0)).pow(6))
        self.images = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images += len(x)
        return torch.tanh((x * self.weight).flatten(2).sum(dim=2) / 30)


def images(count: int = 1) -> torch.Tensor:
    return torch.stack([torch.ones(1, *SHAPE) * (i + 1) for i in range(count)])


def explain(batch: int = 3, **settings: Any) -> ms.PerturbationInferer:
    target = ms.RegressionScore("all")
    return ms.minimal_region(0.8, 4, 2, 0.3, target=target, mask_batch_size=batch, **settings)


def expected(count: int = 1) -> list[ms.Explanation]:
    found = explain().explain(images(count), Spots())
    assert all(0 < float(saliency.mean()) < 0.8 for each in found for saliency in each.saliency)
    return found


@pytest.mark.parametrize("batch", [1, 16])
def test_batches(batch: int) -> None:
    for one, other in zip(expected(3), explain(batch).explain(images(3), Spots()), strict=True):
        assert list(one.ids) == list(other.ids)
        assert torch.equal(one.saliency, other.saliency)


@pytest.mark.parametrize("stop", [1, 8])
def test_a_stopped_run_goes_on(stop: int, tmp_path: Path) -> None:
    class Stops(Spots):
        batches = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.batches += len(x) > 1
            if self.batches > stop:
                raise KeyboardInterrupt
            return super().forward(x)

    def run(network: Spots) -> ms.Explanation:
        stored = [ScoreStore(tmp_path).open("case", "key")]
        return explain(2).explain(images(), network, cases=[Case("case")], stored=stored)[0]

    with pytest.raises(KeyboardInterrupt):
        run(Stops())
    network = Spots()
    resumed = run(network)
    (whole,) = expected()
    assert list(resumed.ids) == list(whole.ids)
    assert torch.equal(resumed.saliency, whole.saliency)
    again = Spots()
    found = run(again)
    assert again.images < network.images
    assert again.images <= 4
    assert torch.equal(found.saliency, whole.saliency)
    # The sets can be rendered by whoever replayed the rounds.
    assert torch.equal(found.masks.render(found.ids), whole.masks.render(whole.ids))


def test_parts_meet_in_the_store(tmp_path: Path) -> None:
    for number in range(3):
        stored = [ScoreStore(tmp_path).open("case", "key")]
        (state,) = explain(1).score(images(), Spots(), stored=stored, part=Part(number, 3))
        assert state.complete == (number == 2)
    assert torch.equal(state.explanation().saliency, expected()[0].saliency)
