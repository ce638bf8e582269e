"""Random masks in two rounds: where they lie, what they ask for, and what their map shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tolerances import MASKS, assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms

LOGIT = ms.ClassScore([0], "none")
ONE = [(slice(20, 25), slice(31, 37))]
TWO = [(slice(5, 10), slice(6, 11)), (slice(33, 38), slice(30, 36))]


def means(*boxes: tuple[slice, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A network with one score for each box: the mean of the image there."""
    everywhere: list[Any] = [(slice(None), 0, *box) for box in boxes]
    return lambda x: torch.stack([x[here].flatten(1).mean(dim=1) for here in everywhere], dim=1)


def either(x: torch.Tensor) -> torch.Tensor:
    """Either of two boxes is enough."""
    return means(*TWO)(x).amax(dim=1, keepdim=True)


def image(*shape: int) -> torch.Tensor:
    return torch.ones(1, 1, *(shape or (48, 44)))


def explain(network: Any, x: torch.Tensor | None = None, target: Any = LOGIT, **settings: Any) -> ms.Explanation:
    return ms.focused_rise(target=target, **settings).explain(image() if x is None else x, network)[0]


def peaks(found: ms.Explanation, count: int, away: int = 12) -> list[tuple[int, ...]]:
    """The highest places that lie so far apart, of the first map."""
    left, places = found.saliency[0].clone(), []
    for _ in range(count):
        place = torch.unravel_index(left.argmax(), left.shape)
        places.append(tuple(map(int, place)))
        left[tuple(slice(max(0, int(at) - away), int(at) + away) for at in place)] = left.min()
    return places


def inside(place: tuple[int, ...], box: tuple[slice, ...]) -> bool:
    return all(side.start <= at < side.stop for at, side in zip(place, box, strict=True))


def places_of(found: ms.Explanation) -> list[int]:
    return list(dict.fromkeys(place for place, number, _ in found.ids if place and number >= 0))


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((48, 44), ONE[0]),
        ((37, 45), (slice(32, 37), slice(0, 6))),
        ((24, 30, 20), (slice(5, 10), slice(20, 25), slice(9, 14))),
    ],
)
def test_the_evidence_is_found(shape: tuple[int, ...], box: tuple[slice, ...]) -> None:
    found = explain(means(box), image(*shape))
    (place,) = places_of(found)
    assert found.num_forwards <= 350
    assert inside(peaks(found, 1)[0], box)
    # The place holds the box and little else, and hiding it hides the box.
    hidden = found.masks.render([(place, -1, 0)])[0, 0]
    assert float(hidden[box].max()) < 0.05
    assert float((1 - hidden).mean()) < 0.25
    # A value is what hiding a sixteenth of each axis takes: all of them together take what the image adds.
    cells = found.saliency[0].numel() / torch.tensor([max(1, n / 16) for n in shape]).prod()
    assert float(found.saliency[0].mean() * cells) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("shape", [(48, 44), (12, 20, 14)])
def test_a_mask_depends_on_its_id_alone(shape: tuple[int, ...]) -> None:
    bound = ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), 20, seed=3).bind(image(*shape)[0])
    place, other = 0b111 << 50, 0b11 << 90
    ids = [*bound.first_round(), *((place, n, 30) for n in range(6)), *((other, n, 70) for n in range(-1, 6))]
    masks = bound.render(ids)
    assert masks.shape == (len(ids), 1, *shape)
    assert float(masks.min()) >= 0
    assert float(masks.max()) <= 1
    assert torch.equal(bound.render(ids[::-1]), masks.flip(0))
    for row in (0, 1, 5, 9, len(ids) - 1):
        assert_close(bound.render([ids[row]]), masks[row : row + 1], within=MASKS)
    box = tuple(slice(2, n - 3) for n in shape)
    here = (slice(None), slice(None), *box)
    assert_close(bound.render(ids, box=box), masks[here], within=MASKS)
    assert len({mask.numpy().tobytes() for mask in masks}) == len(ids)
    assert float(bound.render([(bound._all, -1, 0)]).max()) == 0


def test_masks_in_other_coordinates() -> None:
    """What is read of the lattice is what is read of rendered masks."""
    bound = ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), 20).bind(image(12, 20, 14)[0].double())
    ids = [*bound.first_round(), (0b111 << 50, 1, 30), (0b11 << 90, -1, 0)]
    matrices = [torch.rand(n, 3, dtype=torch.float64) for n in bound.spatial_shape]
    wanted = torch.einsum("nabc,ai,bj,ck->nijk", bound.render(ids)[:, 0], *matrices)
    assert_close(bound.along_axes(ids, matrices)[:, 0], wanted)


