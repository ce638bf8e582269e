from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.patches import WHOLE, Coupled, Network, blocks, images, patch_boxes, planned
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from monai.inferers import SlidingWindowInferer

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.patch_case import find_touches, find_trims
from monai_saliency.inferers.patch_memory import OutputMemory, PatchMemory
from monai_saliency.masks.base import Id, Masks
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks, HierarchicalMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.sliding_window import PatchWindowMasks, SlidingWindowMasks
from monai_saliency.methods import sliding_window
from monai_saliency.targets import RegionScore
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
        "masks", [SlidingWindowMasks(4, 3), SlidingWindowMasks(2, 5), RegionMasks(40), RegionMasks()]
    )
    def test_patch_forwards_are_the_closed_form(
        self, shape: tuple[int, ...], overlap: float, reach: str, masks: Masks
    ) -> None:
        inferer = SlidingWindowInferer((6,) * len(shape), overlap=overlap)
        region = torch.zeros(shape)
        region[tuple(slice(3) if reach == "corner" else slice(None) for _ in shape)] = 1
        network, image, labels = Network(len(shape)), images(1, 1, *shape), blocks(shape, 4, 9)
        explain = PerturbationInferer(masks, RegionScore(1, "softmax", region), OcclusionScoring(), inferer=inferer)
        (explanation,) = explain.explain(image, network, cases=[Case("x", labels=labels)])
        expected = closed_form(masks.bind(image[0], labels=labels), inferer, region)
        # In batches of one, an unperturbed patch is looked at again at the end, and one patch has everything hidden.
        assert network.rows - 2 == explanation.num_forwards == expected

    def test_a_clinical_ct(self) -> None:
        """512 x 512 x 300, 96^3 patches, overlap 0.25, windows and strides of 32: at least 45 times fewer."""
        explain = sliding_window(32, 32, target=WHOLE, inferer=SlidingWindowInferer((96, 96, 96)))
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
        explain = sliding_window(
            4, 4, target=RegionScore(1, "softmax", region), inferer=SlidingWindowInferer((8, 8), overlap=0)
        )
        (explanation,) = explain.explain(image, network)
        assert network.rows == 9 + 4 + 2  # a patch with everything hidden, and an unperturbed one again at the end
        unchanged = (explanation.scores == explanation.reference_scores).all(dim=1).reshape(6, 6)
        assert int(unchanged.sum()) == 32

    def test_masks_of_several_cases_share_full_batches(self) -> None:
        network, inputs = Network(2), images(3, 1, 20, 20)
        explain = sliding_window(
            4, 4, target=WHOLE, inferer=SlidingWindowInferer((8, 8), sw_batch_size=7, overlap=0.5), mask_batch_size=4
        )
        explanations = explain.explain(inputs, network)
        each = planned(explain.masks, explain.inferer, inputs[0])
        assert [e.num_forwards for e in explanations] == [each.forwards] * 3
        reference, rest = 3 * each.patches, 3 * (each.forwards - each.patches)
        # Alone: of each image an unperturbed and a perturbed patch, and an unperturbed one at the end.
        # In a batch of its own: a patch of each image with everything hidden.
        assert sorted(network.calls) == [1] * 7 + [7] * (math.ceil(reference / 7) + math.ceil(rest / 7) + 3)

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


# test_patch_memory. ---------------------------------------------------------------------------------------------------


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

    def to(self, device: torch.device) -> Sized:
        return self


class TestBounded:
    @pytest.mark.parametrize("share", [2, 10, 1000])
    def test_a_small_memory_changes_no_bit(self, share: int, used: list[int]) -> None:
        """A half, a tenth and a thousandth of what all outputs would need, on a network that tells batches apart."""
        shape = (40, 32)
        image, labels = images(1, 1, *shape), [blocks(shape, 8, 4)]

        def coalitions(memory: PatchMemory | bool) -> Explanation:
            inferer = SlidingWindowInferer((12, 12), 3, 0.5)
            explain = PerturbationInferer(
                RegionMasks(60), WHOLE, OcclusionScoring(), inferer=inferer, mask_batch_size=8, patch_memory=memory
            )
            return explain.explain(image, Coupled(2), cases=[Case("x", labels=labels[0])])[0]

        expected = coalitions(True)
        everything = expected.num_forwards * 3 * 12**2 * 4
        used.clear()
        explanation = coalitions(PatchMemory(0, everything // share))
        assert torch.equal(explanation.scores, expected.scores)
        assert max(used) <= everything // share
        assert explanation.num_forwards > expected.num_forwards or share == 2

    def test_windows_need_little_more_than_the_unperturbed_outputs(self, used: list[int]) -> None:
        inferer = SlidingWindowInferer((8, 8), 3, 0.5)
        explain = sliding_window(3, 1, target=WHOLE, inferer=inferer)
        (explanation,) = explain.explain(images(1, 1, 44, 28), Network(2))
        size = 3 * 8 * 8 * 4
        assert explanation.num_forwards > 2000
        assert max(used) <= (len(patch_boxes(inferer, (44, 28))[0]) + 3) * size
        assert used[-1] < max(used) / 10  # outputs that no mask needs any more are gone

    def test_only_what_the_target_reads_is_kept(self, used: list[int]) -> None:
        """A sigmoid of one of three channels, in a region of a quarter of each patch."""
        region = torch.zeros(32, 32)
        region[4:8, 4:8] = 1
        explain = sliding_window(
            4,
            2,
            target=RegionScore(1, "sigmoid", region),
            inferer=SlidingWindowInferer((8, 8), overlap=0),
        )
        explain.explain(images(1, 1, 32, 32), Network(2))
        whole = 16 * 3 * 8 * 8 * 4
        assert used[15] == whole  # the unperturbed pass, before the target knows its region
        assert max(used[16:]) <= 2 * 4 * 4 * 4

    def test_the_device_first_and_then_the_host(self) -> None:
        """Where both are full, the least recently used of the host goes."""
        device, host = torch.device("cuda"), torch.device("cpu")
        memory = OutputMemory(device, PatchMemory(device_bytes=20, host_bytes=30))
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


# How fine windows on the patch grid are where nobody says it: as fine as 50 predictions allow, or 40 in rounds. -------


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


# Windows in rounds: which are scored depends on the scores, here those of a sum over made-up evidence. ----------------


def in_rounds(
    inferer: SlidingWindowInferer, evidence: np.ndarray, levels: int = 4
) -> tuple[BoundHierarchicalMasks, list[int], float]:
    """The windows, those that are asked for, and their price in predictions, patch by patch.

    Args:
        inferer: cuts the patches.
        evidence: ``(1, *spatial)``, what each voxel adds to the score.
        levels: of windows.
    """
    shape = evidence.shape[1:]
    bound = HierarchicalMasks(levels=levels, inferer=inferer).bind(empty(*shape))
    ids: list[int] = []
    scores = np.zeros((0, 1))
    found: Sequence[Id] | None = bound.first_round()
    while found is not None:
        boxes = bound.changed_boxes(list(found)) or []
        scores = np.concatenate([scores, [[-evidence[(0, *box)].sum()] for box in boxes]])
        ids += found
        found = bound.next_round(ids, torch.from_numpy(scores), torch.zeros(1))
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
