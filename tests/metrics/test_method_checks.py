"""Repeatability, agreement between fills, randomised parameters, and controls."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import assert_close, assert_same_bits
from scipy import ndimage
from scipy.stats import spearmanr
from torch import nn

import monai_saliency as ms
from monai_saliency import metrics
from monai_saliency.metrics.control_maps import CONTROLS
from monai_saliency.metrics.method_checks import randomised

TARGET = ms.ClassScore([0, 1], "none")
IMAGES = torch.rand(2, 1, 8, 9, generator=torch.Generator().manual_seed(0))


def a_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(126, 2)).eval()


def rank_of(first: torch.Tensor, second: torch.Tensor) -> list[list[float]]:
    each = [[spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(*pair)] for pair in zip(first, second)]  # noqa: B905
    return np.array(each).tolist()


@pytest.mark.parametrize("per_channel", [False, True])
def test_repeatability_is_the_rank_correlation_of_two_seeds(per_channel: bool) -> None:
    network = a_network()
    target = ms.ClassScore([1], "none")
    one, other = (ms.rise(30, 3, seed=seed, per_channel=per_channel, target=target) for seed in (0, 5))
    found = metrics.Repeatability(one, network, seed=5).compute(one(IMAGES, network), IMAGES)
    assert_close(found, rank_of(one(IMAGES, network), other(IMAGES, network)))
    assert 0 < float(found.min()) < float(found.max()) < 1
    many = ms.rise(1500, 3, target=target)
    again = metrics.Repeatability(many, network, seed=5).compute(many(IMAGES, network), IMAGES)
    assert float(again.min()) > float(found.max())  # more masks, less noise
    assert one.masks is not None
    assert getattr(getattr(one.masks, "masks", one.masks), "seed", None) == 0  # the user's masks are left alone


@pytest.mark.parametrize("method", [ms.focused_rise, ms.random_grid, ms.hsic])
def test_methods_with_a_seed_are_compared_with_another_one(method: Any) -> None:
    one, other = (method(30, seed=seed, target=ms.ClassScore([1], "none")) for seed in (0, 5))
    network = a_network()
    found = metrics.Repeatability(one, network, seed=5).compute(one(IMAGES, network), IMAGES)
    assert_close(found, rank_of(one(IMAGES, network), other(IMAGES, network)))


def test_agreement_between_fills() -> None:
    network, inferer = a_network(), ms.sliding_window(3, 2, target=TARGET)
    fills = [ms.MeanFill(), ms.ConstantFill(1.0)]
    maps = inferer(IMAGES, network)
    others = [inferer.replace(fill=fill)(IMAGES, network) for fill in fills]
    expected = np.mean([rank_of(maps, other) for other in others], axis=0)
    found = metrics.FillAgreement(inferer, network, fills)(maps, IMAGES)
    assert_close(found, expected)
    assert found.shape == (2, 2)
    flat = torch.full_like(maps, 2.0)
    assert bool(metrics.rank_correlation(maps.flatten(1), flat.flatten(1)).isnan().all())


def state_of(network: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy(force=True).tobytes() for name, tensor in network.state_dict().items()}


class Scale(nn.Module):
    """A parameter that nothing resets."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(values))


def test_randomised_networks() -> None:
    network = nn.Sequential(*a_network(), Scale(1.0, 2.0, 4.0), Scale(3.0, 3.0))
    network[1].running_mean.fill_(5.0)
    before, rng = state_of(network), torch.get_rng_state()
    copies = [randomised(network, seed) for seed in (0, 0, 1)]
    assert state_of(network) == before
    assert_same_bits(torch.get_rng_state(), rng)
    assert state_of(copies[0]) == state_of(copies[1]) != state_of(copies[2])
    changed = {name for name, value in state_of(copies[0]).items() if value != before[name]}
    assert changed == {"0.weight", "0.bias", "1.weight", "1.running_mean", "4.weight", "4.bias", "5.scale", "6.scale"}
    assert bool((copies[0][4].weight != network[4].weight).all())
    assert [p.requires_grad for p in copies[0].parameters()] == [p.requires_grad for p in network.parameters()]


def test_parameter_randomisation_compares_with_the_randomised_network() -> None:
    network, inferer = a_network(), ms.sliding_window(3, 2, target=TARGET)
    before = state_of(network)
    maps = inferer(IMAGES, network)
    ranks = metrics.ParameterRandomisation(inferer, network, seed=2)
    found = ranks.compute(maps, IMAGES)
    other = inferer(IMAGES, randomised(network, 2))
    assert_close(found, rank_of(maps, other))
    assert state_of(network) == before


