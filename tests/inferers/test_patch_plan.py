import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.estimators import by_coalitions
from helpers.patches import WHOLE, Coupled, Network, blocks, images, patch_boxes, planned
from helpers.searches import driven
from helpers.tolerances import assert_close
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.case_patches import find_touches, find_trims
from monai_saliency.inferers.patch_memory import OutputMemory
from monai_saliency.masks.base import Id, Ids, Masks
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks, HierarchicalMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.sliding_window import PatchWindowMasks, SlidingWindowMasks
from monai_saliency.utils.patch_grid import PatchGrid


def closed_form(masks: Any, inferer: SlidingWindowInferer, reach: torch.Tensor) -> int:
    """The sum over masks of the patches that they touch within reach, less those seen, plus one reference pass."""
    boxes, before = patch_boxes(inferer, reach.shape)
    rendered = masks.render(range(len(masks)))[:, 0]
    count = len(boxes)
    for box in boxes:
        inside = tuple(
            slice(max(0, side.start - b), max(0, side.stop - b)) for side, b in zip(box, before, strict=True)
        )
        if reach[inside].any():
            count += len({m[inside].numpy().tobytes() for m in rendered if bool((m[inside] < 1).any())})
    return count


class TestCounted:
    @pytest.mark.parametrize("shape", [(23, 18), (13, 16, 9), (4, 16, 9)])
    @pytest.mark.parametrize("overlap", [0.0, 0.3, 0.5])
    @pytest.mark.parametrize("reach", ["all", "corner"])
    @pytest.mark.parametrize(
        "masks", [SlidingWindowMasks(4, 3), SlidingWindowMasks(2, 5), RegionMasks(20), RegionMasks()]
    )
    def test_patch_forwards_are_the_closed_form(self, shape: Any, overlap: float, reach: str, masks: Masks) -> None:
        inferer = SlidingWindowInferer((6,) * len(shape), overlap=overlap)
        region = torch.zeros(shape)
        region[tuple(slice(3) if reach == "corner" else slice(None) for _ in shape)] = 1
        network, image, labels = Network(len(shape)), images(1, 1, *shape), blocks(shape, 4, 9)
        explain = ms.PerturbationInferer(
            masks, ms.RegionScore(1, "softmax", region), OcclusionScoring(), inferer=inferer
        )
        (explanation,) = explain.explain(image, network, cases=[ms.Case("x", labels=labels)])
        expected = closed_form(masks.bind(image[0], labels=labels), inferer, region)
        # The network is looked at by three patches, and one has everything hidden.
        assert network.rows - 4 == explanation.num_forwards == expected

    def test_a_clinical_ct(self) -> None:
        """512 x 512 x 300, 96^3 patches, overlap 0.25, windows and strides of 32: at least 45 times fewer."""
        explain = ms.sliding_window(32, 32, target=WHOLE, inferer=SlidingWindowInferer((96, 96, 96)))
        counts = planned(explain.masks, explain.inferer, torch.empty(1, 512, 512, 300, device="meta"))
        # Windows and patches are products of intervals, so that what they touch is counted axis by axis.
        touched, patches_along, masks_along = 1, 1, 1
        for size in (512, 512, 300):
            starts = [min(s, size - 96) for s in range(0, size - 96 + 72, 72)]
            first = -((32 - (size - (size - 1) // 32 * 32)) // 2)
            windows = [(first + 32 * i, first + 32 * i + 32) for i in range(-(-size // 32))]
            touched *= sum(max(0, a) < s + 96 and s < b for a, b in windows for s in starts)
            patches_along *= len(starts)
            masks_along *= len(windows)
        assert counts.patches == patches_along == 196
        assert counts.forwards == touched + 196
        assert counts.plain == 196 * (masks_along + 1)
        assert counts.gain >= 45

    def test_a_mask_outside_of_the_targets_reach_runs_nothing(self) -> None:
        region = torch.zeros(24, 24)
        region[:3, :3] = 1
        network, image = Network(2), images(1, 1, 24, 24)
        explain = ms.sliding_window(
            4, 4, target=ms.RegionScore(1, "softmax", region), inferer=SlidingWindowInferer((8, 8), overlap=0)
        )
        (explanation,) = explain.explain(image, network)
        assert network.rows == 9 + 4 + 4  # a patch with everything hidden, and three that look at the network
        unchanged = (explanation.scores == explanation.reference_scores).all(dim=1).reshape(6, 6)
        assert int(unchanged.sum()) == 32

    def test_masks_of_several_cases_share_full_batches(self) -> None:
        network, inputs = Network(2), images(3, 1, 20, 20)
        explain = ms.sliding_window(
            4, 4, target=WHOLE, inferer=SlidingWindowInferer((8, 8), sw_batch_size=7, overlap=0.5), mask_batch_size=4
        )
        explanations = explain.explain(inputs, network)
        each = planned(explain.masks, explain.inferer, inputs[0])
        assert [e.num_forwards for e in explanations] == [each.forwards] * 3
        reference, rest = 3 * each.patches, 3 * (each.forwards - each.patches)
        # The network is looked at by three patches alone, and two side by side. In a batch of its own: a patch of each
        # image with everything hidden.
        assert sorted(network.calls) == [1] * 3 + [2] + [7] * (math.ceil(reference / 7) + math.ceil(rest / 7) + 3)

    def test_windows_on_the_patch_grid_touch_the_fewest(self) -> None:
        inferer = SlidingWindowInferer((48, 48, 48), overlap=0.5)
        image = torch.empty(1, 128, 128, 128, device="meta")
        elsewhere = planned(SlidingWindowMasks(24, 24), inferer, image)
        aligned = planned(PatchWindowMasks(inferer, 1), inferer, image)
        assert elsewhere.gain > 7
        assert aligned.gain > 2 * elsewhere.gain
        finer = planned(PatchWindowMasks(inferer, 2), inferer, image)
        assert finer.plain > 6 * aligned.plain
        assert finer.gain > 1.2 * planned(SlidingWindowMasks(12, 12), inferer, image).gain

    @pytest.mark.parametrize("shape", [(20, 13), (5, 20, 13)])
    def test_windows_on_the_patch_grid_tile_the_image(self, shape: tuple[int, ...]) -> None:
        inferer = SlidingWindowInferer((8,) * len(shape), overlap=0.5)
        bound = PatchWindowMasks(inferer, 1).bind(images(1, *shape))
        hidden = 1 - bound.render(range(len(bound)))[:, 0]
        assert bool((hidden.sum(dim=0) == 1).all())
        assert [len(along.unique()) for along in (hidden.flatten(1).nonzero()[:, :1],)] == [len(bound)]
        assert all(set(starts[1:] % 4) <= {0} for starts in bound.starts)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes remembered after each output that was put."""
    seen: list[int] = []
    put = OutputMemory.put

    def watched(memory: Any, slot: int, output: Any) -> None:
        put(memory, slot, output)
        held = [memory.get(each) for each in memory]
        # What is really held: a view would keep the tensor that it is a part of.
        assert sum(o.untyped_storage().nbytes() for o in held) == sum(memory.used.values())
        seen.append(sum(memory.used.values()))

    monkeypatch.setattr(OutputMemory, "put", watched)
    return seen


class Sized:
    """Stands for an output on any device."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def to(self, device: torch.device) -> "Sized":
        return self


class TestBounded:
    @pytest.mark.parametrize("share", [2, 10, 1000])
    def test_a_small_memory_changes_no_bit(self, share: int, used: list[int]) -> None:
        """A half, a tenth and a thousandth of what all outputs would need, on a network that tells batches apart."""
        shape = (28, 32)
        image, labels = images(1, 1, *shape), [blocks(shape, 8, 4)]

        def coalitions(memory: ms.PatchMemory | bool) -> ms.Explanation:
            inferer = SlidingWindowInferer((12, 12), 3, 0.5)
            explain = ms.PerturbationInferer(
                RegionMasks(30), WHOLE, OcclusionScoring(), inferer=inferer, mask_batch_size=8, patch_memory=memory
            )
            return explain.explain(image, Coupled(2), cases=[ms.Case("x", labels=labels[0])])[0]

        expected = coalitions(True)
        everything = expected.num_forwards * 3 * 12**2 * 4
        used.clear()
        explanation = coalitions(ms.PatchMemory(0, everything // share))
        assert torch.equal(explanation.scores, expected.scores)
        assert max(used) <= everything // share
        assert explanation.num_forwards > expected.num_forwards or share == 2

    def test_windows_need_little_more_than_the_unperturbed_outputs(self, used: list[int]) -> None:
        inferer = SlidingWindowInferer((8, 8), 3, 0.5)
        explain = ms.sliding_window(3, 1, target=WHOLE, inferer=inferer)
        (explanation,) = explain.explain(images(1, 1, 44, 28), Network(2))
        size = 3 * 8 * 8 * 4
        assert explanation.num_forwards > 2000
        assert max(used) <= (len(patch_boxes(inferer, (44, 28))[0]) + 3) * size
        assert used[-1] < max(used) / 10  # outputs that no mask needs any more are gone

    def test_only_what_the_target_reads_is_kept(self, used: list[int]) -> None:
        """A sigmoid of one of three channels, in a region of a quarter of each patch."""
        region = torch.zeros(32, 32)
        region[4:8, 4:8] = 1
        explain = ms.sliding_window(
            4, 2, target=ms.RegionScore(1, "sigmoid", region), inferer=SlidingWindowInferer((8, 8), overlap=0)
        )
        explain.explain(images(1, 1, 32, 32), Network(2))
        whole = 16 * 3 * 8 * 8 * 4
        assert used[15] == whole  # the unperturbed pass, before the target knows its region
        assert max(used[16:]) <= 2 * 4 * 4 * 4

    def test_the_device_first_and_then_the_host(self) -> None:
        """Where both are full, the least recently used of the host goes."""
        device, host = torch.device("cuda"), torch.device("cpu")
        memory = OutputMemory(device, ms.PatchMemory(device_bytes=20, host_bytes=30))
        for slot in range(5):
            memory.put(slot, Sized(10))
        assert (list(memory), memory.used) == ([0, 1, 2, 3, 4], {device: 20, host: 30})
        assert memory.get(2) is not None
        memory.put(5, Sized(10))
        assert 3 not in memory
        assert memory.get(3) is None
        memory.pop(0)
        memory.put(6, Sized(10))
        assert (list(memory), memory.used) == ([1, 4, 2, 5, 6], {device: 20, host: 30})
        memory.put(7, Sized(25))
        memory.put(8, Sized(40))
        assert (list(memory), memory.used) == ([1, 6, 7], {device: 20, host: 25})


# How fine windows on the patch grid are where nobody says it: as fine as 50 predictions allow, or 40 in rounds.
def empty(*shape: int) -> torch.Tensor:
    return torch.empty(1, *shape, device="meta")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 60), st.integers(8, 24)), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]),
)
def test_never_more_than_50_predictions(axes: list[tuple[int, int]], overlap: float) -> None:
    """By the patches that each window touches, which are counted one by one."""
    shape, roi = zip(*axes, strict=True)
    inferer = SlidingWindowInferer(roi, overlap=overlap)
    masks = PatchWindowMasks(inferer)
    counts = planned(masks, inferer, empty(*shape))
    assert counts.forwards <= 50 * counts.patches
    assert len(masks.bind(empty(*shape))) > 1


# Windows in rounds: which are scored depends on the scores, here those of a sum over made-up evidence.
def in_rounds(
    inferer: SlidingWindowInferer, evidence: np.ndarray, levels: int = 4
) -> tuple[BoundHierarchicalMasks, list[Id], float]:
    """The windows, those that are asked for, and their price in predictions, patch by patch.

    Args:
        inferer: cuts the patches.
        evidence: ``(1, *spatial)``, what each voxel adds to the score.
        levels: of windows.
    """
    shape = evidence.shape[1:]
    bound = HierarchicalMasks(levels=levels, inferer=inferer).bind(empty(*shape))

    def scores_of(windows: Ids) -> torch.Tensor:
        boxes = bound.changed_boxes(windows) or []
        return torch.tensor([[-float(evidence[(0, *box)].sum())] for box in boxes], dtype=torch.float64)

    ids = [*driven(bound, torch.zeros(1, dtype=torch.float64), scores_of).ids]
    grid = PatchGrid(inferer, shape)
    touches = find_touches(bound, grid, find_trims(grid, None), ids)
    forwards = len(grid.boxes) + int((touches[:, 0] == touches[:, 2]).sum())
    return bound, ids, forwards / len(grid.boxes)


def test_the_spleen_like_ct_in_rounds() -> None:
    """270 x 270 x 225 voxels, patches of 96^3 with half overlap: windows of 48, 24, 12 and 6. Nine tenths of a lump of
    evidence are cut down to 12 voxels, while something is left everywhere, so that all rounds are full.
    """
    evidence = np.full((1, 270, 270, 225), 1e-6, dtype=np.float32)
    evidence[0, 151:170, 65:83, 101:115] = 1
    bound, ids, price = in_rounds(SlidingWindowInferer((96, 96, 96), overlap=0.5), evidence)
    edges = [{int(edge) for axis in level for edge in np.diff(axis)[:-1]} for level in bound.bounds]
    assert edges == [{48}, {24}, {12}, {6}]
    assert len(ids) == bound.at_most
    cells = [box for box in bound.changed_boxes(ids) or [] if all(side.stop - side.start == 12 for side in box)]
    assert sum(float(evidence[(0, *box)].sum()) for box in cells) > 0.9 * 19 * 18 * 14
    assert 15 < price <= 40


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 60), st.integers(8, 24)), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]),
    st.integers(2, 4),
)
def test_never_more_than_40_predictions_in_rounds(axes: list[tuple[int, int]], overlap: float, levels: int) -> None:
    shape, roi = zip(*axes, strict=True)
    assume(len(PatchGrid(SlidingWindowInferer(roi, overlap=overlap), shape).boxes) <= 1000)  # more take long
    evidence = np.random.default_rng(0).random((1, *shape))
    bound, ids, price = in_rounds(SlidingWindowInferer(roi, overlap=overlap), evidence, levels)
    assert price <= 40
    assert len(ids) > len(bound.first_round()) > 1


