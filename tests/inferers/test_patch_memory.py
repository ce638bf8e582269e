from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.patches import WHOLE, Coupled, Network, blocks, images, patch_boxes
from monai.inferers import SlidingWindowInferer

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.patch_memory import OutputMemory, PatchMemory
from monai_saliency.masks.region import RegionMasks
from monai_saliency.methods import sliding_window
from monai_saliency.targets import RegionScore


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