class Bright(nn.Module):
    """Ignores its parameters: no map of it depends on what was learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., 2:5, 3:6].flatten(1).sum(1, keepdim=True).expand(-1, 2)


def test_a_map_that_does_not_depend_on_the_parameters_fails() -> None:
    network, inferer = Bright(), ms.sliding_window(2, 1, target=TARGET)
    maps = inferer(IMAGES, network)
    assert metrics.ParameterRandomisation(inferer, network).compute(maps, IMAGES).min() > 1 - 1e-12


@pytest.mark.parametrize("dims", [2, 3])
def test_controls(dims: int) -> None:
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(2, 3, *(7, 8, 9)[:dims], generator=draw, dtype=torch.float64)
    maps = torch.rand(2, 2, *images.shape[2:], generator=draw, dtype=torch.float64)
    found = metrics.controls(images, maps, seed=4)
    assert tuple(found) == CONTROLS
    assert all(each.shape == maps.shape and each.dtype == maps.dtype for each in found.values())
    for b, k in np.ndindex(2, 2):
        scan = images[b].numpy()
        assert_close(found["intensity"][b, k], scan.mean(0))
        edges = np.mean([np.sqrt(sum(g**2 for g in np.gradient(channel))) for channel in scan], axis=0)
        assert_close(found["edges"][b, k], edges)
        blurred = ndimage.gaussian_filter(maps[b, k].numpy(), 2.0, mode="nearest")
        assert_close(found["blurred"][b, k], blurred)
    # Random maps differ between cases, maps and seeds, and not by what is beside them.
    random = found["random"].flatten(0, 1).flatten(1)
    assert float((torch.corrcoef(random) - torch.eye(4)).abs().max()) < 0.5
    assert_same_bits(metrics.controls(images[1:], maps[1:], seed=4)["random"], found["random"][1:])
    assert not torch.equal(metrics.controls(images, maps, seed=5)["random"], found["random"])


def scans() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with a faint, thin lesion beside a bright organ, its label, and a right map."""
    draw = torch.Generator().manual_seed(2)
    label, images = torch.zeros(3, 1, 24, 24), 0.1 * torch.rand(3, 1, 24, 24, generator=draw)
    label[..., 4:12, 5], label[..., 11, 5:13] = 1, 1
    images += 0.3 * label
    images[..., 14:20, 14:20] += 1
    return images, label, label + 0.3 * torch.rand(3, 1, 24, 24, generator=draw)


def test_controls_beside_a_metric() -> None:
    images, label, maps = scans()
    metric = metrics.AUPRC()
    found = metrics.with_controls(metric, maps, label, images, seed=3)
    assert found.metric == "AUPRC"
    assert abs(found.value - 1) < 1e-12
    assert found.passed_by == ()
    expected = {name: float(metric.compute(m, label).mean()) for name, m in metrics.controls(images, maps, 3).items()}
    assert_close(dict(found.controls), expected)
    with pytest.raises(ValueError, match="has measured no map yet"):
        metric.aggregate()  # nothing was kept
    # A worse map than the scan itself is marked.
    bright = metrics.with_controls(metrics.Leakage(), label * 0.1 + images.flip(2), label, label + 0.01 * images)
    assert {"intensity", "edges"} <= {*bright.passed_by}


INFERER = ms.rise(5, 3, target=TARGET)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(72, 2))
MAPS = torch.rand(2, 2, 8, 9)
MISTAKES: list[tuple[Any, str]] = [
    (lambda: metrics.Repeatability(INFERER, NETWORK, seed=0), "`seed` must differ from the seed of the map's"),
    (
        lambda: metrics.Repeatability(ms.sliding_window(target=TARGET), NETWORK),
        "SlidingWindowMasks draw nothing at random",
    ),
    (lambda: metrics.ParameterRandomisation(INFERER, lambda x: x), "`network` must be a module"),
    (
        lambda: metrics.Repeatability(INFERER, NETWORK)(torch.rand(2, 3, 8, 9), IMAGES),
        "has 3 maps and `inferer` makes 2",
    ),
    (lambda: metrics.controls(IMAGES[:1], MAPS), "are not of one batch and one grid"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes(mistake: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mistake()
