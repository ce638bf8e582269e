"""Random masks that keep half of the effect: what they hide, what they ask for, and what their map shows."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import MASKS, assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms

REGRESSION = ms.estimators.RegressionScoring()
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
    assert found.num_forwards <= 350
    assert inside(peaks(found, 1)[0], box)
    # The place that is hidden for the words holds most of the box and little else.
    (row,) = found.masks.places(found.ids)
    hidden = found.masks.render([found.ids[row]])[0, 0]
    assert float(hidden[box].mean()) < 0.05
    assert float((1 - hidden).mean()) < 0.25
    # A value is what hiding a sixteenth of each axis takes: all of them together take what the image adds.
    cells = found.saliency[0].numel() / torch.tensor([max(1, n / 16) for n in shape]).prod()
    assert float(found.saliency[0].mean() * cells) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("inferer", [None, SlidingWindowInferer(8, 4, 0.5)])
@pytest.mark.parametrize("shape", [(48, 44), (12, 20, 14)])
def test_a_mask_depends_on_its_id_alone(shape: tuple[int, ...], inferer: Any) -> None:
    bound = ms.masks.FocusedMasks(REGRESSION, 20, seed=3, inferer=inferer).bind(image(*shape)[0])
    ids = [*bound.first_round(), *((0, n, 30) for n in range(6)), *((0, n, 70) for n in range(6))]
    ids += [(0b1011, 0, 0), *((0b1011, n, 50) for n in range(6))]
    masks = bound.render(ids)
    assert masks.shape == (len(ids), 1, *shape)
    assert float(masks.min()) >= 0
    assert float(masks.max()) <= 1
    assert_close(bound.render(ids[::-1]), masks.flip(0), within=MASKS)
    for row in (0, 1, 5, 9, len(ids) - 1):
        assert_close(bound.render([ids[row]]), masks[row : row + 1], within=MASKS)
    box = tuple(slice(2, n - 3) for n in shape)
    here = (slice(None), slice(None), *box)
    assert_close(bound.render(ids, box=box), masks[here], within=MASKS)
    assert float(bound.render([(0, 0, 0)]).max()) == 0


def test_masks_are_those_of_rise() -> None:
    rise = ms.masks.RISEMasks(40, (4, 5), 0.5, seed=3).bind(image(11, 24)[0])
    bound = ms.masks.FocusedMasks(REGRESSION, 40, (4, 5), seed=3).bind(image(11, 24)[0])
    assert torch.equal(bound.render([(0, n, 50) for n in range(40)]), rise.render(range(40)))
    # On patches, within a set of windows; elsewhere all is kept.
    bound = ms.masks.FocusedMasks(REGRESSION, 40, (4, 5), seed=3, inferer=SlidingWindowInferer(4, 4)).bind(
        image(11, 24)[0]
    )
    first_windows = bound.render([(0b111, 0, 0)])[0, 0]
    inside_them = bound.render([(0b111, 7, 50)])[0, 0]
    assert_close(inside_them, torch.where(first_windows == 0, rise.render([7])[0, 0], 1.0), within=MASKS)


def test_masks_in_other_coordinates() -> None:
    """Cells that are multiplied give what rendered masks give."""
    bound = ms.masks.FocusedMasks(REGRESSION, 20).bind(image(12, 20, 14)[0].double())
    matrices = [torch.rand(n, 3, dtype=torch.float64) for n in bound.spatial_shape]
    some = 0b111 << 50, 1, 30
    for ids in ([*bound.first_round(), (0, 7, 30), (0, 8, 80)], [some, (0b11 << 90, 0, 0)], [some]):
        wanted = torch.einsum("nabc,ai,bj,ck->nijk", bound.render(ids)[:, 0], *matrices)
        assert_close(bound.along_axes(ids, matrices)[:, 0], wanted)


def test_masks_of_a_part_keep_all_cells_elsewhere() -> None:
    """They are RISE's of half as many cells again, but for the cells whose middle lies outside."""
    bound = ms.masks.FocusedMasks(REGRESSION, 20, (4, 6), seed=3).bind(image(12, 24)[0])
    chosen = np.zeros(bound.windows, dtype=bool)
    chosen[2:6, 4:8] = True  # of 8 x 12 windows: the rows 3 to 8, the columns 8 to 15
    part = sum(1 << int(bit) for bit in np.flatnonzero(chosen))
    rise = ms.masks.RISEMasks(20, (6, 9), 0.3, seed=3).bind(image(12, 24)[0])
    for number in range(5):
        codes = rise.codes([number])
        (shift,), (cells,) = codes["shift"], codes["grid"]
        for row, column in np.ndindex(6, 9):
            # A grid of 6 x 9 cells is stretched to 7 x 10 cells of 2 x 3 voxels.
            middle = [(row + 0.5) * 14 / 6 - 0.5 - shift[0], (column + 0.5) * 30 / 9 - 0.5 - shift[1]]
            if not (3 <= middle[0] < 9 and 8 <= middle[1] < 16):
                cells[row, column] = True
        assert_close(bound.render([(part, number, 30)]), rise._render(codes, torch.device("cpu")), within=MASKS)


