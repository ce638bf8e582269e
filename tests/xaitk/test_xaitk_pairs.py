"""Every pair of a mask generator and a scoring that xaitk-saliency allows: our map is its map.

Its own classes run its own pipelines: a classifier, an image's descriptors, a detector. Ours are masks of the same
parameters, the estimator of the same name and a target. Both maps are compared after xaitk-saliency's normalisation, in
single precision, since its random masks are float32, and windows in double.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import commands
from helpers.numpy_boxes import CLASSES, BlackBox
from helpers.paths import TESTS
from helpers.tolerances import DOUBLE, MASKS, SINGLE, assert_close, assert_same_bits
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox
from torch import nn
from xaitk_saliency import GenerateClassifierConfidenceSaliency, GenerateImageClassifierBlackboxSaliency, PerturbImage
from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.rise_scoring import RISEScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.squared_difference_scoring import SquaredDifferenceScoring
from xaitk_saliency.impls.gen_descriptor_sim_sal.similarity_scoring import SimilarityScoring
from xaitk_saliency.impls.gen_detector_prop_sal.drise_scoring import DRISEScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import rise as rise_stack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import slidingwindow as window_stack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.mc_rise import MCRISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.occlusion_based import PerturbationOcclusion
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import occlusion_based as similarity_occlusion
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import sbsm
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import drise
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import occlusion_based as detector_occlusion
from xaitk_saliency.impls.perturb_image import random_grid, rise, sliding_radial, sliding_window
from xaitk_saliency.impls.perturb_image.mc_rise import MCRISEGrid
from xaitk_saliency.impls.perturb_image.random_grid import RandomGrid
from xaitk_saliency.impls.perturb_image.rise import RISEGrid
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

import monai_saliency as ms
from monai_saliency import xaitk
from monai_saliency.bundle.chosen_method import ChosenMethod
from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import Masks
from monai_saliency.methods.settings import describe, find_method, own_settings
from monai_saliency.sharding import Part
from monai_saliency.xaitk import BlackBoxInferer, ConfidenceScoring, PerturbImageMasks, as_method

P1, SEED = 0.4, 3
#: xaitk-saliency's mask generators, and ours of the same parameters
PERTURBERS: dict[str, tuple[Callable[[], PerturbImage], Masks]] = {
    "RISEGrid": (lambda: RISEGrid(30, 4, P1, SEED, threads=0), ms.masks.RISEMasks(30, 4, P1, SEED)),
    "RandomGrid": (lambda: RandomGrid(30, (5, 4), P1, SEED, 0), ms.masks.RandomGridMasks(30, (5, 4), P1, SEED)),
    "SlidingWindow": (lambda: SlidingWindow((6, 8), (4, 3)), ms.masks.SlidingWindowMasks((6, 8), (4, 3))),
    "SlidingRadial": (lambda: SlidingRadial((5, 4), (4, 3)), ms.masks.SlidingRadialMasks((5, 4), (4, 3))),
    "SlidingRadial blurred": (
        lambda: SlidingRadial((4, 3.5), (5, 4), (1.5, 2)),
        ms.masks.SlidingRadialMasks((4, 3.5), (5, 4), (1.5, 2)),
    ),
}
#: scorings of a classifier
SCORINGS: dict[str, tuple[Any, Estimator]] = {
    "RISEScoring": (RISEScoring(P1), ms.estimators.RISEScoring(P1, "debiased")),
    "RISEScoring plain": (RISEScoring(0.0), ms.estimators.RISEScoring(P1, "plain")),
    "OcclusionScoring": (OcclusionScoring(), ms.estimators.OcclusionScoring()),
    "SquaredDifferenceScoring": (SquaredDifferenceScoring(), ms.estimators.SquaredDifferenceScoring()),
}
IMAGES: list[tuple[Any, Any]] = [((1, 21, 30), None), ((1, 24, 24), 0.7), ((3, 19, 26), [0.5, -1.0, 2.0])]


def channel_last(image: np.ndarray, grey_axis: bool = False) -> np.ndarray:
    """An image ``(C, H, W)`` as xaitk-saliency has it: ``(H, W)`` of one channel, otherwise ``(H, W, C)``."""
    return image[0] if len(image) == 1 and not grey_axis else np.moveaxis(image, 0, -1)


def _channel_first(image: np.ndarray) -> np.ndarray:
    return image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)


class OfBox:
    """What xaitk-saliency's wrappers of the black box share."""

    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def get_config(self) -> dict:
        return {}


