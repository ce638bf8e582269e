"""Parts of a case's masks, wherever they are scored, make the case's own map."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import Inferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.inferers.sharing import merged
from monai_saliency.sharding import Part

MASKS, BATCH = 37, 4
BATCHES = -(-(MASKS + 1) // BATCH)


class Network(torch.nn.Module):
    """A segmentation of two channels, which notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Conv2d(1, 2, 3, padding=1)
        with torch.no_grad():
            self.body.bias.zero_()
            self.body.weight.copy_(torch.linspace(-1, 1, self.body.weight.numel()).reshape(self.body.weight.shape))
        self.batches: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:  # else it is an image alone, which the unperturbed row is compared with
            self.batches.append(x.clone())
        return self.body(x).tanh()


def mean_of_channels(output: torch.Tensor) -> torch.Tensor:
    return output.mean(dim=(2, 3))


def inferer(inner: Inferer | None = None) -> ms.PerturbationInferer:
    target = ms.FunctionScore(mean_of_channels)
    if inner is None:
        return ms.rise(MASKS, 3, target=target, mask_batch_size=BATCH)
    return ms.sliding_window(4, 3, target=target, mask_batch_size=BATCH, inferer=inner)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.rand(1, 1, 14, 17, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("count", [1, 2, 3, BATCHES + 5])
@pytest.mark.parametrize("inner", [None, SlidingWindowInferer((8, 8), 3, overlap=0.5)], ids=["plain", "patches"])
def test_parts_merge_to_the_map_of_the_whole(image: torch.Tensor, count: int, inner: Inferer | None) -> None:
    """To the bit, in any order, also with more parts than batches."""
    (whole,) = inferer(inner).explain(image, Network())
    parts = [inferer(inner).score(image, Network(), part=Part(k, count)) for k in reversed(range(count))]
    assert all(run.complete for (run,) in parts) == (count == 1)
    (explanation,) = merged(parts)
    assert torch.equal(explanation.scores, whole.scores)
    assert torch.equal(explanation.saliency, whole.saliency)
    assert whole.noise is not None
    assert torch.equal(explanation.noise, whole.noise)
    assert bool((whole.noise > 0).all())


def test_a_part_runs_its_own_batches_and_the_first(image: torch.Tensor) -> None:
    whole = Network()
    inferer().explain(image, whole)
    assert len(whole.batches) == BATCHES
    others = []
    for k in range(3):
        network = Network()
        inferer().score(image, network, part=Part(k, 3))
        assert torch.equal(network.batches[0], whole.batches[0])
        others += network.batches[1:]
    # Rows of the last one past its end hold what the batch before left there, and are not read.
    last = (MASKS + 1) - (BATCHES - 1) * BATCH
    others[-1], expected = others[-1][:last], [*whole.batches[1:-1], whole.batches[-1][:last]]
    assert all(torch.equal(a, b) for a, b in zip(others, expected, strict=True))


def test_parts_that_do_not_belong_together(image: torch.Tensor) -> None:
    one, other = (inferer().score(image, Network(), part=Part(k, 2)) for k in range(2))
    with pytest.raises(CaseError, match="another part is still to be done"):
        merged([one])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        merged([one, []])
    with pytest.raises(ValueError, match="its parts differ in masks"):
        merged([other, ms.rise(MASKS, 4, target=ms.FunctionScore(mean_of_channels)).score(image, Network())])


def classifier(weight: float, size: int) -> torch.nn.Module:
    linear = torch.nn.Linear(size, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight * torch.linspace(-0.1, 0.1, 2 * size).reshape(2, size))
    return torch.nn.Sequential(torch.nn.Flatten(), linear, torch.nn.Softmax(1))


#: what makes another part's scores the scores of something else
OTHER_PARTS: dict[str, tuple[dict[str, Any], int]] = {
    "masks": ({"seed": 1}, 0),
    "estimator": ({"p1": 0.3}, 0),
    "fill": ({"fill": ms.ConstantFill(1.0)}, 0),
    "target": ({"target": ms.ClassScore([1], "none")}, 0),
    "network": ({}, 1),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_parts_of_other_settings_are_refused(image: torch.Tensor, name: str) -> None:
    """Also after they were sent to another process."""

    def part(index: int, changes: dict[str, Any], number: int) -> Any:
        network = classifier(1.0 + number, image[0].numel())
        settings = {"target": ms.ClassScore([0], "none"), "mask_batch_size": 5} | changes
        return ms.rise(MASKS, 3, **settings).score(image, network, part=Part(index, 2))

    changes, number = OTHER_PARTS[name]
    same, other = part(1, {}, 0), part(1, changes, number)
    assert len(merged(pickle.loads(pickle.dumps([part(0, {}, 0), same])))) == 1
    for each in ([part(0, {}, 0), other], pickle.loads(pickle.dumps([part(0, {}, 0), other]))):
        with pytest.raises(ValueError, match=f"parts differ in .*{name}"):
            merged(each)


def moments(x: torch.Tensor) -> torch.Tensor:
    """The same for an image that is turned over, shifted or shuffled."""
    return torch.stack([x.mean((1, 2, 3)), (x**2).mean((1, 2, 3))], 1)


@pytest.mark.parametrize("name", ["the image", "met case b", "further inputs"])
def test_parts_of_another_thing_with_equal_scores_are_refused(name: str, image: torch.Tensor) -> None:
    """The unperturbed image scores the same."""

    def part(index: int, changed: str) -> Any:
        given = image.flip(-1) if changed == "the image" else image
        case = Case("b" if changed == "met case b" else "a")
        further = torch.full((1,), float(changed == "further inputs"))
        how = ms.rise(MASKS, 3, target=ms.ClassScore([0], "none"), mask_batch_size=5)
        return how.score(given + 1, lambda x, further: moments(x), further, cases=[case], part=Part(index, 2))

    merged([part(0, ""), part(1, "")])
    with pytest.raises(ValueError, match=f"differ in {name}|{name}$"):
        merged([part(0, ""), part(1, name)])


def test_functions_and_networks_that_count_their_calls_merge(image: torch.Tensor) -> None:
    """They are recognised by the score of the unperturbed image."""
    counting = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(image[0].numel(), 2))
    counting.register_forward_hook(lambda *_: setattr(counting, "calls", getattr(counting, "calls", 0) + 1))
    how = ms.rise(MASKS, 3, target=ms.ClassScore([0], "none"), mask_batch_size=5)
    for network in (counting, lambda x: moments(x)):
        assert len(merged([how.score(image, network, part=Part(index, 2)) for index in range(2)])) == 1


@pytest.mark.parametrize(("dtype", "half"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 0.0)])
@pytest.mark.parametrize("to", [None, torch.float32])
def test_the_noise_of_a_network_in_half_precision(dtype: torch.dtype, half: float, to: torch.dtype | None) -> None:
    """A map of windows is no more precise than the network, and the truth lies within a few times its noise."""
    network = Halved(dtype, to)
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    (found,) = ms.sliding_window(4, 2, target=ms.ClassScore([0], "softmax")).explain(image, network)
    expected = max(half, 8 * torch.finfo(torch.float32).eps) * float(found.scores.max())
    assert found.noise is not None
    assert float(found.noise) == pytest.approx(expected)
    network.to_dtype = None
    exact = ms.sliding_window(4, 2, target=ms.ClassScore([0], "softmax"))(image.double(), network.double())
    assert float((found.saliency - exact[0]).abs().max()) < 5 * expected