def small(*boxes: tuple[slice, ...]) -> Any:
    """Whether any one of some boxes is shown."""
    return lambda x: (means(*boxes)(x) - 0.5).amax(1, keepdim=True) * 10


def test_later_masks_hide_a_part_where_cells_are_more_than_masks() -> None:
    box, other = tuple(slice(5 + n, 10 + n) for n in (0, 3, 2)), tuple(slice(20, 25) for _ in range(3))
    x = image(32, 32, 32)
    found = explain(small(box), x)
    later = found.masks.render([mask for mask in found.ids if mask[0] and mask[2]])[:, 0]
    assert len(later) == 170
    assert found.num_forwards == 345
    assert "in the windows with evidence" in found.stopped
    assert bool((later < 0.5).any(dim=0)[box].all())
    assert float((later < 0.5).any(dim=0).double().mean()) < 0.4  # a sixth, and half a cell around it
    # Of two boxes, each alone is enough, and they lie in one part.
    found = explain(small(box, other), x)
    assert all(any(inside(peak, each) for peak in peaks(found, 2)) for each in (box, other))


def test_no_part_where_evidence_lies_elsewhere() -> None:
    """The half of the voxels that are needed, and any of many boxes, do not fit into a sixth of the image."""
    x = image(32, 32, 32)
    half = (slice(0, 32), slice(0, 32), slice(0, 16))
    many = [tuple(slice(n, n + 4) for n in corner) for corner in itertools.product((2, 13, 24), repeat=3)]
    for network in (means(half), small(*many)):
        found = explain(network, x)
        assert not any(windows and percent for windows, _, percent in found.ids)
        assert found.num_forwards == 345


