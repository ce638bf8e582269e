"""Windows that find, random masks that look closer: by hand, in plain loops, and on networks that sum a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.estimators.regression import SmoothRegression
from monai_saliency.masks.focused import BoundFocusedMasks
from monai_saliency.masks.looks import Found

LOGIT = ms.ClassScore([0], "none")


def sums(*boxes: tuple[slice, ...], shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A network whose scores are the sums of regions, one score each."""
    weights = torch.zeros(len(boxes), *shape, dtype=torch.float64)
    for weight, box in zip(weights, boxes, strict=True):
        weight[box] = 1
    return lambda x: x[:, 0].double().flatten(1) @ weights.flatten(1).T


def explain(network: Any, shape: tuple[int, ...], target: ms.Target = LOGIT, **settings: Any) -> Any:
    settings = {"window_size": 8, "levels": 3, "mask_batch_size": 32} | settings
    return ms.focused_rise(target=target, **settings).explain(torch.ones(1, 1, *shape).double(), network)[0]


def asked(found: Any) -> list[Any]:
    """The places that the map is made of, without those whose masks told that less or more is to be kept."""
    bound = found.masks
    places = bound.asked_for(found.ids, found.scores[:, 0], found.reference_scores[0])
    return sorted((f for f in bound.foci(found.ids) if f.place in places), key=lambda f: places.index(f.place))


def holds(box: tuple[slice, ...], region: tuple[slice, ...]) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(box, region, strict=True))


def starts(focus: Any) -> list[tuple[int, int]]:
    return [(side.start, side.stop) for side in focus.box]


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((40, 48), (slice(13, 17), slice(30, 35))),
        ((37, 45), (slice(33, 37), slice(0, 5))),
        ((24, 32, 20), (slice(5, 9), slice(21, 24), slice(10, 15))),
    ],
)
def test_the_evidence_is_found(shape: tuple[int, ...], region: tuple[slice, ...]) -> None:
    """The peak is strictly inside, the box holds the region, and the map ranks its voxels first."""
    found = explain(sums(region, shape=shape), shape, num_masks=400, grid_size=4)
    (focus,) = found.masks.foci(found.ids)
    assert not focus.everywhere
    assert holds(focus.box, region)
    truth = torch.zeros(shape, dtype=torch.bool)
    truth[region] = True
    saliency = found.saliency[0]
    assert bool(truth[np.unravel_index(int(saliency.argmax()), shape)])
    assert saliency[truth].mean() > 4 * saliency[~truth].abs().mean()
    assert len(found.ids) <= found.masks.at_most
    assert found.num_forwards == len(found.ids) + 1


def test_the_map_in_plain_loops() -> None:
    """Inside the box the regression's effects of a window's voxels; elsewhere the windows' drops, divided."""
    shape, p1 = (32, 40), 0.4
    weight = np.random.default_rng(0).normal(size=shape) * 0.01
    weight[12:15, 21:26] += 1
    found = explain(
        lambda x: (x[:, 0] * torch.from_numpy(weight)).flatten(1).sum(1, keepdim=True), shape, num_masks=60, p1=p1
    )
    bound, ids, score = found.masks, list(found.ids), found.reference_scores[0]
    (focus,) = bound.foci(ids)
    scores = found.scores[focus.rows, 0].double().numpy()
    masks = bound.render([ids[row] for row in focus.rows])[:, 0].numpy()
    expected = np.zeros(shape)
    windows = [row for row, index in enumerate(ids) if index < len(bound.windows)]
    drops = {}
    for row, (y, x) in zip(windows, bound.windows.hidden_boxes([ids[row] for row in windows]), strict=True):
        drops[(y.start, x.start), y.stop - y.start] = float(score - found.scores[row, 0])
    for (corner, edge), drop in drops.items():
        if edge == 8:
            divide(expected, drops, corner, 8, drop)
    inside = np.zeros(shape, dtype=bool)
    inside[focus.box] = True
    # tests/estimators/test_smooth_regression.py compares the regression with plain loops. A last window is 2 x 2.
    random = ms.RISEMasks(60, 5, p1, 0).bind(torch.zeros(1, 10, 10).double())
    np.testing.assert_array_equal(random.render(range(60))[:, 0].numpy(), masks[(slice(None), *focus.box)])
    regression = SmoothRegression(random, range(60), (2, 2))
    expected[focus.box] = 4 * regression.effects(torch.from_numpy(scores)[:, None])[0].numpy()
    np.testing.assert_allclose(found.saliency[0].numpy(), expected, rtol=1e-9, atol=1e-12)
    error = found.standard_error[0].numpy()
    within = 4 * regression.standard_error(torch.from_numpy(scores)[:, None])[0].numpy()
    np.testing.assert_allclose(error[focus.box], within, rtol=1e-9)
    assert float(found.noise[0]) == pytest.approx(np.sqrt(np.mean(np.square(within))), rel=1e-6)
    assert not error[~inside].any()