class Halved(torch.nn.Module):
    """Computes in a type of its own, and gives its output in it or in another one."""

    def __init__(self, dtype: torch.dtype, to: torch.dtype | None) -> None:
        super().__init__()
        self.to_dtype = to
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        ).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.layers[0].weight.dtype
        return self.layers(x.to(dtype)).to(self.to_dtype or dtype)


class Cleans(torch.nn.Module):
    """A network that takes any scan."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nan_to_num(nan=-3.0, posinf=9.0, neginf=-9.0).flatten(1).cumsum(1)[:, ::7]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["windows", "rise"])
def test_a_hidden_voxel_that_is_not_finite_is_the_fill(method: str, broken: float, image: torch.Tensor) -> None:
    """0 * NaN is NaN, so that hiding it would leave it there."""
    image[0, 0, 3, 4] = broken
    given = {"target": ms.RegressionScore("all"), "fill": ms.ConstantFill(2.0)}
    explain = ms.sliding_window(4, 3, **given) if method == "windows" else ms.rise(12, 3, **given)
    (found,) = explain.explain(image, Cleans())
    masks = torch.cat([explain.masks.bind(image[0]).render([i]) for i in range(len(found.scores))])
    kept = torch.where(masks == 0, torch.zeros(()), masks * image)
    if not np.isnan(broken):
        expected = Cleans()(kept + (1 - masks) * 2.0)
        torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-4)
    hidden = (masks[:, 0, 3, 4] == 0).nonzero().flatten()
    assert len(hidden)
    expected = Cleans()((kept + (1 - masks) * 2.0)[hidden])
    torch.testing.assert_close(found.scores[hidden], expected, rtol=1e-4, atol=1e-4)
