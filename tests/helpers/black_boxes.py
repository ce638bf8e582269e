"""Black boxes for xaitk-saliency, in NumPy alone: nonlinear, in double precision, of images (H, W) or (H, W, C)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox


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
