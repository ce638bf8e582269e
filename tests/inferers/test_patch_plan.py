from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.patches import WHOLE, Network, blocks, images, patch_boxes, planned
from monai.inferers import SlidingWindowInferer

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.sliding_window import PatchWindowMasks, SlidingWindowMasks
from monai_saliency.methods import sliding_window
from monai_saliency.targets import RegionScore


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
