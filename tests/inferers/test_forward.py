"""A batch that does not fit into memory is halved, and the map stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.inferers import SimpleInferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.inferers.forward import Forward
from monai_saliency.networks import accelerated
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.utils.monai_private import holds_compiled

IMAGE = torch.rand(1, 1, 12, 10, 8)


class Small(torch.nn.Module):
    """A network on a device whose memory shrinks: from a call on, no more than some images fit.

    Args:
        at: the number of the call.
        fits: how many images fit from there on.
        form: what is made of the output.
    """

    def __init__(self, at: int, fits: int, form: Callable[[torch.Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGE.numel(), 3))
        self.at, self.fits, self.form = at, fits, form
        self.sizes: list[int] = []
        self.failed = 0

    def forward(self, batch: torch.Tensor) -> Any:
        self.sizes.append(len(batch))
        if len(self.sizes) > self.at and len(batch) > self.fits:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.form(self.inner(batch))


def explain(network: torch.nn.Module, **settings: Any) -> torch.Tensor:
    target = ms.ClassScore("all", "softmax")
    return ms.rise(40, 3, target=target, mask_batch_size=7, **settings)(IMAGE, network)


@pytest.mark.parametrize("fits", [1, 2, 3, 5])
@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_the_map_is_the_same_whenever_memory_runs_out(at: int, fits: int) -> None:
    network = Small(at, fits)
    torch.testing.assert_close(explain(network), explain(Small(0, 99)), rtol=1e-5, atol=1e-6)
    assert network.failed
    after = network.sizes[max(i for i, size in enumerate(network.sizes) if size > fits) + 1 :]
    # It goes on with what fits, in batches of one shape, but for images that are looked at alone.
    assert len({*after} - {1}) <= 1
    failed = network.failed
    torch.testing.assert_close(explain(network), explain(Small(0, 99)), rtol=1e-5, atol=1e-6)
    assert network.failed == failed  # what fits is known by now


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (lambda output: {"pred": output, "names": None}, "pred"),
        (lambda output: (output, [output * 2]), 0),
        (lambda output: [{"scores": row} for row in output], lambda found: torch.stack([e["scores"] for e in found])),
    ],
)
def test_structured_outputs_are_joined(form: Callable[[torch.Tensor], Any], output: Any) -> None:
    maps = [explain(Small(4, fits, form), output=output) for fits in (99, 2)]
    torch.testing.assert_close(*maps, rtol=1e-5, atol=1e-6)


def test_patches_are_halved_too() -> None:
    class Segmenter(Small):
        def __init__(self, fits: int) -> None:
            super().__init__(5, fits)
            self.inner = torch.nn.Conv3d(1, 2, 3, padding=1)

    def of(network: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        inferer = SlidingWindowInferer(6, 5, overlap=0.5)
        target = ms.RegionScore([0, 1], "softmax", region="all")
        return ms.sliding_window(4, 4, target=target, inferer=inferer)(IMAGE, network)

    networks = Segmenter(99), Segmenter(2)
    networks[1].load_state_dict(networks[0].state_dict())
    torch.testing.assert_close(of(networks[0]), of(networks[1]), rtol=1e-5, atol=1e-6)
    assert networks[1].failed == 2  # five patches, three, then two


def test_stored_scores_are_resumed_at_another_size(tmp_path: Path) -> None:
    network = Small(0, 99)
    inferer = ms.rise(40, 3, target=ms.ClassScore("all", "softmax"), mask_batch_size=7)
    stored = [ScoreStore(tmp_path).open("a", "key")]

    def cut_off(batch: torch.Tensor) -> torch.Tensor:
        if len(network.sizes) == 6:
            raise KeyboardInterrupt
        return network(batch)

    with pytest.raises(KeyboardInterrupt):
        inferer.explain(IMAGE, cut_off, stored=stored)
    small = Small(0, 3)
    found = inferer.explain(IMAGE, small, stored=[ScoreStore(tmp_path).open("a", "key")])
    torch.testing.assert_close(found[0].saliency[None], explain(Small(0, 99)), rtol=1e-5, atol=1e-6)
    fresh = Small(0, 3)
    explain(fresh)
    assert sum(small.sizes) < sum(fresh.sizes) - 7  # batches of masks were there


def test_an_image_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        explain(Small(0, 0))


def run(network: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return Forward(SimpleInferer(), TensorInput(), network).patches(batch)


def test_a_batch_that_was_changed_in_place_is_not_run_again() -> None:
    def network(part: torch.Tensor) -> torch.Tensor:
        part.add_(1)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run(network, torch.rand(4, 2))


def test_other_errors_are_raised_at_once() -> None:
    calls = []

    def network(part: torch.Tensor) -> torch.Tensor:
        calls.append(len(part))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        run(network, torch.rand(4, 2))
    assert calls == [4]


@pytest.mark.parametrize("words", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_rows_stay_in_their_order(words: str) -> None:
    seen = []

    def network(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        if len(part) > 3:
            raise RuntimeError(words)
        return part * 10

    batch = torch.arange(10.0)[:, None]
    torch.testing.assert_close(run(network, batch), batch * 10)
    assert seen == [10, 5, 3, 3, 3, 3]


def test_held_inputs_stay_with_their_images() -> None:
    class Scaled(Small):
        def forward(self, given: dict[str, torch.Tensor]) -> Any:
            return super().forward(given["image"]) * given["age"]

    given = {"image": torch.cat([IMAGE, IMAGE.flip(2)]), "age": torch.tensor([[1.0], [3.0]])}
    target = ms.ClassScore("all", "none")
    maps = [
        ms.rise(40, 3, target=target, mask_batch_size=7, inputs=ms.DictInput("image"))(given, Scaled(2, fits))
        for fits in (99, 3)
    ]
    torch.testing.assert_close(*maps, rtol=1e-5, atol=1e-6)


# A compiled network is compiled once for each shape of batch, and never again while it is explained. ------------------


COMPILED_ON = torch.rand(1, 1, 12, 10)


def compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, list[tuple[int, ...]]]:
    """A module compiled for each shape alone, and the shapes for which it was compiled so far."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        shapes.append(
            tuple(next(each.shape for each in inputs if each.ndim == COMPILED_ON.ndim and each.shape[1] == 1))
        )
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
    batch = torch.cat([COMPILED_ON, COMPILED_ON.flip(2)])[:images]
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
    maps = explain(COMPILED_ON, quick)
    assert len(shapes) == 1
    torch.testing.assert_close(maps, explain(COMPILED_ON, inner), rtol=1e-5, atol=1e-6)
