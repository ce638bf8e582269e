"""Our parts for xaitk-saliency and its own: the same masks, the same black box, the same maps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import commands
from helpers.paths import TESTS
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import rise as rise_stack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import slidingwindow as window_stack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import sbsm
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import drise
from xaitk_saliency.impls.perturb_image import random_grid, rise, sliding_radial, sliding_window

from monai_saliency import xaitk

RNG = np.random.default_rng(3)
IMAGES: dict[str, np.ndarray] = {
    "square": RNG.random((20, 20)),
    "wide colour": 255 * RNG.random((17, 26, 3)),
    "tall float32": RNG.normal(size=(26, 14, 2)).astype(np.float32),
    "bytes": RNG.integers(0, 256, (18, 23, 3), dtype=np.uint8),
    "16 bits": RNG.integers(0, 60000, (18, 16), dtype=np.uint16),
}
RADIAL = (4, 6.5), (5, 4)
#: theirs and ours
PERTURBERS: dict[str, tuple[Any, Any]] = {
    "rise": (rise.RISEGrid(30, 5, 0.4, 7, threads=0), xaitk.RISEGrid(30, 5, 0.4, 7)),
    "cells": (random_grid.RandomGrid(30, (4, 5), 0.4, 7, threads=0), xaitk.RandomGrid(30, (4, 5), 0.4, 7, 9)),
    "windows": (sliding_window.SlidingWindow((6, 5), (3, 4)), xaitk.SlidingWindow((6, 5), (3, 4))),
    "radial": (sliding_radial.SlidingRadial(*RADIAL), xaitk.SlidingRadial(*RADIAL)),
    "blurred": (sliding_radial.SlidingRadial(*RADIAL, (2, 1.5)), xaitk.SlidingRadial(*RADIAL, (2, 1.5))),
}


class Numbers:
    """Four numbers in (0, 1) of an image, each from a region of its own, and how often images were asked for."""

    def __init__(self) -> None:
        self.calls: list[int] = []

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
        count = 0
        for image in images:
            count += 1
            yield self.of(image)
        self.calls.append(count)

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
        super().__init__()
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
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", PERTURBERS)
def test_masks(kind: str) -> None:
    theirs, ours = PERTURBERS[kind]
    for image in IMAGES.values():
        expected, found = theirs(image), ours(image)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("threads", [0, 3])
def test_stacks(name: str, threads: int) -> None:
    """A seed gives xaitk-saliency's maps of one thread, for any number of threads."""
    image = IMAGES[name]
    for debiased in (True, False):
        theirs: Any = rise_stack.RISEStack(40, 6, 0.3, 11, threads=0, debiased=debiased)
        ours: Any = xaitk.RISEStack(40, 6, 0.3, 11, threads=threads, debiased=debiased)
        theirs.fill = ours.fill = 9
        same(theirs(image, Classifies()), ours(image, Classifies()))
    windows = (7, 5), (3, 2)
    of_windows = xaitk.SlidingWindowStack(*windows, threads)
    same(window_stack.SlidingWindowStack(*windows)(image, Classifies()), of_windows(image, Classifies()))
    queries = [IMAGES["square"], IMAGES["bytes"], IMAGES["tall float32"]]
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
    commands.run([TESTS / "benchmarks" / "xaitk.py", "--only", "RISE", "--rounds", 2, "--json", path], check=True)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["difference"] < 1e-4
    assert row["times faster"] >= 3
    assert row["times less memory"] >= 5