def divide(expected: np.ndarray, drops: dict[Any, float], corner: tuple[int, int], edge: int, value: float) -> None:
    """Divide what a window has among its parts by what each took; evenly, per 2 x 2 voxels, where it has none."""
    half = edge // 2
    parts = {(corner[0] + y, corner[1] + x): 0.0 for y in (0, half) for x in (0, half)} if edge > 2 else {}
    taken = {part: max(drops[part, half], 0) for part in parts if (part, half) in drops}
    if sum(taken.values()) > 0:
        for part, each in taken.items():
            divide(expected, drops, part, half, value * each / sum(taken.values()))
    else:
        expected[corner[0] : corner[0] + edge, corner[1] : corner[1] + edge] = value / (edge // 2) ** 2


def test_what_is_divided_adds_up() -> None:
    """By hand: the second window's 6 go to its third and fourth part, 1 to 2; the last took less than nothing."""
    bound = ms.HierarchicalMasks(4, 2, keep=0.5).bind(torch.zeros(1, 8, 8))
    drops = torch.tensor([1.0, 6.0, 0.0, -2.0, 0.0, -1.0, 2.0, 4.0])
    found = bound.spread([*range(4), *bound._parts(0, 1)], drops)
    expected = [[0.25, 0.25, 0, 0], [0.25, 0.25, 2, 4], [0, 0, -0.5, -0.5], [0, 0, -0.5, -0.5]]
    np.testing.assert_allclose(found, expected)
    voxels = bound.to_voxels(found[None])[0]
    assert voxels.shape == (8, 8)
    assert voxels[2, 5] == 2
    assert voxels[3, 6] == 4


def test_two_places() -> None:
    shape = (48, 56)
    first, second = (slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))
    network = sums(first, shape=shape)
    other = sums(second, shape=shape)
    found = explain(lambda x: network(x) + 0.6 * other(x), shape, num_masks=301, grid_size=4, keep=0.2)
    foci = found.masks.foci(found.ids)
    assert [len(focus.rows) for focus in foci] == [150, 150]
    assert "2 places with evidence" in found.stopped
    for focus, region in zip(foci, (first, second), strict=True):
        assert holds(focus.box, region)
    saliency = found.saliency[0]
    assert float(saliency[first].mean()) == pytest.approx(4 * 1.0, rel=0.3)  # a cell is 2 x 2 voxels
    assert float(saliency[second].mean()) == pytest.approx(4 * 0.6, rel=0.3)


def test_nothing_stands_out() -> None:
    """Evidence all over the image: random masks all over the image."""
    shape = (32, 40)
    found = explain(sums((slice(None), slice(None)), shape=shape), shape, num_masks=50)
    (focus,) = found.masks.foci(found.ids)
    assert focus.everywhere
    assert "nothing stood out" in found.stopped
    assert len(focus.rows) == 50
    assert starts(focus) == [(0, 32), (0, 40)]


