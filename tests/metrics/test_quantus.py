"""Metrics that Quantus defines alike, against it. Quantus is GPL: an oracle of tests, no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency import metrics

quantus: Any = pytest.importorskip("quantus", reason="needs Quantus, of the test extra")
QUIET = {"disable_warnings": True, "display_progressbar": False, "normalise": False, "abs": False}


class Small(torch.nn.Module):
    """``(B, 1, 8, 8)`` -> ``(B, 3)``."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(64, 3, generator=draw) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.flatten(1) @ self.weight)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    images, maps = torch.rand(3, 1, 8, 8, generator=draw), torch.rand(3, 1, 8, 8, generator=draw)
    labels = torch.zeros(3, 1, 8, 8, dtype=torch.long)
    labels[..., 1:6, 2:7] = 1
    return images, maps, labels


def evaluate(metric: Any, images: torch.Tensor, maps: torch.Tensor, **given: Any) -> np.ndarray:
    found = metric(
        model=Small().eval(),
        x_batch=images.numpy(),
        y_batch=np.full(len(images), 1),
        a_batch=maps.numpy(),
        channel_first=True,
        softmax=False,
        **given,
    )
    return np.array(found, dtype=float)


def test_mass_in_label() -> None:
    images, maps, labels = batch()
    expected = evaluate(quantus.RelevanceMassAccuracy(**QUIET), images, maps, s_batch=labels.numpy())
    np.testing.assert_allclose(metrics.MassInLabel().compute(maps, labels)[:, 0], expected, rtol=0, atol=1e-4)


def test_pointing() -> None:
    images, maps, labels = batch()
    maps[0, 0, 3, 3], maps[1, 0, 0, 0] = 2, 2  # one inside, one outside
    expected = evaluate(quantus.PointingGame(**QUIET), images, maps, s_batch=labels.numpy())
    assert {*expected} == {0, 1}
    np.testing.assert_allclose(metrics.Pointing().compute(maps, labels)[:, 0], expected)


@pytest.mark.parametrize("steps", [64, 16])
def test_deletion(steps: int) -> None:
    images, maps, _ = batch()
    flipping = quantus.PixelFlipping(features_in_step=64 // steps, perturb_baseline=0.25, **QUIET)
    expected = evaluate(flipping, images, maps)
    target = ms.ClassScore([1], "none")
    deletion = metrics.Deletion(ms.rise(target=target, fill=ms.ConstantFill(0.25)), Small().eval(), steps)
    curves = deletion.curves(maps, images)
    found = np.array([curve.scores[1:].numpy() for (curve,) in curves])  # Quantus leaves the unperturbed image out
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
