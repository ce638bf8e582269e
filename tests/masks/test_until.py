"""Random masks in rounds: they stop when the map is good enough, and it is, by a reference that they never saw."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.estimators import slow_rise
from helpers.searches import after, driven
from helpers.tolerances import assert_close

import monai_saliency as ms
from monai_saliency.errors import CaseError

SHAPE = (16, 16)
TARGET = ms.RegressionScore()
BUDGET = 1500
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).repeat_interleave(4, 0).repeat_interleave(4, 1)


def image(count: int = 1) -> torch.Tensor:
    return torch.rand(count, 1, *SHAPE, generator=torch.Generator().manual_seed(0)) + 0.5


def spot(x: torch.Tensor) -> torch.Tensor:
    """A saturated probability of one place, of 4 x 4 voxels."""
    return torch.sigmoid(4 * (x[:, :, 3:7, 8:12].mean((1, 2, 3)) - 0.4))[:, None]


def broad(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] * WEIGHT).sum((1, 2))[:, None]


def chaos(x: torch.Tensor) -> torch.Tensor:
    """Noise that looks at everything: of an image always the same, of another image another."""
    return torch.sin(1e4 * x.flatten(1).sum(1, keepdim=True))


def explain(network: Callable[..., Any], images: torch.Tensor | None = None, **settings: Any) -> ms.Explanation:
    given: dict[str, Any] = {"grid_size": 6, "until": 0.9, "budget": BUDGET, "mask_batch_size": 64} | settings
    return ms.rise(target=TARGET, **given).explain(image() if images is None else images, network)[0]


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1])


@pytest.mark.parametrize("network", [spot, broad])
@pytest.mark.parametrize("until", [0.8, 0.95])
def test_it_stops_early_and_is_as_good_as_was_asked(network: Callable[..., Any], until: float) -> None:
    """The map agrees with one of as many masks of another seed as it says, and better with endless masks."""
    endless = ms.rise(12_000, 6, seed=777, target=TARGET, mask_batch_size=500)(image(), network)
    counts, promised, others = [], [], []
    for seed in range(8):
        found = explain(network, until=until, seed=seed)
        assert "reached" in found.stopped
        n = len(found.ids)
        counts.append(n)
        assert found.num_forwards == n + 1
        assert correlation(found.saliency, endless) > until
        other = ms.rise(n, 6, seed=seed + 100, target=TARGET, mask_batch_size=64)(image(), network)
        others.append(correlation(found.saliency, other))
        promised.append(float(found.stopped.split()[1]))
    assert max(counts) < BUDGET
    assert min(promised) >= until
    # Stopping at the first agreement above the wanted one flatters it a little.
    assert np.mean(others) == pytest.approx(np.mean(promised), abs=0.06)


@pytest.mark.parametrize("network", [lambda x: torch.full((len(x), 1), 0.7), chaos])
def test_where_there_is_nothing_to_find_all_of_the_budget_is_used(network: Callable[..., Any]) -> None:
    found = explain(network, budget=400)
    assert found.num_forwards == 401
    assert found.stopped.startswith("the budget is used, agreement ")
    assert found.stopped.endswith(" is below 0.9")
    assert found.fill_problem.startswith("hiding the whole scan leaves ")


def test_all_maps_must_agree() -> None:
    """One of two values is noise."""
    method = ms.rise(grid_size=6, until=0.9, budget=300, target=ms.RegressionScore([0, 1]))
    (both,) = method.explain(image(), lambda x: torch.cat([broad(x), chaos(x)], 1))
    assert len(both.ids) == 300
    assert len(explain(broad, budget=300).ids) < 300


def test_rounds() -> None:
    """100, then half as many as before each time, up to the budget; each mask that of the family."""
    bound = ms.masks.UntilMasks(ms.masks.RISEMasks(600, 6), ms.estimators.RISEScoring()).bind(image()[0])
    plain = ms.masks.RISEMasks(600, 6).bind(image()[0])
    rounds: list[list[int]] = []
    noise = torch.randn(600, 1, generator=torch.Generator().manual_seed(0))

    def scores_of(ids: Sequence[int]) -> torch.Tensor:
        rounds.append([*ids])
        return noise[rounds[-1]]

    observed = driven(bound, torch.zeros(1), scores_of)
    assert [each[-1] + 1 for each in rounds] == [100, 150, 225, 337, 505, 600]
    assert rounds[0] == [*bound.first_round()]
    assert [*itertools.chain(*rounds)] == [*observed.ids] == [*range(600)]
    assert torch.equal(observed.scores, noise)
    assert (len(bound), bound.adaptive, bound.drawn) == (600, True, True)
    assert torch.equal(bound.render([3, 500]), plain.render([3, 500]))
    few = ms.masks.UntilMasks(ms.masks.RISEMasks(60, 6), ms.estimators.RISEScoring()).bind(image()[0])
    assert few.first_round() == range(60)


@pytest.mark.parametrize("count", [8, 15])
def test_the_agreement_in_plain_loops(count: int) -> None:
    masks = ms.masks.RISEMasks(40, 3, seed=5).bind(torch.zeros(1, 7, 6, dtype=torch.float64))
    until = ms.masks.UntilMasks(ms.masks.RISEMasks(count, 3, seed=5), ms.estimators.RISEScoring(), first=count)
    bound = until.bind(torch.zeros(1, 7, 6, dtype=torch.float64))
    rendered = masks.render(range(count))[:, 0].numpy()
    scores = rendered[:, 1:3, 2:5].mean((1, 2))[:, None] * [1.0, 2.0] + rendered[:, 5:, :1].mean((1, 2))[:, None]
    halves = [slow_rise(rendered[half::2], scores[half::2], 0.5, "centred") for half in range(2)]
    expected = []
    for one, other in zip(*halves, strict=True):
        r = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        expected.append(2 * r / (1 + r) if r > 0 else r)
    observed = after(bound, torch.zeros(2, dtype=torch.float64), torch.from_numpy(scores))
    assert f"agreement {min(expected):.3f}" in observed.words


@pytest.mark.parametrize("batch", [7, 64])
def test_batches_change_nothing(batch: int) -> None:
    """And the map is that of as many masks, to the byte."""
    images = image(2)
    expected = explain(spot, images)
    found = ms.rise(grid_size=6, until=0.9, budget=BUDGET, target=TARGET, mask_batch_size=batch).explain(images, spot)
    assert list(found[0].ids) == list(expected.ids)
    assert_close(found[0].saliency, expected.saliency)
    for i, each in enumerate(found):
        plain = ms.rise(len(each.ids), 6, target=TARGET, mask_batch_size=batch).explain(images[i : i + 1], spot)[0]
        assert_close(each.saliency, plain.saliency)
        assert list(each.ids) == list(plain.ids)


def sixteen(image: torch.Tensor, spacing: Sequence[float] | None) -> torch.Tensor:
    rows, columns = torch.arange(16)[:, None] // 4, torch.arange(16)[None] // 4
    return (4 * rows + columns + 1)[None]


def test_regions_count_once_each() -> None:
    """However large: two of them hold three quarters of the voxels."""
    labels = torch.ones(1, *SHAPE, dtype=torch.long)
    labels[:, 8:], labels[:, 12:] = 2, torch.arange(3, 19)
    bound = ms.masks.UntilMasks(ms.masks.RegionMasks(60), ms.estimators.RISEScoring(), first=60).bind(
        image()[0], labels
    )
    scores = bound.render(range(60))[:, 0, 12, :4].mean(1, keepdim=True)
    kept = bound.codes(range(60))["coalition"].astype(float)
    halves = []
    for half in range(2):
        f, m = scores[half::2, 0].double().numpy(), kept[half::2]
        halves.append((f - f.mean()) @ m)
    r = np.corrcoef(*halves)[0, 1]
    assert f"agreement {2 * r / (1 + r):.3f}" in after(bound, torch.ones(1), scores).words


@pytest.mark.parametrize(
    "method",
    [
        lambda **given: ms.rise(grid_size=4, per_channel=True, **given),
        lambda **given: ms.region_occlusion(40, regions=sixteen, **given),
        lambda **given: ms.region_occlusion(40, regions=sixteen, per_channel=True, **given),
    ],
)
def test_channels_and_regions(method: Callable[..., ms.PerturbationInferer]) -> None:
    weight = torch.stack([WEIGHT, WEIGHT.flip(0)])
    pair = torch.ones(1, 2, *SHAPE)
    network = lambda x: (x * weight).sum((1, 2, 3))[:, None]  # noqa: E731
    (found,) = method(until=0.9, budget=3000, target=TARGET, mask_batch_size=100).explain(pair, network)
    assert "reached" in found.stopped
    assert len(found.ids) < 3000
    assert found.standard_error.shape == found.saliency.shape


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ms.rise(until=1.0, target=TARGET), "`until` must be above 0 and below 1"),
        (lambda: ms.rise(until="often", target=TARGET), "`until` must be"),
        (lambda: ms.rise(budget=4000, target=TARGET), "`budget` 4000 .* give `until` too"),
        (lambda: ms.rise(until=0.9, budget=0, target=TARGET), "`budget` must be a whole number of at least 1"),
        (lambda: ms.rise(500, until=0.9, budget=400, target=TARGET), "at most the budget of 400, got 500"),
        (lambda: ms.rise(3, until=0.9, target=TARGET), "at least 4 masks, two for each half"),
        (lambda: ms.region_occlusion(until=0.9, target=TARGET), "`until` needs random sets of regions"),
        (lambda: ms.region_occlusion(budget=9, target=TARGET), "give `until` too"),
        (
            lambda: ms.masks.UntilMasks(ms.masks.SlidingWindowMasks(4), ms.estimators.RISEScoring()),
            "SlidingWindowMasks are not",
        ),
        (
            lambda: ms.PerturbationInferer(
                ms.masks.UntilMasks(
                    ms.masks.IndependentChannelMasks(ms.masks.RISEMasks(40, p1=0.3)), ms.estimators.RISEScoring(0.3)
                ),
                TARGET,
                ms.estimators.RISEScoring(0.5),
            ),
            "the masks keep a cell with `p1` 0.3",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_few_regions_are_refused() -> None:
    labels = torch.arange(4).repeat_interleave(4)[None, :, None].expand(1, *SHAPE)
    explain = ms.region_occlusion(20, until=0.9, target=TARGET)
    with pytest.raises(CaseError, match=r"at least 5 regions, and there are 3.*leave out `until`"):
        explain.explain(image(), spot, cases=[ms.Case("ct", labels=labels)])