def test_a_network_that_ignores_the_image() -> None:
    found = explain(lambda x: x.new_full((len(x), 1), 70.0), (32, 40), num_masks=20)
    assert found.masks.foci(found.ids)[0].everywhere
    assert not found.saliency.any()


def test_each_score_has_its_own_place() -> None:
    shape = (40, 48)
    regions = (slice(2, 6), slice(3, 7)), (slice(30, 34), slice(40, 44))
    found = explain(sums(*regions, shape=shape), shape, ms.ClassScore([0, 1], "none"), num_masks=200, grid_size=4)
    foci = found.masks.foci(found.ids)
    assert [len(focus.rows) for focus in foci] == [200, 200]
    for saliency, region in zip(found.saliency, regions, strict=True):
        truth = torch.zeros(shape, dtype=torch.bool)
        truth[region] = True
        assert bool(truth[np.unravel_index(int(saliency.argmax()), shape)])


def test_a_score_without_a_place_leaves_those_of_others_alone() -> None:
    """The first score has evidence all over, so that its box is the whole image; the second has a place."""
    shape = (40, 48)
    region = (slice(30, 34), slice(40, 44))
    network = sums((slice(None), slice(None)), region, shape=shape)
    both = explain(network, shape, ms.ClassScore([0, 1], "none"), num_masks=200, grid_size=4)
    alone = explain(network, shape, ms.ClassScore([1], "none"), num_masks=200, grid_size=4)
    assert [focus.everywhere for focus in both.masks.foci(both.ids)] == [True, False]
    torch.testing.assert_close(both.saliency[1], alone.saliency[0])
    torch.testing.assert_close(both.standard_error[1], alone.standard_error[0])
    assert bool((both.standard_error[0] > 0).all())


