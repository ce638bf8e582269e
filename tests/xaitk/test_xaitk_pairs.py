"""Every pair of a mask generator and a scoring that xaitk-saliency allows: our map is its map.

Its own classes run its own pipelines: a classifier, an image's descriptors, a detector. Ours are masks of the same
parameters, the estimator of the same name and a target. Both maps are compared after xaitk-saliency's normalisation, to
1e-6, since its random masks are float32, and windows to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.numpy_boxes import CLASSES, BlackBox
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox
from xaitk_saliency import PerturbImage
from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.rise_scoring import RISEScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.squared_difference_scoring import SquaredDifferenceScoring
from xaitk_saliency.impls.gen_descriptor_sim_sal.similarity_scoring import SimilarityScoring
from xaitk_saliency.impls.gen_detector_prop_sal.drise_scoring import DRISEScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.mc_rise import MCRISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.occlusion_based import PerturbationOcclusion
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal.occlusion_based import (
    PerturbationOcclusion as SimilarityOcclusion,
)
from xaitk_saliency.impls.gen_object_detector_blackbox_sal.occlusion_based import (
    PerturbationOcclusion as DetectorOcclusion,
)
from xaitk_saliency.impls.perturb_image.random_grid import RandomGrid
from xaitk_saliency.impls.perturb_image.rise import RISEGrid
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

import monai_saliency as ms
from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import Masks

NEAR = 1e-6
P1, SEED = 0.4, 3
#: xaitk-saliency's mask generators, and ours of the same parameters
PERTURBERS: dict[str, tuple[Callable[[], PerturbImage], Masks]] = {
    "RISEGrid": (lambda: RISEGrid(30, 4, P1, SEED, threads=0), ms.RISEMasks(30, 4, P1, SEED)),
    "RandomGrid": (lambda: RandomGrid(30, (5, 4), P1, SEED, 0), ms.RandomGridMasks(30, (5, 4), P1, SEED)),
    "SlidingWindow": (lambda: SlidingWindow((6, 8), (4, 3)), ms.SlidingWindowMasks((6, 8), (4, 3))),
    "SlidingRadial": (lambda: SlidingRadial((5, 4), (4, 3)), ms.SlidingRadialMasks((5, 4), (4, 3))),
    "SlidingRadial blurred": (
        lambda: SlidingRadial((4, 3.5), (5, 4), (1.5, 2)),
        ms.SlidingRadialMasks((4, 3.5), (5, 4), (1.5, 2)),
    ),
}
#: scorings of a classifier
SCORINGS: dict[str, tuple[Any, Estimator]] = {
    "RISEScoring": (RISEScoring(P1), ms.RISEScoring(P1, "debiased")),
    "RISEScoring plain": (RISEScoring(0.0), ms.RISEScoring(P1, "plain")),
    "OcclusionScoring": (OcclusionScoring(), ms.OcclusionScoring()),
    "SquaredDifferenceScoring": (SquaredDifferenceScoring(), ms.SquaredDifferenceScoring()),
}
IMAGES: list[tuple[tuple[int, int, int], Any]] = [
    ((1, 21, 30), None),
    ((1, 24, 24), 0.7),
    ((3, 19, 26), [0.5, -1.0, 2.0]),
]


def channel_last(image: np.ndarray, grey_axis: bool = False) -> np.ndarray:
    """An image ``(C, H, W)`` as xaitk-saliency has it: ``(H, W)`` of one channel, otherwise ``(H, W, C)``."""
    return image[0] if len(image) == 1 and not grey_axis else np.moveaxis(image, 0, -1)


def _channel_first(image: np.ndarray) -> np.ndarray:
    return image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)


class XaitkClassifier(ClassifyImage):
    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def get_labels(self) -> list[int]:
        return list(range(CLASSES))

    def classify_images(self, img_iter: Any) -> Iterator[dict]:
        for image in img_iter:
            yield dict(enumerate(self.box.odds(_channel_first(image))))

    def get_config(self) -> dict:
        return {}


class XaitkDescriptors(ImageDescriptorGenerator):
    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def generate_arrays_from_images(self, img_mat_iter: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for image in img_mat_iter:
            yield self.box(_channel_first(image))

    def get_config(self) -> dict:
        return {}


class XaitkDetector(DetectImageObjects):
    """Its boxes end at their last voxel, and have the classes' scores as they are."""

    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def detect_objects(self, img_iter: Iterable[np.ndarray]) -> Iterator[list]:
        for image in img_iter:
            corners, scores = self.box.boxes(_channel_first(image))
            yield [
                (AxisAlignedBoundingBox(each[:2], each[2:]), dict(enumerate(row)))
                for each, row in zip(corners, scores, strict=True)
            ]

    def get_config(self) -> dict:
        return {}