@pytest.mark.parametrize("percent", [10, 50, 80])
def test_so_many_cells_are_kept(percent: int) -> None:
    bound = ms.masks.FocusedMasks(REGRESSION, 340).bind(image(48, 44)[0])
    upper_half = (1 << bound.windows[0] // 2 * bound.windows[1]) - 1
    assert float(bound.render([(0, n, percent) for n in range(170)]).mean()) == pytest.approx(percent / 100, abs=0.03)
    masks = bound.render([(upper_half, n, percent) for n in range(170)])
    assert float(masks.mean()) == pytest.approx((1 + percent / 100) / 2, abs=0.02)


def kept(network: Any, **settings: Any) -> list[int]:
    """How many of 100 cells the masks of each look keep."""
    found = explain(network, **settings)
    return list(dict.fromkeys(percent for *_, percent in found.ids if percent))


def test_so_much_is_kept_that_half_of_the_effect_is_left() -> None:
    many = [(slice(row, row + 6), slice(column, column + 6)) for row in (3, 19, 35) for column in (3, 18, 33)]
    any_of_many = lambda x: (means(*many)(x) > 0.5).any(1, keepdim=True).float()  # noqa: E731
    all_of_many = lambda x: (means(*many)(x) > 0.5).all(1, keepdim=True).float()  # noqa: E731
    assert kept(any_of_many)[-1] < 25
    assert kept(all_of_many)[-1] > 75
    assert 40 <= kept(means(*ONE))[-1] <= 60
    assert kept(any_of_many, p1=0.4) == [40]


def weak_beside_strong(x: torch.Tensor) -> torch.Tensor:
    first, second = means(*TWO)(x).T
    return torch.maximum(first, 0.9 * second.pow(4))[:, None]


@pytest.mark.parametrize("network", [either, weak_beside_strong, lambda x: means(*TWO)(x).sum(dim=1, keepdim=True)])
def test_two_places(network: Any) -> None:
    found = explain(network)
    assert all(any(inside(peak, box) for peak in peaks(found, 2)) for box in TWO)
    assert found.num_forwards <= 350


def test_each_look_has_as_many_masks_as_all_before_it() -> None:
    found = explain(means(*ONE))
    search, looks = found.masks.search(torch.ones(1)), []
    wanted = next(search)
    for _ in range(5):
        looks.append(len(wanted))
        with contextlib.suppress(StopIteration):
            wanted = search.send(means(*ONE)(found.masks.render(wanted)))
    assert looks == [1 + 21, 21, 43, 85, 170 + 1]  # with the mask that hides all, and the one that hides the place


def test_where_the_score_never_changes_half_of_the_cells_are_kept() -> None:
    found = explain(lambda x: torch.full((len(x), 1), 70.1))
    assert found.stopped == "the last masks keep 50% of the cells"
    assert found.ids == [(0, 0, 0), *((0, number, 50) for number in range(340))]


def test_a_constant_in_the_score_changes_no_mask() -> None:
    found, turned = explain(either), explain(lambda x: -either(x))
    assert found.ids == explain(lambda x: 8 + either(x)).ids
    assert found.observed[0].ids == turned.observed[0].ids
    assert_close(found.saliency, -turned.saliency)


PATCHES = {"target": ms.RegionScore(1, "softmax", "all"), "inferer": SlidingWindowInferer((16, 16), 4, 0.5)}


def test_where_all_stands_out_on_patches_random_masks_cover_all() -> None:
    remembered, whole = (
        explain(lambda x: torch.cat([-x, x], 1), **PATCHES, patch_memory=memory) for memory in (True, False)
    )
    assert remembered.ids == whole.ids
    assert sum(percent > 0 for *_, percent in remembered.ids) == len(remembered.scores[-170:].unique()) == 170
    assert_close(remembered.scores, whole.scores)


def test_windows_with_evidence_on_patches() -> None:
    """Random masks hide the windows with evidence alone."""
    x = image() * 0
    x[0, 0, 20:25, 31:37] = 1
    found = explain(lambda x: torch.cat([-x, x], 1), x, **PATCHES)
    masks = found.masks.render([mask for mask in found.ids if mask[2]])[:, 0]
    assert found.stopped.endswith("of the cells in the windows with evidence, and all else")
    assert bool((masks[:, 20:25, 31:37] < 1).any(dim=0).all())
    assert float((masks == 1).all(dim=0).double().mean()) > 0.5
    assert float(masks[:, 20:25, 31:37].mean()) < 0.9


def test_batches_change_nothing() -> None:
    first = explain(either, mask_batch_size=5, num_masks=60)
    second = explain(either, mask_batch_size=64, num_masks=60)
    assert first.ids == second.ids
    assert_close(first.saliency, second.saliency)


@pytest.mark.parametrize("until", [0.8, 0.95])
def test_until_asks_for_more(until: float) -> None:
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