@pytest.mark.parametrize("shape", [(33, 40), (24, 18, 21)])
def test_masks(shape: tuple[int, ...]) -> None:
    """All but the box is kept; inside are RISE's masks of an image of the box's shape; parts are rendered alone."""
    bound = ms.FocusedMasks(7, 3, 6, 2, seed=5).bind(torch.zeros(1, *shape))
    place = bound.boxes.about([n // 3 + 4.5 for n in shape], 0)
    box = bound.boxes.box(place)
    assert [(side.start % 3, side.stop - side.start) for side in box] == [(0, 9)] * len(shape)
    first = len(bound.looks)
    whole = first + len(bound.boxes) * 7
    wanted = [2, *(first + place * 7 + i for i in (0, 3, 6)), whole + 6]
    masks = bound.render(wanted)
    random = ms.RISEMasks(7, 3, 0.5, 5)
    expected = torch.ones(5, 1, *shape)
    expected[:1] = bound.windows.render([2])
    expected[(slice(1, 4), slice(None), *box)] = random.bind(torch.zeros(1, *[9] * len(shape))).render([0, 3, 6])
    expected[4:] = random.bind(torch.zeros(1, *shape)).render([6])
    assert torch.equal(masks, expected)
    for part in (
        tuple(slice(2, 11) for _ in shape),
        tuple(slice(0, 5) for _ in shape),
        tuple(slice(n - 4, n) for n in shape),
    ):
        assert torch.equal(bound.render(wanted, box=part), expected[(slice(None), slice(None), *part)])
        hides, rows = bound.restrict(wanted, part)
        touched = (expected[(slice(None), slice(None), *part)] < 1).flatten(1).any(1).numpy()
        assert (hides | ~touched).all()
        assert len({tuple(row) for row in rows[hides].tolist()}) == hides.sum()
    assert torch.equal(bound.render(wanted[2:3]), expected[2:3])


def test_boxes() -> None:
    """By hand: boxes of 4 x 4 and 8 x 8 voxels begin on even ones, or end with the image."""
    bound = ms.FocusedMasks(5, 2, 4, 2).bind(torch.zeros(1, 31, 32))
    boxes = bound.boxes
    assert boxes.shapes == [(4, 4), (8, 8), bound.alone.edges, (4, 4), (8, 8)]  # of two cells, both are the inner part
    assert len(boxes) == 5 * 16 * 16
    larger = ms.FocusedMasks(5, 5, 4, 2).bind(torch.zeros(1, 64, 64)).boxes
    middle = larger.about((31, 21), 0)
    assert larger.box(middle) == (slice(26, 36), slice(16, 26))
    assert larger.box(larger.inner(middle)) == (slice(28, 34), slice(18, 24))  # three of five cells
    part = larger.about((31, 21), larger.further)
    assert larger.inner(part) == part
    assert boxes.box(boxes.about((8.9, 9.1), 0)) == (slice(6, 10), slice(8, 12))
    assert boxes.box(boxes.about((31, 0), 1)) == (slice(23, 31), slice(0, 8))
    assert [boxes.size(boxes.about((5, 5), size)) for size in range(3)] == [0, 1, 2]
    evidence = np.zeros((16, 16))
    evidence[4:6, 7:9], evidence[12, 2], evidence[0, 0] = 2.0, 1.9, -5.0
    assert boxes.find(evidence, 1) == [boxes.about((10, 16), 0)]  # 1.9 is less than a quarter of 8
    assert boxes.outside(evidence.clip(min=0), boxes.find(evidence, 1)) == pytest.approx(1.9)
    evidence[12, 2] = 2.0
    assert [boxes.box(each) for each in boxes.find(evidence, 4)] == [
        (slice(8, 12), slice(14, 18)),
        (slice(24, 28), slice(4, 8)),
    ]
    assert boxes.find(evidence, 1) == []  # and as much elsewhere
    assert boxes.find(np.ones((16, 16)), 4) == []


def either(*boxes: tuple[slice, ...], shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A network to which any one of some regions is enough."""
    network = sums(*boxes, shape=shape)
    return lambda x: network(x).amax(1, keepdim=True)


@pytest.mark.parametrize(
    ("shape", "regions"),
    [
        ((48, 56), [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))]),
        ((48, 56), [(slice(4, 8), slice(7, 11)), (slice(37, 41), slice(42, 46)), (slice(20, 24), slice(30, 34))]),
        ((24, 32, 40), [(slice(2, 6), slice(3, 7), slice(4, 8)), (slice(14, 18), slice(22, 26), slice(30, 34))]),
    ],
)
def test_each_of_several_places_is_enough(shape: tuple[int, ...], regions: list[tuple[slice, ...]]) -> None:
    """Hiding one of them changes nothing. All are found, and each peak lies inside its region."""
    found = explain(either(*regions, shape=shape), shape, num_masks=600, grid_size=4)
    foci = asked(found)
    assert f"one of {len(regions)} gives what another gives" in found.stopped
    assert len(foci) == len(regions)
    assert len(found.ids) <= found.masks.at_most
    saliency = found.saliency[0]
    for focus in foci:
        (region,) = [region for region in regions if holds(focus.box, region)]
        assert len(focus.hidden) == len(regions) - 1
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[region] = True
        peak = np.unravel_index(int(saliency[focus.box].argmax()), saliency[focus.box].shape)
        assert bool(inside[focus.box][peak])
        # Each voxel adds 1 where the other places are hidden, and a cell of the last level has 2 voxels along an axis.
        assert float(saliency[region].mean()) == pytest.approx(2.0 ** len(shape), rel=0.35)


def test_masks_of_one_of_several_places() -> None:
    """In plain loops: the box has RISE's masks, the other places are hidden, the rest is kept."""
    shape, regions = (48, 56), [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))]
    found = explain(either(*regions, shape=shape), shape, num_masks=90, grid_size=4)
    bound, ids = found.masks, list(found.ids)
    masks = bound.render(ids)
    assert [len(focus.rows) for focus in asked(found)] == [24, 16]  # eight more of each were tried; 24 and left
    boxes = [focus.box for focus in asked(found)]
    for focus in bound.foci(ids):  # those that were tried and left have masks as well
        kept = 0.5 * (1.0, 0.7, 0.4)[focus.place // (len(bound.boxes) + 1) % 3]
        random = ms.RISEMasks(90, 4, kept, 0)
        random = random.bind(torch.zeros(1, *(side.stop - side.start for side in focus.box)).double())
        (other,) = (box for box in boxes if box != focus.box)
        assert focus.hidden == [other]
        for row, number in zip(focus.rows, focus.ids, strict=True):
            expected = torch.ones(1, *shape, dtype=torch.float64)
            expected[0][other] = 0
            expected[0][focus.box] = random.render([number])[0, 0]
            assert torch.equal(masks[row], expected)
    shown = range(len(bound.windows), len(bound.windows) + len(bound.alone))
    hidden, *parts = bound.render(shown)
    assert not hidden.any()
    for part, window in zip(parts, bound.windows.hidden_boxes(bound.windows.levels[0]), strict=True):
        expected = torch.zeros(1, *shape, dtype=torch.float64)
        expected[(0, *(slice(max(side.start - 2, 0), side.stop + 2) for side in window))] = 1
        assert torch.equal(part, expected)
    every = [*range(0, len(bound.windows), 5), *shown, *ids[-90:]]
    full = bound.render(every)
    for box in ((slice(0, 16), slice(0, 16)), (slice(16, 40), slice(8, 30)), (slice(5, 9), slice(50, 56))):
        assert torch.equal(bound.render(every, box=box), full[(slice(None), slice(None), *box)])
        hides, rows = bound.restrict(every, box)
        inside = full[(slice(None), slice(None), *box)].flatten(1)
        assert (hides | ~(inside < 1).any(1).numpy()).all()
        seen: dict[tuple[int, ...], torch.Tensor] = {}
        for row, mask in zip(rows[hides].tolist(), inside[torch.from_numpy(hides)], strict=True):
            assert torch.equal(seen.setdefault(tuple(row), mask), mask)


def test_too_many_places_are_enough() -> None:
    """Five places where four are looked at: it goes on as if none were, with fewer random masks."""
    shape = (48, 56)
    regions = [(slice(y, y + 4), slice(x, x + 4)) for y, x in ((2, 2), (2, 42), (38, 2), (38, 42), (20, 26))]
    found = explain(either(*regions, shape=shape), shape, num_masks=50)
    assert not any(focus.hidden for focus in found.masks.foci(found.ids))
    assert sum(len(focus.rows) for focus in found.masks.foci(found.ids)) == 34
    assert len(found.ids) <= found.masks.at_most


def test_places_that_are_enough_by_hand() -> None:
    """Windows of 8: three parts of the first row are enough; the first two have columns 6 to 10 in common."""
    bound = ms.FocusedMasks(10, 4, 8, 2).bind(torch.zeros(1, 16, 48)).alone
    gains = np.zeros((2, 6))
    gains[0, [0, 1]], gains[0, 4], gains[1, 5] = [1.0, 0.9], 0.8, 0.79
    assert [place.tolist() for place in bound.enough(gains.ravel())] == [[4, 8], [4, 36]]


class Saturated(torch.nn.Module):
    """A network that is sure of its class with any of some regions: a probability of their weighted sums."""

    def __init__(self, regions: list[tuple[slice, ...]], shape: tuple[int, ...], weights: list[float]) -> None:
        super().__init__()
        self.sums, self.weights = sums(*regions, shape=shape), torch.tensor(weights, dtype=torch.float64)
        self.voxels = float(np.prod([side.stop - side.start for side in regions[0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid((self.sums(x) / self.voxels @ self.weights)[:, None] - 4)


@pytest.mark.parametrize(
    ("shape", "regions", "weights", "num_masks"),
    [
        ((48, 56), [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))], [9.0, 8.0], 300),
        ((48, 56), [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))], [9.0, 5.5], 300),
        (
            (24, 32, 40),
            [(slice(2, 6), slice(3, 7), slice(4, 8)), (slice(14, 18), slice(22, 26), slice(30, 34))],
            [9.0, 8.0],
            300,
        ),
        (
            (48, 56),
            [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46)), (slice(5, 9), slice(44, 48))],
            [9.0, 8.0, 7.0],
            900,
        ),
    ],
)
def test_the_windows_look_again(
    shape: tuple[int, ...], regions: list[tuple[slice, ...]], weights: list[float], num_masks: int
) -> None:
    """The probability hides all but one region; with what was found hidden, the next one stands out."""
    network = Saturated(regions, shape, weights)
    found = explain(network, shape, ms.ClassScore([0], "none"), num_masks=num_masks, grid_size=4)
    foci = asked(found)
    assert f"one of {len(regions)} gives what another gives, so the others were hidden meanwhile" in found.stopped
    assert len(found.ids) <= found.masks.at_most
    assert len(foci) == len(regions)
    saliency = found.saliency[0]
    for focus in foci:
        (region,) = [region for region in regions if holds(focus.box, region)]
        assert len(focus.hidden) == len(regions) - 1
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[region] = True
        peak = np.unravel_index(int(saliency[focus.box].argmax()), saliency[focus.box].shape)
        assert bool(inside[focus.box][peak])
    assert [len(focus.before) for focus in foci] == list(range(len(regions)))


