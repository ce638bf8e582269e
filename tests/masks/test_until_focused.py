"""Focused RISE in rounds: it stops when each place's shape is good enough, by a reference that it never saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.forked_ranks import on_ranks

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.distributed.process_group import MasksOverRanks
from monai_saliency.estimators.regression import SmoothRegression
from monai_saliency.masks.focused import BoundFocusedMasks, Focus
from monai_saliency.storage.score_store import ScoreStore

SHAPE = (48, 56)
TARGET = ms.RegressionScore()
FIRST, SECOND = np.s_[:, :, 6:11, 7:12], np.s_[:, :, 36:41, 41:46]


def image(count: int = 1) -> torch.Tensor:
    return torch.rand(count, 1, *SHAPE, generator=torch.Generator().manual_seed(0)) + 1


class Spots(torch.nn.Module):
    """A saturated probability of one place, and a second value of two places. Ctrl-C comes after some batches."""

    def __init__(self, places: int = 1, after: int = 9999) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.places, self.after, self.batches = places, after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += len(x) > 1
        if self.batches > self.after:
            raise KeyboardInterrupt
        one, two = (x[each].mean((1, 2, 3))[:, None] for each in (FIRST, SECOND))
        return self.weight * (torch.sigmoid(3 * (one - 0.8)) if self.places == 1 else one + 0.7 * two)


def method(**settings: Any) -> ms.PerturbationInferer:
    given = {"grid_size": 5, "window_size": 8, "target": TARGET, "mask_batch_size": 64, "until": 0.95, "budget": 1000}
    return ms.focused_rise(**given | settings)


def explain(network: Any = None, images: torch.Tensor | None = None, **settings: Any) -> ms.Explanation:
    return method(**settings).explain(image() if images is None else images, network or Spots())[0]


def foci(found: ms.Explanation) -> list[Focus]:
    assert isinstance(found.masks, BoundFocusedMasks)
    return found.masks.foci(found.ids)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1])


@pytest.mark.parametrize("until", [0.9, 0.97])
def test_it_stops_early_and_the_shape_is_as_good_as_was_asked(until: float) -> None:
    """Inside the box, the map agrees with one of as many masks of another seed, and resembles that of many."""
    endless = method(num_masks=1500, until=None, budget=None, seed=77).explain(image(), Spots())[0]
    counts, promised, others, reached = [], [], [], []
    for seed in range(6):
        found = explain(until=until, seed=seed, num_masks=40)
        (focus,) = foci(found)
        assert found.num_forwards == len(found.ids) + 1
        counts.append(len(focus.rows))
        promised.append(float(found.stopped.split()[-2]))
        inside = (0, *focus.box)
        reached.append(correlation(found.saliency[inside], endless.saliency[inside]))
        other = method(num_masks=counts[-1], until=None, budget=None, seed=seed + 100).explain(image(), Spots())[0]
        others.append(correlation(found.saliency[inside], other.saliency[inside]))
    assert max(counts) < 1000
    assert {*counts} <= {40, 60, 90, 135, 202, 303, 454, 681}
    assert min(promised) >= until
    # Stopping at the first agreement above the wanted one flatters it a little.
    assert np.mean(others) > until - 0.06
    assert min(reached) > 0.8


def test_more_is_asked_for_more_agreement() -> None:
    counts = [len(foci(explain(until=until, num_masks=10))[0].rows) for until in (0.5, 0.98, 0.995)]
    assert counts == sorted(set(counts))


def test_the_map_is_that_of_as_many_masks() -> None:
    found = explain()
    (focus,) = foci(found)
    plain = method(num_masks=len(focus.rows), until=None, budget=None).explain(image(), Spots())[0]
    torch.testing.assert_close(found.saliency, plain.saliency, rtol=0, atol=1e-6)
    assert found.standard_error is not None
    assert plain.standard_error is not None
    torch.testing.assert_close(found.standard_error, plain.standard_error, rtol=0, atol=1e-6)


def test_each_place_goes_on_by_itself() -> None:
    """The agreement is that of regressions of every other mask of a place, the lowest of all places."""
    found = explain(Spots(2), until=0.97, num_masks=24, keep=0.2, seed=3)
    places = foci(found)
    assert len(places) == 2
    expected = []
    for focus in places:
        halves = []
        for half in range(2):
            numbers = sorted(focus.ids)[half::2]
            scores = torch.stack([found.scores[focus.rows[focus.ids.index(number)]] for number in numbers])
            cell = [(side.stop - side.start) / 5 for side in focus.box]
            halves.append(SmoothRegression(focus.masks, numbers, cell).effects(scores)[0])
        r = correlation(*halves)
        whole = SmoothRegression(focus.masks, focus.ids, cell).effects(found.scores[focus.rows])[0]
        expected.append(min(2 * r / (1 + r), correlation(halves[0] + halves[1], whole)))
        assert len(focus.rows) in {12, 18, 27, 40, 60, 90, 135, 202, 303, 454, 500}
    assert f"agreement {min(expected):.3f} reached" in found.stopped
    assert min(expected) >= 0.97


def test_the_budget_is_shared_by_places_and_used_where_they_do_not_agree() -> None:
    found = explain(Spots(2), until=0.9999, num_masks=24, budget=120, keep=0.2)
    assert [len(focus.rows) for focus in foci(found)] == [60, 60]
    assert "the budget is used, agreement" in found.stopped
    assert found.stopped.endswith("is below 0.9999")


def test_nothing_stands_out() -> None:
    """Random masks all over the image come in rounds too."""
    network = ms.RegressionScore, lambda x: x.mean((1, 2, 3))[:, None]
    found = explain(network[1], num_masks=30, budget=200, until=0.99)
    (focus,) = foci(found)
    assert focus.everywhere
    assert "nothing stood out" in found.stopped
    assert 30 <= len(focus.rows) <= 200
    constant = explain(lambda x: torch.full((len(x), 1), 0.7), num_masks=30, budget=60)
    assert len(foci(constant)[0].rows) == 60  # nothing agrees with nothing


@pytest.mark.parametrize("batch", [1, 7])
def test_batches_change_nothing(batch: int) -> None:
    images = image(2)
    expected = method().explain(images, Spots(2))
    found = method(mask_batch_size=batch).explain(images, Spots(2))
    for one, other in zip(found, expected, strict=True):
        assert list(one.ids) == list(other.ids)
        torch.testing.assert_close(one.saliency, other.saliency, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 6, 12])
def test_a_killed_run_goes_on(stop: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_masks": 20, "mask_batch_size": 10, "until": 0.98}

    def run(network: torch.nn.Module) -> ms.Explanation:
        stored = [ScoreStore(tmp_path).open("case", "key")]
        return method(**settings).explain(image(), network, cases=[Case("case")], stored=stored)[0]

    expected = explain(Spots(), **settings)
    with pytest.raises(KeyboardInterrupt):
        run(Spots(after=stop))
    resumed = run(Spots())
    assert list(resumed.ids) == list(expected.ids)
    assert torch.equal(resumed.saliency, expected.saliency)
    assert resumed.stopped == expected.stopped


def test_ranks_ask_for_the_same() -> None:
    expected = explain(mask_batch_size=16)

    def rank(number: int) -> Any:
        found = explain(sharing=MasksOverRanks(), mask_batch_size=16)
        return found.saliency, list(found.ids), found.stopped

    for saliency, ids, stopped in on_ranks(2, rank):
        assert torch.equal(saliency, expected.saliency)
        assert (ids, stopped) == (list(expected.ids), expected.stopped)


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="compares boxes that FocusedScoring"):
        ms.UntilMasks(ms.FocusedMasks(100), ms.RISEScoring())
    with pytest.raises(ValueError, match="give `until` too"):
        ms.focused_rise(budget=100, target=TARGET)
    with pytest.raises(ValueError, match="at most the budget of 50, got 60"):
        method(num_masks=60, budget=50)