# Shapley values of sliding-window models: equal to whole images, from the patches that there are, and no more.
# Shape, patch, edge of the cubes, and players with the background.
CASES: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [
    ((24, 20), (12, 12), 5, 10),
    ((14, 12, 10), (8, 8, 8), 5, 8),
]

# Ten players side by side, few of which meet in patches of eight voxels.
STRIPES = (torch.arange(40) // 4)[None, :, None].expand(1, 40, 8)


class Wide(Network):
    """Each voxel's output depends on all voxels of its patch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 4 * x.flatten(1).mean(dim=1).reshape(-1, *[1] * (x.ndim - 1)))


def patches_at_most(labels: torch.Tensor, inferer: SlidingWindowInferer) -> int:
    """The sum over patches of 2^(players in the patch); one of each set is unperturbed."""
    return sum(2 ** len(labels[0][box].unique()) for box in PatchGrid(inferer, labels.shape[1:]).boxes)


def distinct(shape: tuple[int, ...], size: int, players: int) -> torch.Tensor:
    """A label map with so many players, some of them of several cubes."""
    drawn = (blocks(shape, size, 2 * players, seed) for seed in range(500))
    return next(found for found in drawn if len(found.unique()) == players and bool((found == 0).any()))


@pytest.mark.parametrize(("shape", "roi", "size", "players"), CASES)
def test_as_whole_images_from_no_more_patches_than_there_are(shape: Any, roi: Any, size: int, players: int) -> None:
    regions, network = distinct(shape, size, players), Wide(len(shape)).double()
    image, inferer = images(1, 1, *shape, dtype=torch.float64), SlidingWindowInferer(roi, 4, 0.5)
    case = ms.Case("a", labels=regions)
    explain = ms.shapley(target=WHOLE, inferer=inferer)
    network.rows = 0
    (found,) = explain.explain(image, network, cases=[case])
    values = ms.estimators.shapley_values(found)
    assert values.players == regions.unique().tolist()
    assert values.standard_error is None
    most = patches_at_most(regions, inferer)
    assert found.num_forwards <= most
    # Beside them go rows that fill a batch, and looks at rows alone.
    assert network.rows <= most + 20 * inferer.sw_batch_size
    every = explain.replace(masks=ms.masks.CoalitionMasks())
    (enumerated,) = every.explain(image, network, cases=[case])
    assert len(enumerated.scores) == 2 ** len(values.players) - 1 >= len(found.scores)
    assert enumerated.num_forwards <= most
    (whole,) = every.replace(patch_memory=False).explain(image, network, cases=[case])
    assert whole.num_forwards == 2 ** len(values.players)
    for other in (enumerated, whole):
        assert_close(ms.estimators.shapley_values(other).values, values.values)
        assert_close(other.saliency, found.saliency)
    fill = torch.zeros_like(image)
    bound = found.target
    lost = bound(inferer(image, network)) - bound(inferer(fill, network))
    assert_close(values.values.sum(), lost.squeeze())
    assert float(values.values.abs().max()) > 1e-4


def by_cells(
    regions: torch.Tensor, inferer: SlidingWindowInferer, network: Any, image: torch.Tensor, target: Any
) -> dict[int, float]:
    """The definition, once for each cell: the game of what its voxels add to the score, run as whole images."""
    shape = regions.shape[1:]
    boxes = PatchGrid(inferer, shape).boxes
    cells: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for voxel in itertools.product(*map(range, shape)):
        over = tuple(
            number
            for number, box in enumerate(boxes)
            if all(side.start <= at < side.stop for side, at in zip(box, voxel, strict=True))
        )
        cells.setdefault(over, []).append(voxel)
    values = dict.fromkeys(regions.unique().tolist(), 0.0)
    probabilities: dict[frozenset[int], torch.Tensor] = {}
    for over, voxels in cells.items():
        players = sorted(set().union(*(regions[0][boxes[number]].unique().tolist() for number in over)))
        places = tuple(np.array(voxels).T)

        @functools.cache
        def game(kept: frozenset[int], players: Any = players, places: Any = places) -> float:
            hidden = frozenset(players) - kept
            if hidden not in probabilities:
                gone = torch.from_numpy(np.isin(regions.numpy(), list(hidden)))
                output = inferer(torch.where(gone, torch.zeros_like(image), image), network)
                probabilities[hidden] = output.softmax(dim=1)[0, 1] / regions.numel()
            return float(probabilities[hidden][places].sum())

        for player, value in by_coalitions(game, players).items():
            values[player] += value
    return values


def test_more_players_than_can_be_enumerated() -> None:
    regions, network = blocks((16, 20), 6, 60, seed=5), Wide(2).double()
    image, inferer = images(1, 1, 16, 20, dtype=torch.float64), SlidingWindowInferer((8, 8), 8, 0.5)
    assert len(regions.unique()) > 8
    (found,) = ms.shapley(target=WHOLE, inferer=inferer).explain(image, network, cases=[ms.Case("a", labels=regions)])
    with torch.no_grad():
        expected = by_cells(regions, inferer, network, image, found.target)
    assert_close(ms.estimators.shapley_values(found).table(), expected)
    assert found.num_forwards <= patches_at_most(regions, inferer)


@pytest.mark.parametrize(
    ("target", "players"),
    [
        (ms.RegionScore(1, "none", "all"), 2),
        (ms.RegionScore(1, "softmax", "all"), 3),
        (ms.RegionScore(1, "softmax", "label", label_values=[[2, 3, 4]]), 3),
        (ms.RegionScore(1, "softmax", "false_positive", label_values=[[2, 3, 4]]), 3),
        pytest.param(ms.DiceScore(1, "softmax"), 10, marks=pytest.mark.slow),
    ],
    ids=["linear", "softmax", "true positives", "false positives", "dice"],
)
def test_so_many_players_act_together(target: Any, players: int) -> None:
    """Scores that are linear are sums over patches, means of probabilities over voxels, and the Dice score, which
    divides by what all voxels sum to, over nothing; the values are those of whole images and all coalitions.
    """
    inferer, network = SlidingWindowInferer((8, 8), 8, 0.5), Wide(2).double()
    image, case = images(1, 1, 40, 8, dtype=torch.float64), ms.Case("a", labels=STRIPES)
    explain = ms.shapley(target=target, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    assert max(len(meeting.players) for meeting in found.masks.meetings) == players
    assert found.num_forwards <= patches_at_most(STRIPES, inferer)
    every = explain.replace(masks=ms.masks.CoalitionMasks(), patch_memory=False)
    (whole,) = every.explain(image, network, cases=[case])
    assert_close(found.saliency, whole.saliency)
    assert float(found.saliency.abs().max()) > 1e-4


def test_players_follow_the_bound_target() -> None:
    """The automatic target shows only with the output that it is a mean; another target may be put in its place."""
    inferer, network = SlidingWindowInferer((8, 8), 8, 0.5), Wide(2).double()
    image, case = images(1, 1, 40, 8, dtype=torch.float64), ms.Case("a", labels=STRIPES)
    labels = torch.arange(20)[:, None].repeat_interleave(2, 0).expand(1, 40, 8)  # too many for all coalitions
    own = ms.RegionScore("predicted", "softmax")
    for labelled in (case, ms.Case("a", labels=labels)):
        (given,) = ms.shapley(target=own, inferer=inferer).explain(image, network, cases=[labelled])
        explain = ms.shapley(activation="softmax", inferer=inferer)
        for other in (explain, explain.replace(target=own)):
            (found,) = other.explain(image, network, cases=[labelled])
            assert max(len(meeting.players) for meeting in found.masks.meetings) < 15
            assert_close(found.saliency, given.saliency)
        assert found.num_forwards == given.num_forwards
    with pytest.raises(ValueError, match="at most 14 players"):
        explain.replace(target=ms.DiceScore(1, "softmax")).explain(image, network, cases=[labelled])


@pytest.mark.slow
def test_random_coalitions_share_patches() -> None:
    """More coalitions cost no further patches once each set of the players in a patch was met."""
    shape, inferer = (24, 20), SlidingWindowInferer((8, 8), 8, 0.5)
    regions, network = blocks(shape, 5, 60, seed=5), Wide(2).double()
    image, case = images(1, 1, *shape, dtype=torch.float64), ms.Case("a", labels=regions)
    explain = ms.shapley(401, target=WHOLE, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    assert found.num_forwards <= patches_at_most(regions, inferer)
    (whole,) = explain.replace(patch_memory=False).explain(image, network, cases=[case])
    assert_close(found.saliency, whole.saliency)
    exact = ms.estimators.shapley_values(
        ms.shapley(target=WHOLE, inferer=inferer).explain(image, network, cases=[case])[0]
    ).values
    drawn = ms.estimators.shapley_values(found)
    assert bool(((drawn.values - exact).abs() < 5 * drawn.standard_error + 1e-12).all())


@pytest.mark.slow
def test_too_many_players_in_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are estimated from random coalitions of all players, which the explanation reports."""
    shape, players = (24, 20), 12
    regions, network = distinct(shape, 5, players), Wide(2).double()
    image, inferer = images(1, 1, *shape, dtype=torch.float64), SlidingWindowInferer((12, 12), 16, 0.5)
    case = ms.Case("a", labels=regions)
    explain = ms.shapley(target=WHOLE, inferer=inferer)
    (exact,) = explain.explain(image, network, cases=[case])
    monkeypatch.setattr("monai_saliency.masks.coalition._MOST_ON_PATCHES", len(exact.scores) - 1)
    (found,) = explain.explain(image, network, cases=[case])
    values, known = ms.estimators.shapley_values(found), ms.estimators.shapley_values(exact)
    assert "12 players were estimated from 120 random coalitions" in found.stopped
    assert_close(values.values.sum(dim=0), known.values.sum(dim=0))
    assert bool(((values.values - known.values).abs() <= 5 * values.standard_error + 1e-12).all())


def test_channels_and_a_float32_network() -> None:
    shape, inferer = (16, 14), SlidingWindowInferer((8, 8), 4, 0.5)
    regions, network = blocks(shape, 6, 4, seed=2), Wide(2, channels=2)
    image, case = images(1, 2, *shape), ms.Case("a", labels=regions)
    explain = ms.shapley(per_channel=True, background=False, target=WHOLE, inferer=inferer)
    (found,) = explain.explain(image, network, cases=[case])
    (whole,) = explain.replace(
        masks=ms.masks.CoalitionMasks(background=False, per_channel=True), patch_memory=False
    ).explain(image, network, cases=[case])
    assert found.saliency.shape == (2, *shape)
    assert_close(found.saliency, whole.saliency)
    assert float(found.saliency.abs().max()) > 1e-3
    assert bool((found.saliency[:, regions[0] == 0] == 0).all())
