"""One search for each explained score, driven once; what it keeps alive, and what it asks for beside others."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.searches import asks_of, driven

import monai_saliency as ms
from monai_saliency.estimators import regression as regression_room
from monai_saliency.inferers.scores import Scores
from monai_saliency.masks import BoundMasks
from monai_saliency.masks.base import Ids, Search
from monai_saliency.masks.focused import BoundFocusedMasks
from monai_saliency.storage.score_store import ScoreStore

SHAPE = (24, 20)
TARGET = ms.RegressionScore("all")
PLACES = [(slice(3, 8), slice(12, 17)), (slice(15, 20), slice(2, 7)), (slice(9, 13), slice(8, 14))]


def image(count: int = 1) -> torch.Tensor:
    return torch.ones(count, 1, *SHAPE, dtype=torch.float64)


def scores_of(x: torch.Tensor) -> torch.Tensor:
    """Three scores ``(B, 3)``, each of a place of its own."""
    return torch.stack([x[(slice(None), 0, *place)].mean((1, 2)) for place in PLACES], dim=1)


class Counts:
    """How often a search has been started, and how many scores each was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        search = BoundFocusedMasks.search

        def counted(masks: BoundFocusedMasks, reference_scores: torch.Tensor) -> Search:
            started = len(self.sent)
            self.sent.append(0)
            inner = search(masks, reference_scores)
            wanted = next(inner)
            while True:
                scores = yield wanted
                self.sent[started] += len(scores)
                try:
                    wanted = inner.send(scores)
                except StopIteration as end:
                    return end.value

        monkeypatch.setattr(BoundFocusedMasks, "search", counted)


