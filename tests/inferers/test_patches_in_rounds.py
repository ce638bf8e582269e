"""Masks in rounds under a sliding-window inferer, for targets that read a part of the image alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms

METHODS: dict[str, Callable[..., ms.PerturbationInferer]] = {
    "hierarchical": lambda **settings: ms.hierarchical_occlusion(levels=3, **settings),
    "focused": lambda **settings: ms.focused_rise(30, **settings),
    "minimal": lambda **settings: ms.minimal_region(0.5, levels=2, **settings),
    "until": lambda **settings: ms.region_occlusion(8, regions=ms.Supervoxels(12), until=0.9, budget=30, **settings),
}


class Local(torch.nn.Module):
    """The second channel stands out where the image is bright."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = torch.nn.functional.avg_pool2d(x, 3, 1, 1)
        return torch.cat([0.5 - bright, bright - 0.5], 1) * 4


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_patches_that_the_target_does_not_read(method: str, images: int) -> None:
    """They are not run, and every round gives what whole images give."""
    image = 0.1 * torch.rand(images, 1, 64, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    image[..., 20:30, 34:44] += 1
    inferer = SlidingWindowInferer((16, 16), 4, 0.5)
    target = ms.RegionScore(1, "softmax", region="predicted")
    found: list[Any] = [
        METHODS[method](target=target, inferer=inferer, patch_memory=memory).explain(image, Local())
        for memory in (True, False)
    ]
    for remembered, whole in zip(*found, strict=True):
        assert remembered.num_forwards / remembered.per_prediction < 0.5 * whole.num_forwards
        if method == "minimal":  # windows that take next to nothing are ordered by rounding
            for each in (remembered, whole):
                (region,) = each.masks.found(each.ids, each.scores, each.reference_scores)
                assert region.kept_share >= 0.5
            continue
        assert list(remembered.ids) == list(whole.ids)
        torch.testing.assert_close(remembered.saliency, whole.saliency, rtol=1e-8, atol=1e-9)


def test_the_price_of_a_later_round(caplog: pytest.LogCaptureFixture) -> None:
    """Counted with what earlier rounds have run."""
    explain = ms.hierarchical_occlusion(
        levels=3, target=ms.RegionScore(1, "softmax", "all"), inferer=SlidingWindowInferer((16, 16), 4, 0.5)
    )
    image = torch.zeros(1, 1, 64, 72)
    image[..., 20:30, 34:44] += 1
    with caplog.at_level(logging.DEBUG):
        (found,) = explain.explain(image, Local())
    said = [each for line in caplog.messages for each in re.findall(r"at least (\d+) .* (\d+) of them done", line)]
    totals, done = zip(*said, strict=True)
    assert done == (str(found.per_prediction), *totals[:-1])
    assert totals[-1] == str(found.num_forwards)
