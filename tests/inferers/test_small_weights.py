"""nnU-Net's patches weigh next to nothing in an image's outermost corners, where its sums in float16 lose logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.warned import logged_warnings

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.inferers import nnunet
from monai_saliency.inferers.nnunet import NNUNetInferer

SIZE, SHAPE = (8, 16, 16), (16, 32, 32)


def gaussian(size: tuple[int, ...], value_scaling_factor: int, dtype: torch.dtype, device: torch.device) -> Any:
    """As nnU-Net makes them: an eighth of a patch wide, and no weight is 0."""
    weights = torch.ones(())
    for edge in size:
        along = torch.exp(-0.5 * ((torch.arange(edge) - edge // 2) / (edge / 8)) ** 2)
        weights = weights[..., None] * along
    weights = (weights * value_scaling_factor).to(dtype)
    weights[weights == 0] = weights[weights > 0].min()
    return weights


def steps(shape: tuple[int, ...], size: tuple[int, ...], step: float) -> list[list[int]]:
    counts = [int(np.ceil((edge - patch) / (patch * step))) + 1 for edge, patch in zip(shape, size, strict=True)]
    return [
        [round((edge - patch) / max(count - 1, 1) * i) for i in range(count)]
        for edge, patch, count in zip(shape, size, counts, strict=True)
    ]


@pytest.fixture
def inferer(monkeypatch: pytest.MonkeyPatch) -> NNUNetInferer:
    """Without nnU-Net, which need not be installed."""
    own = SimpleNamespace(compute_gaussian=gaussian, compute_steps_for_sliding_window=steps)
    monkeypatch.setattr(nnunet, "require", lambda *args, **kwargs: own)
    return NNUNetInferer(SIZE)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    first, last = (torch.nn.Conv3d(*channels, 3, padding=1) for channels in ((1, 4), (4, 2)))
    with torch.no_grad():
        last.weight *= 8
    return torch.nn.Sequential(first, torch.nn.InstanceNorm3d(4), torch.nn.LeakyReLU(), last).eval()


def image() -> torch.Tensor:
    return torch.randn(1, 1, *SHAPE, generator=torch.Generator().manual_seed(0))


def explained(inferer: NNUNetInferer, prediction: torch.Tensor | None) -> Any:
    target = ms.RegionScore(1, "softmax", "all")
    explain = ms.sliding_window(SIZE, SIZE, target=target, inferer=inferer)
    return explain.explain(image(), model(), cases=[Case("ct_7", prediction=prediction)])[0]


def test_patches_are_remembered_beside_nnunets_own_prediction(
    inferer: NNUNetInferer, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        prediction = inferer(image(), model())
    found = explained(inferer, prediction)
    assert not logged_warnings(caplog)  # images do not go one by one
    without = explained(inferer, None)
    assert found.num_forwards == without.num_forwards
    assert torch.equal(found.scores, without.scores)
