"""Black boxes in plain NumPy, double precision and nonlinear, for us and for xaitk-saliency alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox

__all__ = ["BOXES", "CLASSES", "BlackBox", "XaitkClassifier", "XaitkDescriptors", "XaitkDetector", "channel_last"]

CLASSES, BOXES = 4, 3


class BlackBox:
    """Numbers of images ``(C, *spatial)``.

    Args:
        shape: of an image.
        outputs: how many numbers.
        seed: of the weights.
    """

    def __init__(self, shape: tuple[int, ...], outputs: int = CLASSES, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.first = rng.normal(size=(6, *shape)) / np.sqrt(np.prod(shape))
        self.second = 3 * rng.normal(size=(outputs, 6))
        self.extent = max(shape[1:])

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return self.second @ np.tanh(np.tensordot(self.first, image, axes=image.ndim))

    def odds(self, image: np.ndarray) -> np.ndarray:
        """Probabilities of the classes."""
        odds = np.exp(self(image) - self(image).max())
        return odds / odds.sum()

    def boxes(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Corners ``(BOXES, 2 * axes)``, whole voxels, the lower ones first, and scores ``(BOXES, CLASSES)``."""
        dims = image.ndim - 1
        numbers = 1 / (1 + np.exp(-self(image).reshape(BOXES, 2 * dims + CLASSES)))
        low = np.round(numbers[:, :dims] * self.extent / 3)
        high = low + 3 + np.round(numbers[:, dims : 2 * dims] * self.extent / 2)
        return np.concatenate([low, high], axis=1), numbers[:, 2 * dims :]

    @staticmethod
    def box_outputs(dims: int) -> int:
        """The number of outputs that :meth:`boxes` needs."""
        return BOXES * (2 * dims + CLASSES)

    def classify(self, batch: torch.Tensor) -> torch.Tensor:
        """For us: probabilities."""
        return torch.from_numpy(np.stack([self.odds(image) for image in batch.numpy()]))

    def describe(self, batch: torch.Tensor) -> torch.Tensor:
        """For us: embeddings."""
        return torch.from_numpy(np.stack([self(image) for image in batch.numpy()]))

    def detect(self, batch: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """For us: boxes that end behind their last voxel."""
        found = []
        for image in batch.numpy():
            corners, scores = self.boxes(image)
            corners[:, corners.shape[1] // 2 :] += 1
            found.append(
                {
                    "boxes": torch.from_numpy(corners),
                    "labels": torch.from_numpy(scores.argmax(axis=1)),
                    "labels_scores": torch.from_numpy(scores),
                }
            )
        return found


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