def image_of(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def fill_of(fill: Any) -> ms.ConstantFill:
    return ms.ConstantFill(0.0 if fill is None else fill)


def scaled(maps: np.ndarray) -> np.ndarray:
    """Divided by the largest magnitude of each map; a map of zeros stays, as theirs does."""
    largest = np.abs(maps).max(axis=(1, 2), keepdims=True)
    return maps / np.where(largest > 0, largest, 1)


def explained(explain: ms.PerturbationInferer, image: np.ndarray, network: Callable[..., Any]) -> np.ndarray:
    (found,) = explain.explain(torch.from_numpy(image)[None], network)
    assert found.saliency.dtype == torch.float64
    return found.saliency.numpy()


@pytest.mark.parametrize(("shape", "fill"), IMAGES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("perturber", PERTURBERS)
def test_a_classifier(perturber: str, scoring: str, shape: tuple[int, int, int], fill: Any) -> None:
    (make, masks), (theirs, estimator) = PERTURBERS[perturber], SCORINGS[scoring]
    image, box = image_of(shape), BlackBox(shape)
    stack = PerturbationOcclusion(make(), theirs, threads=0)
    stack.fill = fill
    expected = stack.generate(channel_last(image), XaitkClassifier(box))
    explain = ms.PerturbationInferer(masks, ms.ClassScore("all", "none"), estimator, fill_of(fill), mask_batch_size=7)
    found = explained(explain, image, box.classify)
    if scoring == "SquaredDifferenceScoring":  # one map of all classes, moved and scaled to [0, 1]
        total = found.sum(axis=0)
        found = (total - total.min()) / (total.max() - total.min())
    else:
        found = scaled(found)
    assert np.abs(expected).max() == pytest.approx(1)
    near = 1e-14 if perturber == "SlidingWindow" else NEAR
    np.testing.assert_allclose(found, expected, rtol=0, atol=near)


@pytest.mark.parametrize(("shape", "fill"), IMAGES)
@pytest.mark.parametrize("measure", ["euclidean", "cosine"])
@pytest.mark.parametrize("perturber", PERTURBERS)
def test_similarity(perturber: str, measure: str, shape: tuple[int, int, int], fill: Any) -> None:
    make, masks = PERTURBERS[perturber]
    image, box = image_of(shape), BlackBox(shape, outputs=9)
    queries = [image_of(shape, seed) for seed in (2, 3)]
    stack = SimilarityOcclusion(make(), SimilarityScoring(measure), fill, threads=0)
    expected = stack.generate(channel_last(image), [channel_last(each) for each in queries], XaitkDescriptors(box))
    references = torch.from_numpy(np.stack([box(each) for each in queries]))
    target = ms.EmbeddingSimilarity("distance" if measure == "euclidean" else measure, references)
    explain = ms.PerturbationInferer(masks, target, ms.SimilarityScoring(), fill_of(fill), mask_batch_size=7)
    found = explained(explain, image, box.describe)
    assert expected.max() == pytest.approx(1)
    np.testing.assert_allclose(scaled(found), expected, rtol=0, atol=NEAR)


def detected(stack: Any, image: np.ndarray, box: BlackBox) -> np.ndarray:
    """Its maps of the boxes of the unperturbed image, the highest first."""
    corners, scores = box.boxes(image)
    order = np.argsort(-scores.max(axis=1), kind="stable")
    return stack.generate(channel_last(image), corners[order], scores[order], XaitkDetector(box))


@pytest.mark.parametrize(("shape", "fill"), IMAGES)
@pytest.mark.parametrize("perturber", PERTURBERS)
def test_a_detector(perturber: str, shape: tuple[int, int, int], fill: Any) -> None:
    make, masks = PERTURBERS[perturber]
    image, box = image_of(shape), BlackBox(shape, BlackBox.box_outputs(2))
    expected = detected(DetectorOcclusion(make(), DRISEScoring(), fill, threads=0), image, box)
    target = ms.DetectionScore(0.0)
    explain = ms.PerturbationInferer(masks, target, ms.DRISEScoring("plain"), fill_of(fill), mask_batch_size=7)
    np.testing.assert_allclose(scaled(explained(explain, image, box.detect)), expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("shape", "count"), [((1, 21, 30), 1), ((3, 19, 26), 4)])
@pytest.mark.parametrize("p1", [0.5, 0.3])
def test_mc_rise(shape: tuple[int, int, int], count: int, p1: float) -> None:
    """Its colours are whole numbers from 0 to 255, and it needs an axis of channels in a grey image too."""
    image, box = 128 + 60 * image_of(shape), BlackBox(shape)
    box.first /= 100
    colours = np.random.default_rng(5).integers(0, 256, (count, shape[0])).tolist()
    stack = MCRISEStack(40, 5, p1, colours, SEED, threads=0)
    expected = stack.generate(channel_last(image, grey_axis=True), XaitkClassifier(box))
    first, *others = colours
    for form in ("xaitk", "debiased")[: 2 if p1 == 0.5 else 1]:
        explain = ms.mc_rise(
            40, 5, p1, SEED, others, form, target=ms.ClassScore("all", "none"), fill=ms.ConstantFill(first)
        )
        found = explained(explain, image, box.classify)
        found = scaled(found).reshape(4, count, *shape[1:]).swapaxes(0, 1)  # by fill, then by class
        np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR)


WITH_P1 = {"p1": P1, "seed": SEED}
#: each method, its settings, and the masks and the estimator that it is made of
METHODS: list[tuple[Callable[..., ms.PerturbationInferer], dict[str, Any], Masks, Estimator]] = [
    (ms.rise, {"num_masks": 25, "grid_size": 3} | WITH_P1, ms.RISEMasks(25, 3, **WITH_P1), ms.RISEScoring(P1)),
    (ms.drise, {"num_masks": 25, "grid_size": 3} | WITH_P1, ms.RISEMasks(25, 3, **WITH_P1), ms.DRISEScoring()),
    (
        *(ms.random_grid, {"num_masks": 25, "cell_size": 3} | WITH_P1),
        *(ms.RandomGridMasks(25, 3, **WITH_P1), ms.RISEScoring(P1)),
    ),
    (
        *(ms.mc_rise, {"num_masks": 25, "grid_size": 3, "more_fills": [-1.0, 2.0]} | WITH_P1),
        *(ms.MCRISEMasks(25, [ms.ConstantFill(-1.0), ms.ConstantFill(2.0)], 3, **WITH_P1), ms.MCRISEScoring(P1)),
    ),
    (ms.multi_scale_window, {"window_size": 4, "levels": 2}, ms.MultiScaleWindowMasks(4, 2), ms.OcclusionScoring()),
    (ms.sliding_radial, {"radius": 2.5, "stride": 3}, ms.SlidingRadialMasks(2.5, 3), ms.OcclusionScoring()),
    (
        *(ms.squared_difference, {"radius": 2, "stride": 3, "sigma": 0.5}),
        *(ms.SlidingRadialMasks(2, 3, 0.5), ms.SquaredDifferenceScoring()),
    ),
    (ms.sbsm, {"window_size": 3, "stride": 2}, ms.SlidingWindowMasks(3, 2), ms.SimilarityScoring()),
]


@pytest.mark.parametrize(
    ("method", "settings", "masks", "estimator"), METHODS, ids=[row[0].__name__ for row in METHODS]
)
def test_a_method_is_its_masks_and_its_estimator(
    method: Any, settings: dict[str, Any], masks: Masks, estimator: Estimator
) -> None:
    """In 3D too, where tests/masks and tests/estimators compare both with plain loops."""
    for shape in ((2, 9, 8), (2, 7, 6, 5)):
        image, box, target = image_of(shape), BlackBox(shape), ms.ClassScore("all", "none")
        shared = {"fill": ms.ConstantFill(0.5), "mask_batch_size": 7}
        found = explained(method(**settings, target=target, **shared), image, box.describe)
        expected = explained(ms.PerturbationInferer(masks, target, estimator, **shared), image, box.describe)
        np.testing.assert_array_equal(found, expected)
        assert np.abs(expected).max() > 1e-3
