"""A compiled network is compiled once for each shape of batch, and never again while it is explained."""

from __future__ import annotations

import pytest
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.networks import accelerated
from monai_saliency.utils.monai_private import holds_compiled

IMAGE = torch.rand(1, 1, 12, 10)


def compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, list[tuple[int, ...]]]:
    """A module compiled for each shape alone, and the shapes for which it was compiled so far."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        shapes.append(tuple(next(each.shape for each in inputs if each.ndim == IMAGE.ndim and each.shape[1] == 1)))
        return graph

    torch._dynamo.reset()
    quick = accelerated(module.eval(), compile={"backend": backend})
    assert holds_compiled(quick)
    return quick, shapes


def network(last: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    # The weights have a first axis that no image has, so that inputs are told apart.
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1, bias=False), torch.nn.ReLU(), last)


@pytest.mark.parametrize("method", ["rise", "windows"])
@pytest.mark.parametrize("images", [1, 2])
def test_whole_images(method: str, images: int) -> None:
    inner = network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2 * 120, 3)))
    quick, shapes = compiled(inner)
    settings = {"target": ms.ClassScore([1], "softmax"), "mask_batch_size": 4}
    # Neither number of masks fills the last batch.
    explain = ms.rise(17, 3, **settings) if method == "rise" else ms.sliding_window(4, 3, **settings)
    batch = torch.cat([IMAGE, IMAGE.flip(2)])[:images]
    maps = explain(batch, quick)
    assert len(shapes) == 1
    explain(batch, quick)
    assert len(shapes) == 1
    torch.testing.assert_close(maps, explain(batch, inner), rtol=1e-5, atol=1e-6)


def test_patches() -> None:
    inner = network(torch.nn.Conv2d(2, 2, 1))
    quick, shapes = compiled(inner)
    inferer = SlidingWindowInferer(6, 4, overlap=0.5)
    explain = ms.sliding_window(4, 3, target=ms.RegionScore([0, 1], "softmax", region="all"), inferer=inferer)
    maps = explain(IMAGE, quick)
    assert len(shapes) == 1
    torch.testing.assert_close(maps, explain(IMAGE, inner), rtol=1e-5, atol=1e-6)