class XaitkClassifier(OfBox, ClassifyImage):
    def get_labels(self) -> list[int]:
        return list(range(CLASSES))

    def classify_images(self, img_iter: Any) -> Iterator[dict]:
        for image in img_iter:
            yield dict(enumerate(self.box.odds(_channel_first(image))))


class XaitkDescriptors(OfBox, ImageDescriptorGenerator):
    def generate_arrays_from_images(self, img_mat_iter: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for image in img_mat_iter:
            yield self.box(_channel_first(image))


class XaitkDetector(OfBox, DetectImageObjects):
    """Its boxes end at their last voxel, and have the classes' scores as they are."""

    def detect_objects(self, img_iter: Iterable[np.ndarray]) -> Iterator[list]:
        for image in img_iter:
            corners, scores = self.box.boxes(_channel_first(image))
            yield [
                (AxisAlignedBoundingBox(each[:2], each[2:]), dict(enumerate(row)))
                for each, row in zip(corners, scores, strict=True)
            ]


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
    assert_close(np.abs(expected).max(), 1, within=SINGLE)
    assert_close(found, expected, within=DOUBLE if perturber == "SlidingWindow" else SINGLE)


@pytest.mark.parametrize(("shape", "fill"), IMAGES)
@pytest.mark.parametrize("measure", ["euclidean", "cosine"])
@pytest.mark.parametrize("perturber", PERTURBERS)
def test_similarity(perturber: str, measure: str, shape: tuple[int, int, int], fill: Any) -> None:
    make, masks = PERTURBERS[perturber]
    image, box = image_of(shape), BlackBox(shape, outputs=9)
    queries = [image_of(shape, seed) for seed in (2, 3)]
    stack = similarity_occlusion.PerturbationOcclusion(make(), SimilarityScoring(measure), fill, threads=0)
    expected = stack.generate(channel_last(image), [channel_last(each) for each in queries], XaitkDescriptors(box))
    references = torch.from_numpy(np.stack([box(each) for each in queries]))
    target = ms.EmbeddingSimilarity("distance" if measure == "euclidean" else measure, references)
    explain = ms.PerturbationInferer(masks, target, ms.estimators.SimilarityScoring(), fill_of(fill), mask_batch_size=7)
    found = explained(explain, image, box.describe)
    assert_close(expected.max(), 1, within=SINGLE)
    assert_close(scaled(found), expected, within=SINGLE)


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
    expected = detected(detector_occlusion.PerturbationOcclusion(make(), DRISEScoring(), fill, threads=0), image, box)
    target = ms.DetectionScore(0.0)
    explain = ms.PerturbationInferer(
        masks, target, ms.estimators.DRISEScoring("plain"), fill_of(fill), mask_batch_size=7
    )
    assert_close(scaled(explained(explain, image, box.detect)), expected, within=SINGLE)


@pytest.mark.parametrize(("shape", "count"), [((1, 21, 30), 1), ((3, 19, 26), 4)])
def test_mc_rise(shape: tuple[int, int, int], count: int) -> None:
    """Its colours are whole numbers from 0 to 255, and it needs an axis of channels in a grey image too."""
    image, box = 128 + 60 * image_of(shape), BlackBox(shape)
    box.first /= 100
    colours = np.random.default_rng(5).integers(0, 256, (count, shape[0])).tolist()
    stack = MCRISEStack(40, 5, 0.5, colours, SEED, threads=0)
    expected = stack.generate(channel_last(image, grey_axis=True), XaitkClassifier(box))
    first, *others = colours
    target, fill = ms.ClassScore("all", "none"), ms.ConstantFill(first)
    explain = ms.mc_rise(40, 5, 0.5, SEED, others, "debiased", target=target, fill=fill)
    found = explained(explain, image, box.classify)
    found = scaled(found).reshape(4, count, *shape[1:]).swapaxes(0, 1)  # by fill, then by class
    assert_close(found, expected, within=SINGLE)


RANDOM = {"num_masks": 25, "p1": P1, "seed": SEED}
FILLS = {"grid_size": 3, "more_fills": [ms.ConstantFill(-1.0), ms.ConstantFill(2.0)]}
#: each method, its settings, and the masks and the estimator that it is made of
METHODS: list[tuple[Callable[..., ms.PerturbationInferer], dict[str, Any], Any, Estimator]] = [
    (ms.rise, RANDOM | {"grid_size": 3}, ms.masks.RISEMasks, ms.estimators.RISEScoring(P1)),
    (ms.drise, RANDOM | {"grid_size": 3}, ms.masks.RISEMasks, ms.estimators.DRISEScoring()),
    (ms.random_grid, RANDOM | {"cell_size": 3}, ms.masks.RandomGridMasks, ms.estimators.RISEScoring(P1)),
    (ms.mc_rise, RANDOM | FILLS, ms.masks.MCRISEMasks, ms.estimators.MCRISEScoring(P1)),
    (
        ms.multi_scale_window,
        {"window_size": 4, "levels": 2},
        ms.masks.MultiScaleWindowMasks,
        ms.estimators.OcclusionScoring(),
    ),
    (ms.sliding_radial, {"radius": 2.5, "stride": 3}, ms.masks.SlidingRadialMasks, ms.estimators.OcclusionScoring()),
    (
        *(ms.squared_difference, {"radius": 2, "stride": 3, "sigma": 0.5}),
        *(ms.masks.SlidingRadialMasks, ms.estimators.SquaredDifferenceScoring()),
    ),
    (ms.sbsm, {"window_size": 3, "stride": 2}, ms.masks.SlidingWindowMasks, ms.estimators.SimilarityScoring()),
]


@pytest.mark.parametrize(("method", "settings", "masks", "estimator"), METHODS)
def test_a_method_is_its_masks_and_its_estimator(method: Any, settings: Any, masks: Any, estimator: Any) -> None:
    """In 3D too, where tests/masks and tests/estimators compare both with plain loops."""
    for shape in ((2, 9, 8), (2, 7, 6, 5)):
        image, box, target = image_of(shape), BlackBox(shape), ms.ClassScore("all", "none")
        shared = {"fill": ms.ConstantFill(0.5), "mask_batch_size": 7}
        found = explained(method(**settings, target=target, **shared), image, box.describe)
        expected = explained(
            ms.PerturbationInferer(masks(**settings), target, estimator, **shared), image, box.describe
        )
        assert_same_bits(found, expected)
        assert np.abs(expected).max() > 1e-3


# Our parts for xaitk-saliency and its own: the same masks, the same black box, the same maps.
RNG = np.random.default_rng(3)
ARRAYS: dict[str, np.ndarray] = {
    "square": RNG.random((20, 20)),
    "wide colour": 255 * RNG.random((17, 26, 3)),
    "tall float32": RNG.normal(size=(26, 14, 2)).astype(np.float32),
    "bytes": RNG.integers(0, 256, (18, 23, 3), dtype=np.uint8),
    "16 bits": RNG.integers(0, 60000, (18, 16), dtype=np.uint16),
}
RADIAL = (4, 6.5), (5, 4)
#: theirs and ours
PLUGINS: dict[str, tuple[Any, Any]] = {
    "rise": (rise.RISEGrid(30, 5, 0.4, 7, threads=0), xaitk.RISEGrid(30, 5, 0.4, 7)),
    "cells": (random_grid.RandomGrid(30, (4, 5), 0.4, 7, threads=0), xaitk.RandomGrid(30, (4, 5), 0.4, 7, 9)),
    "windows": (sliding_window.SlidingWindow((6, 5), (3, 4)), xaitk.SlidingWindow((6, 5), (3, 4))),
    "radial": (sliding_radial.SlidingRadial(*RADIAL), xaitk.SlidingRadial(*RADIAL)),
    "blurred": (sliding_radial.SlidingRadial(*RADIAL, (2, 1.5)), xaitk.SlidingRadial(*RADIAL, (2, 1.5))),
}


class Numbers:
    """Four numbers in (0, 1) of an image, each from a region of its own."""

    def of(self, image: np.ndarray) -> np.ndarray:
        flat = np.asarray(image, dtype=np.float64).reshape(*image.shape[:2], -1).mean(axis=2)
        rows, columns = (np.linspace(0, n, 3).astype(int) for n in flat.shape)
        found = [
            flat[rows[i] : rows[i + 1], columns[j] : columns[j + 1]].mean() / (1 + np.abs(flat).mean())
            for i in range(2)
            for j in range(2)
        ]
        return 1 / (1 + np.exp(-np.asarray(found) * [1.0, -2.0, 3.0, 0.5]))

    def each(self, images: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        return map(self.of, images)

    def get_config(self) -> dict[str, Any]:
        return {}


class Classifies(Numbers, ClassifyImage):
    """Classes ``"a"`` to ``"d"``."""

    def get_labels(self) -> list[str]:
        return list("abcd")

    def classify_images(self, img_iter: Any) -> Iterator[dict[Any, float]]:
        for numbers in self.each(img_iter):
            yield dict(zip("dcba", numbers[::-1].tolist(), strict=True))


class Describes(Numbers, ImageDescriptorGenerator):
    """Four features."""

    def generate_arrays_from_images(self, img_mat_iter: Any) -> Iterator[np.ndarray]:
        yield from self.each(img_mat_iter)


class Detects(Numbers, DetectImageObjects):
    """No box, one or two, of two classes, that move with the image; ``single`` gives one class a score each time."""

    def __init__(self, single: bool = False, never: bool = False) -> None:
        self.single, self.never = single, never

    def detect_objects(self, img_iter: Any) -> Iterator[list[Any]]:
        for a, b, c, d in self.each(img_iter):
            first = AxisAlignedBoundingBox((2 + 3 * a, 3 - b), (9 + 4 * c, 11 + 5 * d))
            second = AxisAlignedBoundingBox((1 + b, 6 - d), (12 - a, 14))
            found = [(first, {"x": a, "y": b}), (second, {"x": c, "y": d})]
            if self.single:
                found = [(first, {"x": 0.0, "y": b}), (second, {"x": c, "y": 0.0})]
            yield [] if self.never else found[: int(10 * (a + c)) % 3]


def same(theirs: np.ndarray, ours: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype.kind == "f"
    assert np.abs(theirs).max() > 0.5  # there is something to compare
    assert_close(ours, theirs, within=1e-4)  # scaled up after scores have cancelled


@pytest.mark.parametrize("kind", PLUGINS)
def test_masks(kind: str) -> None:
    theirs, ours = PLUGINS[kind]
    for image in ARRAYS.values():
        expected, found = theirs(image), ours(image)
        assert found.dtype == expected.dtype
        assert_close(found, expected, within=MASKS)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("threads", [0, 3])
def test_stacks(name: str, threads: int) -> None:
    """A seed gives xaitk-saliency's maps of one thread, for any number of threads."""
    image = ARRAYS[name]
    for debiased in (True, False):
        theirs: Any = rise_stack.RISEStack(40, 6, 0.3, 11, threads=0, debiased=debiased)
        ours: Any = xaitk.RISEStack(40, 6, 0.3, 11, threads=threads, debiased=debiased)
        theirs.fill = ours.fill = 9
        same(theirs(image, Classifies()), ours(image, Classifies()))
    windows = (7, 5), (3, 2)
    of_windows = xaitk.SlidingWindowStack(*windows, threads)
    same(window_stack.SlidingWindowStack(*windows)(image, Classifies()), of_windows(image, Classifies()))
    queries = [ARRAYS["square"], ARRAYS["bytes"], ARRAYS["tall float32"]]
    for metric in ("euclidean", "seuclidean"):
        expected = sbsm.SBSMStack(*windows, metric, fill=3)(image, queries, Describes())
        same(expected, xaitk.SBSMStack(*windows, metric, fill=3, threads=threads)(image, queries, Describes()))
    boxes, scores = np.array([[2.5, 2, 10, 12], [0, 0, 3, 3]]), np.array([[0.9, 0.1], [0.2, 0.7]])
    for single in (False, True):
        given = image, boxes, scores, Detects(single)
        expected = drise.DRISEStack(40, 6, 0.3, 11, 5, threads=0)(*given)
        same(expected, xaitk.DRISEStack(40, 6, 0.3, 11, 5, threads=threads)(*given))
        expected = drise.RandomGridStack(40, (3, 5), 0.3, 11, 5, threads=0)(*given)
        same(expected, xaitk.RandomGridStack(40, (3, 5), 0.3, 11, 5, threads=threads)(*given))
    assert len(xaitk.DRISEStack(4, 3, 0.5)(image, boxes, scores, Detects(never=True))) == 0


@pytest.mark.timing
def test_rise_is_faster_and_smaller(tmp_path: Path) -> None:
    """2000 masks on 224^2 with a light network. Seconds are of the processor, on both sides of a ratio."""
    path = tmp_path / "rows.json"
    commands.run([TESTS / "benchmarks" / "xaitk.py", "--only", "RISE", "--rounds", 1, "--json", path], check=True)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["difference"] < 1e-4
    assert row["times faster"] >= 3
    assert row["times less memory"] >= 5


# xaitk-saliency's objects used here: perturbers, scorings and whole methods.
TARGET = ms.ClassScore("all", "softmax")
TWO_IMAGES = torch.rand(2, 3, 18, 22, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Three classes of an image or volume."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return 3 * self.layers(batch)


NET = Net(3, 18, 22)


def scaled_maps(maps: torch.Tensor) -> torch.Tensor:
    return maps / maps.abs().amax(dim=(2, 3), keepdim=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 0.5
    assert_close(found, expected, within=1e-4)  # scaled up after scores have cancelled


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (RISEGrid(40, 4, 0.5, 3, threads=0), ms.masks.RISEMasks(40, 4, 0.5, 3)),
        (SlidingWindow((5, 6), (3, 4)), ms.masks.SlidingWindowMasks((5, 6), (3, 4))),
    ],
)
def test_masks_equal_those_of_a_perturber(theirs: PerturbImage, ours: ms.masks.base.Masks) -> None:
    found, expected = (each.bind(TWO_IMAGES[0]) for each in (PerturbImageMasks(theirs), ours))
    assert len(found) == len(expected)
    for indices in (range(3, 9), [7, 0, 7]):
        assert_close(found.render(indices), expected.render(indices), within=MASKS)
    weights = torch.rand(len(found), 2)
    sums = [each.weighted_sum(range(len(each)), weights) for each in (found, expected)]
    assert_close(*sums, within=SINGLE)  # of masks in single precision


def test_perturbers_that_do_not_fit_are_refused() -> None:
    class Odd(PerturbImage):
        def __init__(self, array: Any) -> None:
            self.array = array

        def perturb(self, ref_image: np.ndarray) -> np.ndarray:
            return self.array

        def get_config(self) -> dict[str, Any]:
            return {}

    for array, message in (
        (np.ones((4, 5, 5)), r"Odd must make masks \(masks, 18, 22\), at least one .* got float64 \(4, 5, 5\)"),
        (np.full((4, 18, 22), 1.5), r"in \[0, 1\], 1 where the image is kept, got \[1.5, 1.5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            PerturbImageMasks(Odd(array)).bind(TWO_IMAGES[0])
    with pytest.raises(ValueError, match=r"at least one and the same for all channels"):
        PerturbImageMasks(MCRISEGrid(4, 4, 0.5, 3)).bind(TWO_IMAGES[0])
    with pytest.raises(ValueError, match=r"explains 2D images, got one of shape \(1, 6, 7, 5\)"):
        PerturbImageMasks(SlidingWindow((2, 2), (2, 2))).bind(torch.rand(1, 6, 7, 5))
    with pytest.raises(ValueError, match="`perturber` must be a PerturbImage of xaitk-saliency"):
        PerturbImageMasks(RISEScoring())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keep a cell with `p1` 0.3"):
        ms.PerturbationInferer(PerturbImageMasks(RISEGrid(5, 3, 0.3)), TARGET, ms.estimators.RISEScoring(0.5))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (RISEScoring(0.4), ms.estimators.RISEScoring(0.4, "debiased")),
        (RISEScoring(), ms.estimators.RISEScoring(form="plain")),
        (OcclusionScoring(), ms.estimators.OcclusionScoring()),
    ],
)
def test_any_scoring_is_an_estimator(theirs: GenerateClassifierConfidenceSaliency, ours: Any) -> None:
    masks = ms.masks.RISEMasks(40, 4, 0.4, 3)
    found = ms.PerturbationInferer(masks, TARGET, ConfidenceScoring(theirs))(TWO_IMAGES, NET)
    close(found, scaled_maps(ms.PerturbationInferer(masks, TARGET, ours)(TWO_IMAGES, NET)))


def test_scorings_that_do_not_fit_are_refused() -> None:
    class Odd(GenerateClassifierConfidenceSaliency):
        def generate(self, *args: Any) -> np.ndarray:
            return np.full((3, 18, 22), np.nan) if len(args[1]) == 7 else np.zeros((2, 18, 22))

        def get_config(self) -> dict[str, Any]:
            return {}

    def explain(masks: Any, estimator: Any) -> Any:
        return ms.PerturbationInferer(masks, TARGET, estimator)(TWO_IMAGES[:1], NET)

    with pytest.raises(ValueError, match=r"Odd must make maps \(3, 18, 22\) \(scores, \*spatial\), got \(2, 18, 22\)"):
        explain(ms.masks.RISEMasks(5), ConfidenceScoring(Odd()))
    with pytest.raises(ValueError, match="Odd made a map with NaN"):
        explain(ms.masks.RISEMasks(7), ConfidenceScoring(Odd()))
    with pytest.raises(ValueError, match="reads one mask for all channels"):
        explain(ms.masks.ChannelMasks(ms.masks.SlidingWindowMasks(6)), ConfidenceScoring(OcclusionScoring()))
    with pytest.raises(ValueError, match=r"keep a cell with `p1` 0\.5"):
        explain(ms.masks.RISEMasks(5), ConfidenceScoring(RISEScoring(0.4)))


@pytest.mark.parametrize(("batch", "fill"), [(1, None), (7, ms.ConstantFill([0.2, 0.9, 0.5])), (7, ms.BlurFill(2.0))])
def test_a_whole_method(batch: int, fill: Any) -> None:
    settings: dict[str, Any] = {"target": TARGET, "mask_batch_size": batch, "fill": fill}
    found = BlackBoxInferer(RISEStack(40, 4, 0.4, 3), **settings)(TWO_IMAGES, NET)
    close(found, scaled_maps(ms.rise(40, 4, 0.4, 3, form="debiased", **settings)(TWO_IMAGES, NET)))
    found = BlackBoxInferer(SlidingWindowStack((5, 6), (3, 4)), **settings)(TWO_IMAGES, NET)
    close(found, scaled_maps(ms.sliding_window((5, 6), (3, 4), **settings)(TWO_IMAGES, NET)))


def test_whole_methods_that_do_not_fit_are_refused() -> None:
    method = RISEStack(20, 4, 0.4, 3)
    explain = BlackBoxInferer(method, TARGET)
    with pytest.raises(CaseError, match=r"explains 2D images, got one of shape \(1, 6, 7, 5\)"):
        explain(torch.rand(1, 1, 6, 7, 5), Net(1, 6, 7, 5))
    with pytest.raises(ValueError, match="`method` must be a GenerateImageClassifierBlackboxSaliency"):
        BlackBoxInferer(RISEScoring(), TARGET)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be shared between workers: let these share cases"):
        explain.score(TWO_IMAGES, NET, part=Part(0, 2))


STACK = "xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise.RISEStack"


def test_a_class_is_a_method_by_its_dotted_path() -> None:
    assert list(own_settings(find_method(STACK))) == ["n", "s", "p1", "seed", "threads", "debiased"]
    assert describe(STACK).splitlines()[1] == "  --n (needed)"
    explain = ChosenMethod(STACK, {"n": 20, "s": 4, "p1": 0.4, "seed": 3})(target=TARGET)
    assert_same_bits(explain(TWO_IMAGES, NET), BlackBoxInferer(RISEStack(20, 4, 0.4, 3), TARGET)(TWO_IMAGES, NET))
    with pytest.raises(ValueError, match=r"needs --n, --s, --p1"):
        ChosenMethod(STACK)
    with pytest.raises(ValueError, match=r"RISEStack cannot be made of .*p1"):
        ChosenMethod(STACK, {"n": 20, "s": 4, "p1": 7})(target=TARGET)


def test_other_classes_are_no_methods() -> None:
    assert as_method(RISEScoring) is None
    assert as_method(GenerateImageClassifierBlackboxSaliency) is None
    with pytest.raises(ValueError, match=r"must be a function as in monai_saliency\.methods"):
        find_method("xaitk_saliency.impls.gen_classifier_conf_sal.rise_scoring.RISEScoring")