def test_masks_of_the_second_look() -> None:
    """In plain loops: the first box hidden, then blocks and windows with it, then both boxes, then random masks."""
    shape, regions = (48, 56), [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))]
    found = explain(Saturated(regions, shape, [9.0, 8.0]), shape, num_masks=90, grid_size=4)
    bound, ids = found.masks, list(found.ids)
    (first, second), masks = asked(found), bound.render(ids)
    numbers = [bound.boxes.about([(s.start + s.stop) / 2 for s in focus.box], 0) for focus in (first, second)]
    inner = [bound.boxes.inner(number) for number in numbers]
    one, part, both, *parts = [
        ids.index(bound.looks.index(bound.looks.nothing, hidden))
        for hidden in (
            numbers[:1],
            inner[:1],
            [inner[0], numbers[1]],
            numbers,
            [inner[0], numbers[1]],
            [numbers[0], inner[1]],
        )
    ]
    for row, hides in ((one, [first.box]), (part, [bound.boxes.box(inner[0])]), (parts[0], [first.box, second.box])):
        hidden = torch.ones(1, *shape, dtype=torch.float64)
        for box in hides:
            hidden[0][box] = 0
        assert torch.equal(masks[row], hidden)
    hidden = torch.ones(1, *shape, dtype=torch.float64)
    hidden[0][bound.boxes.box(inner[0])] = 0
    looked = [row for row in range(part + 1, both) if bound.looks.split(ids[row])[0] < len(bound.windows)]
    for row in looked:
        own, boxes = bound.looks.split(ids[row])
        assert boxes == inner[:1]
        assert torch.equal(masks[row], hidden * bound.windows.render([own])[0])
    # The first region, which is left, lies in the first of 3 x 4 blocks, in the first two windows along each axis.
    blocks = [index for index in ids[:both] if bound.looks.split(index)[0] > bound.looks.nothing]
    assert [bound.looks.split(index) for index in blocks] == [(bound.looks.block + i, inner[:1]) for i in range(12)]
    for i, mask in enumerate(bound.render(blocks)):
        expected = hidden.clone()
        expected[0][i // 4 * 16 : i // 4 * 16 + 16, i % 4 * 16 : i % 4 * 16 + 16] = 0
        assert torch.equal(mask, expected)
    assert [bound.looks.split(ids[row])[0] for row in looked][:4] == [0, 1, 7, 8]
    assert all(index >= len(bound.looks) for index in ids[max(parts) + 1 :])
    every = [*ids[:both:7], *ids[both - 20 :]]
    full = bound.render(every)
    for box in ((slice(0, 16), slice(0, 16)), (slice(16, 40), slice(8, 30)), (slice(34, 44), slice(40, 56))):
        assert torch.equal(bound.render(every, box=box), full[(slice(None), slice(None), *box)])
        hides, rows = bound.restrict(every, box)
        inside = full[(slice(None), slice(None), *box)].flatten(1)
        assert (hides | ~(inside < 1).any(1).numpy()).all()
        seen: dict[tuple[int, ...], torch.Tensor] = {}
        for row, mask in zip(rows[hides].tolist(), inside[torch.from_numpy(hides)], strict=True):
            assert torch.equal(seen.setdefault(tuple(row), mask), mask)


def test_a_place_that_adds_nothing_where_others_are_hidden_is_dropped() -> None:
    """Hiding one of two regions changes little, so the first look finds what a third adds, 1 %; it is not kept."""
    shape = (48, 56)
    regions = [(slice(6, 10), slice(7, 11)), (slice(37, 41), slice(42, 46))]
    enough, little = Saturated(regions, shape, [9.0, 12.0]), sums((slice(20, 24), slice(26, 30)), shape=shape)
    found = explain(lambda x: enough(x) + 0.01 / 16 * little(x), shape, num_masks=200, grid_size=4)
    bound, places = found.masks, asked(found)
    hidden = [bound.looks.split(index)[1] for index in found.ids if index < len(bound.looks)]
    assert max(map(len, hidden)) == 3
    assert "one of 2 gives what another gives" in found.stopped
    assert [sum(holds(focus.box, region) for focus in places) for region in regions] == [1, 1]
    assert len(places) == 2
    assert len(found.ids) <= bound.at_most


def test_boxes_that_overlap() -> None:
    """What the first box holds is hidden in the second one too, and not the other way round."""
    bound = ms.FocusedMasks(6, 4, 8, 3).bind(torch.zeros(1, 48, 56))
    first, second = (bound.boxes.about(middle, 0) for middle in ((12, 12), (16, 12)))
    found = Found([first, second], [first, second], redundant=True)
    one, other = (bound._place_of(found, before, 0) for before in range(2))
    random = bound.render([len(bound.looks) + place * 6 + 1 for place in (one, other)])[:, 0]
    assert not random[1][bound.boxes.box(first)].any()
    assert random[0][bound.boxes.box(first)].any()
    assert not random[0][16:20, 8:16].any()  # of the second box alone


def test_evidence_that_adds_up_is_not_looked_at_again() -> None:
    """A third of the evidence lies everywhere, which windows see: hiding the box leaves it, and nothing is missing."""
    shape, region = (48, 56), (slice(13, 17), slice(30, 34))
    weight = torch.full(shape, 8 / (48 * 56), dtype=torch.float64)
    weight[region] += 1
    found = explain(lambda x: (x[:, 0] * weight).flatten(1).sum(1, keepdim=True), shape, num_masks=50)
    (focus,) = found.masks.foci(found.ids)
    assert len(focus.rows) == 50
    assert "were the last; hiding all of them leaves 32% of what the image adds to the score" in found.stopped


def test_what_hiding_raises_is_not_said_to_be_left() -> None:
    """Hiding a part of a region lowers the score, hiding all of it raises the score above the image's."""
    shape, region = (48, 56), (slice(14, 18), slice(30, 34))

    def network(x: torch.Tensor) -> torch.Tensor:
        shown = x[:, 0][(slice(None), *region)].flatten(1).mean(1)
        return (0.55 * x.flatten(1).mean(1) + 1.5 - 2 * shown + 1.5 * shown**2)[:, None]

    found = explain(network, shape, num_masks=50, grid_size=4, keep=0.1)
    assert not found.masks.foci(found.ids)[0].everywhere
    assert found.masks._look(found.ids, found.scores[:, 0], found.reference_scores[0]).left > 1
    assert found.stopped == "random masks in 1 place with evidence were the last"


def test_two_places_that_one_look_finds() -> None:
    """Each takes little, and both together all: the others are hidden, without a further look."""
    shape, regions = (48, 56), [(slice(8, 12), slice(8, 12)), (slice(32, 36), slice(40, 44))]
    found = explain(Saturated(regions, shape, [8.0, 8.0]), shape, num_masks=100, grid_size=4)
    foci = asked(found)
    assert [len(focus.hidden) for focus in foci] == [1, 1]
    # Of 100 without five checks; eight told how much to keep.
    assert [len(focus.rows) for focus in foci] == [47 - 8, 47 - 8]
    assert "one of 2 gives" in found.stopped


def test_a_score_that_is_not_redundant_is_not_looked_at_twice() -> None:
    shape, region = (40, 48), (slice(13, 17), slice(30, 35))
    found = explain(sums(region, shape=shape), shape, num_masks=50)
    shown = range(len(found.masks.windows) + 1, len(found.masks.windows) + len(found.masks.alone))
    assert not set(shown) & set(found.ids)


def test_indices_of_a_large_scan_are_numbers_of_64_bits() -> None:
    bound = ms.FocusedMasks(4000, 5, 64, 5).bind(torch.zeros(1, 1, 1, 1).expand(1, 512, 512, 600))
    assert len(bound.boxes.shapes) > 3
    assert bound.looks.most == 1
    assert ms.FocusedMasks().bind(torch.zeros(1, 1, 1, 1).expand(1, 512, 512, 600)).looks.most == 3
    assert bound.codes([len(bound) - 1])["index"].tolist() == [len(bound) - 1]


def test_remembered_patches() -> None:
    """The same scores and boxes as whole images, from a part of the forwards."""

    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.nn.functional.avg_pool2d(x, 3, 1, 1) ** 2, x], 1)

    image = 0.1 * torch.rand(1, 1, 64, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    image[..., 20:26, 30:34] += 3
    inferer = SlidingWindowInferer((16, 16), 4, 0.5)
    target = ms.RegionScore(0, "none", region="all")
    remembered, whole = (
        ms.focused_rise(60, 3, levels=3, target=target, inferer=inferer, patch_memory=memory).explain(image, Local())[0]
        for memory in (True, False)
    )
    assert list(remembered.ids) == list(whole.ids)
    torch.testing.assert_close(remembered.saliency, whole.saliency, rtol=1e-8, atol=1e-9)
    (focus,) = remembered.masks.foci(remembered.ids)
    assert not focus.everywhere
    assert remembered.num_forwards / remembered.per_prediction < 0.25 * whole.num_forwards


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_masks": 0}, "`num_masks` must be a whole number of at least 1"),
        ({"grid_size": 1}, "`grid_size` must be a whole number of at least 2"),
        ({"p1": 1.0}, r"`p1` must be in \(0, 1\)"),
        ({"p1": 0.0}, r"`p1` must be in \(0, 1\)"),
        ({"max_foci": 0}, "`max_foci` must be a whole number of at least 1"),
        ({"levels": 0}, "`levels` must be a whole number of at least 1"),
    ],
)
def test_errors(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ms.FocusedMasks(**settings)


def test_masks_of_another_family() -> None:
    with pytest.raises((TypeError, ValueError), match="the masks of FocusedMasks, for FocusedScoring"):
        ms.PerturbationInferer(ms.RISEMasks(5), LOGIT, ms.FocusedScoring()).explain(
            torch.ones(1, 1, 8, 8), lambda x: x.flatten(1).sum(1, keepdim=True)
        )


def test_the_kind_of_bound_masks() -> None:
    assert isinstance(ms.FocusedMasks().bind(torch.zeros(1, 32, 32)), BoundFocusedMasks)