@pytest.mark.parametrize("classes", [[0], [2, 0, 1]])
def test_the_search_of_each_score_is_started_once(classes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And each mask is scored for it once, whoever reads the map, its error, noise, legend and words afterwards."""
    counts = Counts(monkeypatch)
    explain = ms.focused_rise(100, target=ms.RegressionScore(classes))
    (found,) = explain.explain(image(), scores_of)
    assert found.standard_error.shape == found.saliency.shape
    assert bool((found.noise > 0).all())
    assert found.stopped.startswith("the last masks keep")
    assert len(ms.visualize.legend.Legend.of(found)) == len(classes)
    # The mask that hides the place alone is scored too, and no map is made of it.
    assert counts.sent == [len(observed.ids) + 1 for observed in found.observed]
    assert len(counts.sent) == len(classes)


def test_two_cases_and_members_have_searches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    explain = ms.focused_rise(40, target=ms.RegressionScore())
    explain.explain(image(2), scores_of)
    assert len(counts.sent) == 2
    members = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24 * 20, 1)).double() for _ in range(3)]
    explain.explain(image(), ms.Ensemble(members))
    assert len(counts.sent) == 2 + 3


def test_a_resumed_run_starts_it_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends it the scores on disk, and what is still missing."""
    counts = Counts(monkeypatch)
    explain = ms.focused_rise(100, target=ms.RegressionScore(), mask_batch_size=8)

    def run(network: Callable[[torch.Tensor], torch.Tensor]) -> ms.Explanation:
        stored = [ScoreStore(tmp_path).open("case", "key")]
        return explain.explain(image(), network, cases=[ms.Case("case")], stored=stored)[0]

    (expected,) = explain.explain(image(), scores_of)
    assert len(counts.sent) == 1
    seen = 0

    def stops(x: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += len(x) > 1  # an image alone is no batch
        if seen > 11:  # of 15: the last round has begun
            raise KeyboardInterrupt
        return scores_of(x)

    with pytest.raises(KeyboardInterrupt):
        run(stops)
    assert len(counts.sent) == 2
    resumed = run(scores_of)
    assert len(counts.sent) == 3
    assert counts.sent[0] == counts.sent[2] == len(expected.ids) > counts.sent[1] > 50
    assert expected.stopped.startswith("the last masks keep")
    assert resumed.num_forwards < expected.num_forwards
    assert [*resumed.ids] == [*expected.ids]
    assert torch.equal(resumed.saliency, expected.saliency)
    assert torch.equal(run(scores_of).saliency, expected.saliency)
    assert len(counts.sent) == 4


METHODS: dict[str, Callable[[], ms.PerturbationInferer]] = {
    "rise": lambda: ms.rise(20, 4, target=TARGET),
    "rise until": lambda: ms.rise(20, 4, until=0.9, budget=60, target=TARGET),
    "regression": lambda: ms.rise(40, 4, form="regression", target=ms.RegressionScore()),
    "focused rise": lambda: ms.focused_rise(40, target=ms.RegressionScore()),
    "focused rise of three": lambda: ms.focused_rise(40, target=TARGET),
    "focused rise until": lambda: ms.focused_rise(40, until=0.9, budget=80, target=ms.RegressionScore()),
    "hierarchy": lambda: ms.hierarchical_occlusion(6, 3, target=TARGET),
    "minimal": lambda: ms.minimal_region(window_size=6, levels=2, target=TARGET),
    "shapley": lambda: ms.shapley(60, num_supervoxels=8, target=TARGET),
}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_a_case_is_alive_after_its_explanation(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its masks, nor a regression, nor what the searches have observed; the features of masks not even before."""
    features, fit = [], regression_room._fit

    def watched(given: Any, *others: Any) -> Any:
        features.append(weakref.ref(given.features))
        return fit(given, *others)

    monkeypatch.setattr(regression_room, "_fit", watched)
    (found,) = METHODS[method]().explain(image(), scores_of)
    found.standard_error  # noqa: B018  the regression is kept for it
    made = len(features)
    alive = [weakref.ref(found), weakref.ref(found.masks), *(weakref.ref(observed) for observed in found.observed)]
    regressions = [regression for observed in found.observed for regression in observed.fit or ()]
    alive += map(weakref.ref, regressions)
    assert bool(regressions) == bool(made) == (method.startswith("focused") or method == "regression")
    gc.collect()
    assert [one() for one in features if one() is not None] == []
    assert all(one() is not None for one in alive)
    del found, regressions
    gc.collect()
    assert [one() for one in alive if one() is not None] == []


def scores_of_masks(bound: BoundMasks, columns: list[int]) -> Callable[[Ids], torch.Tensor]:
    """The scores ``(n, K)`` of masks, each rendered alone, so that they do not depend on what is rendered beside it."""
    return lambda ids: torch.cat([scores_of(bound.render([each])) for each in ids])[:, columns]


FAMILIES: dict[str, ms.masks.Masks] = {
    "focused": ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), 40),
    "focused until": ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), 40, until=0.9, budget=80),
    "hierarchy": ms.masks.HierarchicalMasks(6, 3, 0.2),
    "minimal": ms.masks.MinimalMasks(0.7, ms.masks.HierarchicalMasks(6, 2)),
    "until": ms.masks.UntilMasks(ms.masks.RISEMasks(90, 4), ms.estimators.RISEScoring(), 0.95, first=20),
    "windows": ms.masks.SlidingWindowMasks(6),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("columns", [[1], [0, 1], [2, 0, 1]])
def test_scores_together_ask_for_what_each_asks_for_alone(family: str, columns: list[int]) -> None:
    """The masks of a case are the union, none twice, and each search observes its own."""
    bound = FAMILIES[family].bind(image()[0])
    asked: set[Any] = set()
    alone = []
    for column in columns:
        scores_of_column = scores_of_masks(bound, [column])

        def scores(ids: Any, scores_of_column: Any = scores_of_column) -> torch.Tensor:
            asked.update(ids)
            return scores_of_column(ids)

        alone.append(driven(bound, torch.ones(1).double(), scores))
    scores, together, found = Scores("case"), [], None
    for ask in asks_of(bound, torch.ones(len(columns)).double(), scores):
        if isinstance(ask, list):
            together += ask
            scores.add(ask, scores_of_masks(bound, columns)(ask))
        found = ask
    assert len(set(together)) == len(together) == len(scores)
    assert set(together) == asked >= {mask for observed in alone for mask in observed.ids}
    if not bound.adaptive:
        (observed,) = found.observed
        assert torch.equal(observed.scores, torch.cat([each.scores for each in alone], dim=1))
        return
    for observed, expected in zip(found.observed, alone, strict=True):
        assert [*observed.ids] == [*expected.ids]
        assert torch.equal(observed.scores, expected.scores)
        assert observed.words == expected.words


@pytest.mark.parametrize("family", FAMILIES)
def test_law_2_the_same_scores_ask_for_the_same_masks(family: str) -> None:
    """Whatever the order in which they came, in rounds that are cut anywhere."""
    bound = FAMILIES[family].bind(image()[0])
    expected: Any = None
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        scores, asks = Scores("case"), []
        for ask in asks_of(bound, torch.ones(3).double(), scores):
            if not isinstance(ask, list):
                break
            asks.append(ask)
            order = torch.randperm(len(ask), generator=generator)
            for some in order.split(17):
                ids = [ask[place] for place in some.tolist()]
                scores.add(ids, scores_of_masks(bound, [0, 1, 2])(ids))
        found = asks, scores.of([mask for ask in asks for mask in ask]).tolist()
        expected = expected or found
        assert found == expected
