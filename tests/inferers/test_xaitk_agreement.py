"""The same masks, the same black box, public peers' maps: xaitk-saliency and captum.

xaitk-saliency scales every map to [-1, 1], so ours is divided by its largest magnitude; captum keeps magnitudes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack

from monai_saliency import ClassScore, ConstantFill, PerturbationInferer, RISEScoring, rise, sliding_window

CLASSES = 4


class BlackBox:
    """Class probabilities of images ``(C, H, W)`` in plain NumPy, double precision, nonlinear."""

    def __init__(self, *shape: int) -> None:
        rng = np.random.default_rng(7)
        self.first = rng.normal(size=(6, *shape)) / np.sqrt(np.prod(shape))
        self.second = 3 * rng.normal(size=(CLASSES, 6))

    def __call__(self, image: np.ndarray) -> np.ndarray:
        logits = self.second @ np.tanh(np.tensordot(self.first, image, axes=image.ndim))
        odds = np.exp(logits - logits.max())
        return odds / odds.sum()

    def torch(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([self(image) for image in batch.numpy()]))


class XaitkBlackBox(ClassifyImage):
    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def get_labels(self) -> list[int]:
        return list(range(CLASSES))

    def classify_images(self, img_iter: Any) -> Iterator[dict]:
        for image in img_iter:
            channel_first = image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)
            yield dict(enumerate(self.box(channel_first)))

    def get_config(self) -> dict:
        return {}


def difference(
    stack: RISEStack | SlidingWindowStack, ours: PerturbationInferer, shape: tuple[int, ...], fill: Any
) -> float:
    """The largest deviation of our maps, scaled to [-1, 1], from theirs."""
    image, box = np.random.default_rng(1).normal(size=shape), BlackBox(*shape)
    stack.fill = fill
    theirs = stack.generate(image[0] if shape[0] == 1 else np.moveaxis(image, 0, -1), XaitkBlackBox(box))
    maps = ours(torch.from_numpy(image)[None], box.torch)[0].numpy()
    assert maps.dtype == np.float64
    assert np.abs(theirs).max() > 0.5
    return float(np.abs(maps / np.abs(maps).max(axis=(1, 2), keepdims=True) - theirs).max())


FILLS: list[tuple[tuple[int, ...], Any]] = [
    ((1, 24, 24), None),
    ((1, 21, 30), None),
    ((1, 21, 30), 0.7),
    ((3, 19, 16), [0.5, -1.0, 2.0]),
]


@pytest.mark.parametrize(("shape", "fill"), FILLS)
@pytest.mark.parametrize("debiased", [True, False])
@pytest.mark.parametrize(("s", "p1", "seed"), [(4, 0.5, 0), (7, 0.3, 11)])
def test_rise_equals_xaitk(shape: tuple[int, ...], fill: Any, debiased: bool, s: int, p1: float, seed: int) -> None:
    theirs = RISEStack(40, s, p1, seed, threads=0, debiased=debiased)
    ours = rise(
        40,
        s,
        p1,
        seed,
        target=ClassScore("all", "none"),
        estimator=RISEScoring(p1, "debiased" if debiased else "plain"),
        fill=ConstantFill(0.0 if fill is None else fill),
        mask_batch_size=7,
    )
    # Their masks are float32; 2.3e-7 is reached.
    assert difference(theirs, ours, shape, fill) < 1e-6


@pytest.mark.parametrize(("shape", "fill"), FILLS)
@pytest.mark.parametrize(("window", "stride"), [((6, 6), (3, 3)), ((5, 8), (4, 3)), ((4, 3), (6, 5)), ((3, 3), (3, 3))])
def test_sliding_window_equals_xaitk(
    shape: tuple[int, ...], fill: Any, window: tuple[int, int], stride: tuple[int, int]
) -> None:
    theirs = SlidingWindowStack(window, stride, threads=0)
    ours = sliding_window(
        window,
        stride,
        target=ClassScore("all", "none"),
        fill=ConstantFill(0.0 if fill is None else fill),
        mask_batch_size=7,
    )
    assert difference(theirs, ours, shape, fill) < 1e-14


@pytest.mark.parametrize(
    ("shape", "window"),
    [((1, 12, 12), (3, 3)), ((3, 12, 20), (4, 5)), ((2, 8, 6, 9), (2, 3, 3)), ((1, 6, 6, 6), (6, 2, 3))],
)
@pytest.mark.parametrize("fill", [0.0, 0.7])
def test_occlusion_equals_captum_with_magnitudes(shape: tuple[int, ...], window: tuple[int, ...], fill: float) -> None:
    """Windows of captum start at the corner and ours are centred: both lie alike where nothing hangs over, that is
    with a stride of one window where windows divide the image. It hides channels apart unless told otherwise.
    """
    image, box = torch.from_numpy(np.random.default_rng(2).normal(size=(1, *shape))), BlackBox(*shape)
    maps = sliding_window(window, window, target=ClassScore("all", "none"), fill=ConstantFill(fill))(image, box.torch)
    whole = (shape[0], *window)
    deviations = []
    for k in range(CLASSES):
        theirs = Occlusion(box.torch).attribute(image, whole, strides=whole, baselines=fill, target=k)
        # One value for all channels of a window.
        assert torch.equal(theirs, theirs[:, :1].expand_as(theirs))
        deviations.append(float((maps[0, k] - theirs[0, 0]).abs().max() / theirs.abs().max()))
    # Its attributions are float32; 4e-8 is reached.
    assert max(deviations) < 1e-6
