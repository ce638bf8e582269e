"""Infidelity and sensitivity-n against plain loops, hand-made answers and captum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency.masks.grid import SubsetMasks
from monai_saliency.metrics import Infidelity, SensitivityN

SHAPES = {2: (6, 8), 3: (4, 5, 6)}
MASKS = ms.RISEMasks(30, 3, seed=4)


def network_of(dims: int) -> Callable[[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(dims)
    weight = torch.randn(2 * int(np.prod(SHAPES[dims])), 2, generator=draw, dtype=torch.float64)
    return lambda x: torch.tanh(x.flatten(1).double() @ weight / 3)


def case_of(dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    images = torch.rand(2, 2, *SHAPES[dims], generator=draw, dtype=torch.float64)
    return torch.randn(2, 2, *SHAPES[dims], generator=draw, dtype=torch.float64), images


def slow_pairs(
    masks: Any, network: Any, saliency: torch.Tensor, image: torch.Tensor, k: int
) -> tuple[list[float], list[float]]:
    """For each mask, the map's sum over what it hides, and the fall of the score."""
    bound = masks.bind(image)
    sums, drops = [], []
    for index in range(len(bound)):
        mask = bound.render([index])[0, 0]
        total = 0.0
        for at in np.ndindex(*saliency.shape):
            total += (1 - float(mask[at])) * float(saliency[at])
        sums.append(total)
        drops.append(float(network(image[None])[0, k] - network((mask * image + (1 - mask) * 0.3)[None])[0, k]))
    return sums, drops


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_infidelity_equals_plain_loops(dims: int, normalize: bool) -> None:
    network, (maps, images) = network_of(dims), case_of(dims)
    inferer = ms.rise(target=ms.ClassScore([0, 1], "none"), mask_batch_size=7)
    found = Infidelity(inferer.replace(fill=ms.ConstantFill(0.3)), network, MASKS, normalize).compute(maps, images)
    for b, k in np.ndindex(2, 2):
        sums, drops = slow_pairs(MASKS, network, maps[b, k], images[b], k)
        pairs = list(zip(sums, drops, strict=True))
        beta = sum(s * d for s, d in pairs) / sum(s * s for s in sums) if normalize else 1
        expected = sum((beta * s - d) ** 2 for s, d in pairs) / len(pairs)
        assert abs(float(found[b, k]) - expected) < 1e-9 * max(1, expected)


@pytest.mark.parametrize("dims", [2, 3])
def test_sensitivity_n_equals_plain_loops(dims: int) -> None:
    network, (maps, images) = network_of(dims), case_of(dims)
    inferer = ms.rise(target=ms.ClassScore([0, 1], "none"))
    metric = SensitivityN(inferer.replace(fill=ms.ConstantFill(0.3)), network, 4, 25, grid_size=3, seed=2)
    found = metric(maps, images)
    for b, k in np.ndindex(2, 2):
        pairs = slow_pairs(SubsetMasks(25, 4, 3, seed=2), network, maps[b, k], images[b], k)
        assert abs(float(found[b, k]) - np.corrcoef(*pairs)[0, 1]) < 1e-9


@pytest.mark.parametrize("normalize", [False, True])
def test_infidelity_equals_captum(normalize: bool) -> None:
    infidelity = pytest.importorskip("captum.metrics", reason="needs captum").infidelity
    network, (maps, images) = network_of(2), case_of(2)
    image, saliency = images[:1], maps[:1, :1]
    bound = MASKS.bind(image[0])
    rendered = bound.render(range(len(bound)))

    def perturb(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # captum's attributions have the image's channels: the map's sum is spread over two.
        return (1 - rendered).expand_as(inputs), rendered * inputs

    expected = infidelity(
        lambda x: network(x)[:, 1],
        perturb,
        image,
        (saliency / 2).expand_as(image),
        n_perturb_samples=len(bound),
        max_examples_per_batch=len(bound),
        normalize=normalize,
    )
    inferer = ms.rise(target=ms.ClassScore([1], "none"))
    found = Infidelity(inferer, network, MASKS, normalize).compute(saliency, image)
    assert abs(float(found) - float(expected)) < 1e-4 * float(expected)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_linear_network_and_its_exact_map(dims: int) -> None:
    """Occlusion of single voxels is exact for a sum: nothing is left of infidelity, and the correlation is 1."""
    weight = torch.randn(SHAPES[dims], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    network = lambda x: (x[:, 0] * weight).flatten(1).sum(1, keepdim=True)  # noqa: E731
    image = torch.rand(1, 1, *SHAPES[dims], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inferer = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"))
    saliency = inferer(image, network)
    exact, shape_only = (Infidelity(inferer, network, normalize=each) for each in (False, True))
    sensitivity = SensitivityN(inferer, network, 5, 40, 4)
    assert float(exact.compute(saliency, image)) < 1e-20
    assert float(exact.compute(3 * saliency, image)) > 1e-3
    assert float(shape_only.compute(3 * saliency, image)) < 1e-20
    assert float(shape_only.compute(saliency.flip(2), image)) > 1e-3
    assert abs(float(sensitivity.compute(saliency, image)) - 1) < 1e-9
    assert abs(float(sensitivity.compute(-saliency, image)) + 1) < 1e-9
    assert math.isnan(float(sensitivity.compute(torch.zeros_like(saliency), image)))
    # A map of zeros explains nothing: what is left is the mean square of the falls.
    zero = float(shape_only.compute(torch.zeros_like(saliency), image))
    assert zero == float(exact.compute(torch.zeros_like(saliency), image)) > 1e-3
