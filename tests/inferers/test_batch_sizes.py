"""The batch size that is found by itself: one that pays and fits, of the same map, with no forward in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.inferers import batches
from monai_saliency.inferers.batches import batch_size, cut, first_size
from monai_saliency.inferers.case_explainer import CaseExplainer
from monai_saliency.storage.score_store import ScoreStore

IMAGE = torch.rand(1, 1, 12, 10, generator=torch.Generator().manual_seed(0))
TARGET = ms.ClassScore("all", "softmax")


class Clocked(torch.nn.Module):
    """A network whose batches take as long as is said, by a clock of its own.

    Args:
        seconds: of a batch, by its size.
        fits: the most images that the memory takes.
    """

    def __init__(self, seconds: Callable[[int], float], fits: int = 10**6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGE.numel(), 3))
        self.seconds, self.fits = seconds, fits
        self.now = 0.0
        self.sizes: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(len(images))
        self.now += self.seconds(len(images))
        return self.inner(images)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clocked]:
    def make(*args: Any) -> Clocked:
        network = Clocked(*args)
        monkeypatch.setattr(batches.time, "perf_counter", lambda: network.now)
        return network

    return make


def explain(network: torch.nn.Module, size: Any = "auto", masks: int = 2000, **settings: Any) -> torch.Tensor:
    return ms.rise(masks, 3, target=TARGET, mask_batch_size=size, **settings)(IMAGE, network)


def costly_start(size: int) -> float:
    return 1.0 + 0.1 * size


SECONDS = {
    # From 64 to 128 images 0.5 / 64 of 0.1 second are gained an image, which is more than 3 %, then less.
    "a cost a call": (lambda n: 0.5 + 0.1 * n, 128),
    "nothing gained": (lambda n: 0.1 * n, 16),
    "smaller is faster": (lambda n: 0.1 * n * (1 + 0.2 * max(0, n - 4)), 4),
    "alone is fastest": (lambda n: 0.1 * n * n, 1),
    "a cache that is full from 33 on": (lambda n: 1.0 + 0.1 * n + (10 * n if n > 32 else 0), 32),
}


@pytest.mark.parametrize("name", SECONDS)
def test_the_size_that_pays(name: str, clocked: Callable[..., Clocked]) -> None:
    seconds, expected = SECONDS[name]
    network = clocked(seconds)
    found = explain(network)
    # The last batches are as many as this size needs, all alike.
    assert expected * 0.8 <= network.sizes[-20 if expected < 16 else -2] <= expected
    torch.testing.assert_close(found, explain(clocked(seconds), 16), rtol=1e-4, atol=1e-6)
    network.sizes.clear()
    explain(network)
    # The first batch is that of every run, and beside it stand its checks. Then follows what was found.
    assert network.sizes[:6] == [1, 16, 1, 16, 16, 1]
    assert all(expected * 0.8 <= size <= expected for size in network.sizes[6:-1])


def test_no_forward_is_in_vain(clocked: Callable[..., Clocked]) -> None:
    """Sizes are compared by batches whose scores count."""
    auto = clocked(costly_start)
    explain(auto)
    fixed = clocked(costly_start)
    explain(fixed, 16)
    # Batches are padded at their end alone, and checked by a few images.
    assert sum(auto.sizes) <= sum(fixed.sizes) + 32
    assert len(auto.sizes) < len(fixed.sizes) / 3


@pytest.mark.parametrize("fits", [1, 3, 16, 40])
def test_what_does_not_fit_is_not_tried_again(fits: int, clocked: Callable[..., Clocked]) -> None:
    network = clocked(costly_start, fits)
    found = explain(network)
    assert max(network.sizes) <= fits
    torch.testing.assert_close(found, explain(clocked(costly_start), 16), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masks", [1, 5, 16, 17, 40, 130, 300])
def test_few_masks(masks: int, clocked: Callable[..., Clocked]) -> None:
    network = clocked(costly_start)
    found = explain(network, masks=masks)
    torch.testing.assert_close(found, explain(clocked(costly_start), 16, masks), rtol=1e-4, atol=1e-6)


def test_masks_in_rounds_and_several_images(clocked: Callable[..., Clocked]) -> None:
    images = torch.cat([IMAGE, IMAGE.flip(2), 2 * IMAGE])
    for make in (
        lambda size: ms.hierarchical_occlusion(8, 2, target=TARGET, mask_batch_size=size),
        lambda size: ms.rise(150, 3, target=TARGET, mask_batch_size=size),
    ):
        found, expected = (make(size)(images, clocked(costly_start)) for size in ("auto", 16))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_stopped_run_goes_on_with_what_is_stored(tmp_path: Path, clocked: Callable[..., Clocked]) -> None:
    """Whatever size was found before, and is found now."""
    stopped = clocked(costly_start)

    def stop(images: torch.Tensor) -> float:
        if sum(stopped.sizes) > 1000:
            raise KeyboardInterrupt
        return costly_start(len(stopped.sizes))

    def run(network: torch.nn.Module, size: Any = "auto") -> torch.Tensor:
        method = ms.rise(2000, 3, target=TARGET, mask_batch_size=size)
        explainer = CaseExplainer(method, network, ScoreStore(tmp_path), network_id="one")
        maps = []
        explainer.explain(IMAGE, [Case("a")], lambda explained: maps.append(explained.explanation.saliency))
        return maps[0]

    stopped.seconds = stop  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        run(stopped)
    kept = sum(len(np.load(file)) for file in tmp_path.rglob("*-*.npy"))
    assert kept > 400
    for seconds in (lambda n: 0.1 * n * n, costly_start):
        again = clocked(seconds)
        found = run(again)
        assert sum(again.sizes) <= 2000 - kept + 100  # checks, and batches of which a part is kept
        kept = 2000
        torch.testing.assert_close(found[None], explain(clocked(costly_start), 16), rtol=1e-4, atol=1e-6)


def test_a_compiled_network_stays_at_one_size() -> None:
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        shapes.append(1)
        return graph

    torch._dynamo.reset()
    inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGE.numel(), 3)).eval()
    explain(ms.networks.accelerated(inner, compile={"backend": backend}))
    assert len(shapes) == 1
    torch._dynamo.reset()


def test_ranks_cut_the_same_batches(clocked: Callable[..., Clocked]) -> None:
    """Parts are cut at fixed masks, since another rank cannot know what was found here."""
    from monai_saliency.sharding import Part

    network = clocked(costly_start)
    method = ms.rise(2000, 3, target=TARGET, mask_batch_size="auto")
    first, second = (method.score(IMAGE, network, part=Part(i, 2))[0] for i in range(2))
    first.merge(second)
    assert set(network.sizes) <= {1, 16}
    torch.testing.assert_close(first.explanation().saliency[None], explain(network, 16), rtol=1e-4, atol=1e-6)


def test_the_setting() -> None:
    assert batch_size("auto") == 16
    assert ms.rise(5, target=TARGET, mask_batch_size="auto").replace(progress=False).mask_batch_size == 16
    assert first_size(batch_size("auto"), torch.zeros(1, 2**13, 2**12)) == 1
    assert first_size(7, torch.zeros(1, 2**13, 2**12)) == 7
    for wrong in ("automatic", "16"):
        with pytest.raises(ValueError, match="`mask_batch_size` must be a whole number"):
            ms.rise(5, target=TARGET, mask_batch_size=wrong)


def test_cut_asks_for_a_size_before_each_batch() -> None:
    sizes = iter([2, 3, 4])
    assert list(cut([(0, 4), (1, 4)], lambda: next(sizes))) == [[(0, 0, 2)], [(0, 2, 4), (1, 1, 2)], [(1, 2, 4)]]