@pytest.mark.parametrize("percent", [10, 50, 80])
def test_so_many_cells_are_kept(percent: int) -> None:
    bound = ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), 340).bind(image(48, 44)[0])
    upper_half = (1 << bound.grid[0] // 2 * bound.grid[1]) - 1
    for place in (0, upper_half):
        masks = bound.render([(place, n, percent) for n in range(170)])
        assert float(masks.mean()) == pytest.approx(percent / 100, abs=0.03)


def kept(network: Any, **settings: Any) -> list[int]:
    """How many of 100 cells the masks of each look keep."""
    found = explain(network, **settings)
    return list(dict.fromkeys(percent for _, number, percent in found.ids if number >= 0))


def test_so_much_is_kept_that_half_of_the_effect_is_left() -> None:
    many = [(slice(row, row + 6), slice(column, column + 6)) for row in (3, 19, 35) for column in (3, 18, 33)]
    any_of_many = lambda x: (means(*many)(x) > 0.5).any(1, keepdim=True).float()  # noqa: E731
    all_of_many = lambda x: (means(*many)(x) > 0.5).all(1, keepdim=True).float()  # noqa: E731
    assert kept(any_of_many)[-1] < 25
    assert kept(all_of_many)[-1] > 75
    assert 40 <= kept(means(*ONE))[-1] <= 60
    assert kept(any_of_many, p1=0.4) == [40]


def test_either_of_two_places_is_enough() -> None:
    found = explain(either)
    assert all(any(inside(peak, box) for peak in peaks(found, 2)) for box in TWO)
    assert found.num_forwards <= 350


def test_a_weak_place_beside_a_strong_one() -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        first, second = means(*TWO)(x).T
        return torch.maximum(first, 0.9 * second.pow(4))[:, None]

    assert all(any(inside(peak, box) for peak in peaks(explain(network), 2)) for box in TWO)


def test_evidence_that_adds_up() -> None:
    found = explain(lambda x: means(*TWO)(x).sum(dim=1, keepdim=True))
    assert all(any(inside(peak, box) for peak in peaks(found, 2)) for box in TWO)


def test_where_nothing_stands_out_there_are_more_masks_of_the_first_round() -> None:
    found = explain(lambda x: torch.full((len(x), 1), 70.1))
    assert found.stopped.startswith("nothing stood out, so the last masks cover the whole image")
    assert [(place, number, percent) for place, number, percent in found.ids if number >= 0] == [
        (0, number, 50) for number in range(340)
    ]


def test_where_all_stands_out_on_patches_random_masks_cover_all() -> None:
    settings = {"target": ms.RegionScore(1, "softmax", "all"), "inferer": SlidingWindowInferer((16, 16), 4, 0.5)}
    found, whole = (explain(lambda x: torch.cat([-x, x], 1), **settings, patch_memory=kept) for kept in (True, False))
    assert found.ids == whole.ids
    assert sum(drawn >= 0 for _, drawn, _ in found.ids) == len(found.scores[-170:].unique()) == 170
    assert_close(found.scores, whole.scores)


def test_batches_change_nothing() -> None:
    first = explain(either, mask_batch_size=5, num_masks=60)
    second = explain(either, mask_batch_size=64, num_masks=60)
    assert first.ids == second.ids
    assert_close(first.saliency, second.saliency)


@pytest.mark.parametrize("until", [0.8, 0.95])
def test_until_asks_for_more_of_the_second_round(until: float) -> None:
    """The map agrees with that of other masks about as well as was asked."""
    network = lambda x: torch.sigmoid(12 * (means(*ONE)(x) - 0.6))  # noqa: E731
    found = [explain(network, until=until, num_masks=40, budget=1500, seed=seed) for seed in range(4)]
    assert all(each.stopped.endswith("reached") for each in found)
    maps = torch.stack([each.saliency.flatten() for each in found])
    assert float(torch.corrcoef(maps)[~torch.eye(4, dtype=torch.bool)].mean()) > until - 0.1
    assert "the budget is used, agreement" in explain(means(*ONE), until=0.999, num_masks=40, budget=100).stopped


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_masks": 3}, "num_masks"),
        ({"p1": 0}, "`p1` must be"),
        ({"p1": 1}, "`p1` must be"),
        ({"seed": -1}, "seed"),
        ({"until": 1.0}, "`until` must be above 0 and below 1"),
        ({"budget": 100}, "give `until` too"),
    ],
)
def test_errors(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ms.focused_rise(target=LOGIT, **settings)


@pytest.mark.parametrize("shape", [(1, 20, 20), (17, 1, 33), (2, 9, 30), (1, 1, 50)])
def test_axes_of_one_or_two_voxels(shape: tuple[int, ...]) -> None:
    """A volume of one slice is explained as its plane is: no voxel of the map is NaN, and the evidence stands out."""
    image = torch.ones(1, 1, *shape)
    half = shape[-1] // 2
    (found,) = ms.focused_rise(100, target=ms.RegressionScore()).explain(
        image, lambda images: images[..., :half].flatten(1).sum(1, keepdim=True)
    )
    assert bool(found.saliency[..., :half].mean() > 10 * found.saliency[..., half:].mean().abs())
