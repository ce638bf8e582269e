"""xaitk-saliency's loops: masks, black box, maps, on the engine's masks and estimators.

A black box is asked in xaitk-saliency's own way: once for the image, then once for all perturbed images, which are made
while it takes them. One that wraps a network (:mod:`monai_saliency.xaitk.networks`) is not asked: the network is run by
:class:`~monai_saliency.PerturbationInferer`, in batches on its device.

Perturbers and scorings that are not of the engine give and take all masks at once, as their interfaces say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from xaitk_saliency import (
    GenerateClassifierConfidenceSaliency,
    GenerateDescriptorSimilaritySaliency,
    GenerateDetectorProposalSaliency,
    PerturbImage,
)
from xaitk_saliency.utils.detection import format_detection

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.drise import DRISEScoring as DRISE
from monai_saliency.estimators.similarity import SimilarityScoring as Similarity
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.xaitk.array_masks import ArrayMasks
from monai_saliency.xaitk.arrays import bound_to, map_from, perturbed_images, rendered
from monai_saliency.xaitk.detections import match, matches, row_of
from monai_saliency.xaitk.networks import Classifier, Descriptor, Detector
from monai_saliency.xaitk.plugins.base import EnginePerturber, EngineScoring, scaled
from monai_saliency.xaitk.plugins.gen_descriptor_sim_sal import SimilarityScoring
from monai_saliency.xaitk.plugins.gen_detector_prop_sal import DRISEScoring

__all__ = ["classified", "classifier_maps", "descriptor_maps", "detector_maps"]


@dataclass(frozen=True)
class _Perturbed:
    """One image, its masks and its fill."""

    image: np.ndarray
    masks: Masks
    kind: type[np.generic]
    fill: Any
    device: Any

    @classmethod
    def of(cls, image: np.ndarray, perturber: PerturbImage, fill: Any, device: Any) -> _Perturbed:
        if isinstance(perturber, EnginePerturber):
            return cls(image, perturber.masks(image.shape[:2]), perturber.mask_type, fill, device)
        array = perturber(image)
        return cls(image, ArrayMasks(array), array.dtype.type, fill, device)

    @cached_property
    def bound(self) -> BoundMasks:
        return bound_to(self.masks, self.image, self.device, self.kind)

    def array(self) -> np.ndarray:
        """All masks at once, for scorings that need them."""
        if isinstance(self.masks, ArrayMasks):
            return self.masks.array
        return rendered(self.masks, self.image, self.kind, self.device)

    def images(self, in_image_type: bool) -> Iterable[np.ndarray]:
        return perturbed_images(self.image, self.bound, self.kind, self.fill, in_image_type)

    def maps(self, estimator: Estimator, reference: Any, scores: Any) -> np.ndarray:
        return map_from(estimator, self.bound, reference, scores)


def classifier_maps(
    image: np.ndarray,
    blackbox: ClassifyImage,
    perturber: PerturbImage,
    generator: GenerateClassifierConfidenceSaliency,
    fill: Any = None,
    device: torch.device | str | None = None,
) -> np.ndarray:
    """Maps of a classifier.

    Args:
        image: ``(H, W)`` or ``(H, W, C)``.
        blackbox: classifies images.
        perturber: makes the masks.
        generator: makes the maps.
        fill: what replaces hidden pixels, in the image's unit; None for zeros.
        device: where masks and maps are made; None for a GPU where there is one.

    Returns:
        ``(classes, H, W)`` in [-1, 1], or what the generator makes of the classes.

    Raises:
        ValueError: when the black box does not classify every image, or a part does not fit the image.
    """
    perturbed = _Perturbed.of(image, perturber, fill, device)
    if isinstance(blackbox, Classifier):
        reference, scores = blackbox.scores(image, perturbed.masks, fill)
    else:
        reference, scores = classified(blackbox, image, perturbed.images(False), len(perturbed.bound))
    if not isinstance(generator, EngineScoring):
        return generator(reference, scores, perturbed.array())
    reference, scores = generator.scores(reference, scores)
    return generator.finished(perturbed.maps(generator.estimator(), reference, scores))


def classified(
    blackbox: ClassifyImage, image: np.ndarray, perturbed: Iterable[np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The confidences of an image ``(K,)`` and of its perturbed copies ``(count, K)``.

    Args:
        blackbox: classifies images.
        image: the image.
        perturbed: the perturbed images, made while they are classified.
        count: how many there are.

    Raises:
        ValueError: when the black box does not classify every image.
    """
    labels = list(blackbox.get_labels())

    def confidences(given: Any) -> list[float]:
        return [given[label] for label in labels]

    (first,) = blackbox.classify_images([image])
    scores = _rows(blackbox.classify_images(perturbed), confidences, count)
    return np.asarray(confidences(first), dtype=np.float64), scores


def detector_maps(
    image: np.ndarray,
    bboxes: np.ndarray,
    scores: np.ndarray,
    blackbox: DetectImageObjects,
    objectness: np.ndarray | None,
    perturber: PerturbImage,
    generator: GenerateDetectorProposalSaliency,
    fill: Any = None,
    device: torch.device | str | None = None,
) -> np.ndarray:
    """Maps of detections.

    Args:
        image: ``(H, W)`` or ``(H, W, C)``.
        bboxes: ``(detections, 4)``, corners, columns before rows.
        scores: ``(detections, classes)``.
        blackbox: finds detections.
        objectness: ``(detections,)``; None for 1.
        perturber: makes the masks.
        generator: makes the maps.
        fill: what replaces hidden pixels, in the image's unit; None for zeros.
        device: where masks and maps are made; None for a GPU where there is one.

    Returns:
        ``(detections, H, W)`` in [-1, 1]; an array without maps where nothing is detected in any perturbed image.

    Raises:
        ValueError: when detections do not fit each other, or a part does not fit the image.
    """
    references = format_detection(bboxes, scores, objectness).astype(np.float64)
    perturbed = _Perturbed.of(image, perturber, fill, device)
    if isinstance(blackbox, Detector) and isinstance(generator, DRISEScoring):
        counts: list[int] = []

        def matched(rows: torch.Tensor) -> torch.Tensor:
            counts.append(rows.shape[1])
            return match(rows, torch.from_numpy(references))

        found = blackbox.scores(image, perturbed.masks, fill, matched)
        if not any(counts):
            return np.array([])
        return scaled(perturbed.maps(DRISE("plain"), np.zeros(found.shape[1]), found))
    labels: list[Any] = []
    every: list[np.ndarray] = []
    engine = isinstance(generator, DRISEScoring)

    def read(detections: Any) -> Any:
        rows = row_of(detections, labels)
        if not engine:
            every.append(rows)
            return [0.0]
        if not len(rows):
            return np.zeros(len(references))
        _check_classes(references, rows)
        return matches(references, rows[None])[0]

    found = _rows(blackbox.detect_objects(perturbed.images(True)), read, len(perturbed.bound))
    if not labels:
        return np.array([])
    if engine:
        return scaled(perturbed.maps(DRISE("plain"), np.zeros(len(references)), found))
    return generator(references, _padded(every, 5 + len(labels)), perturbed.array())


def descriptor_maps(
    image: np.ndarray,
    queries: Sequence[np.ndarray],
    blackbox: ImageDescriptorGenerator,
    perturber: PerturbImage,
    generator: GenerateDescriptorSimilaritySaliency,
    fill: Any = None,
    device: torch.device | str | None = None,
) -> np.ndarray:
    """Maps of the similarity with queries.

    Args:
        image: ``(H, W)`` or ``(H, W, C)``.
        queries: images of any size.
        blackbox: makes descriptors.
        perturber: makes the masks.
        generator: makes the maps.
        fill: what replaces hidden pixels, in the image's unit; None for zeros.
        device: where masks and maps are made; None for a GPU where there is one.

    Returns:
        ``(queries, H, W)`` in [-1, 1].

    Raises:
        ValueError: when the black box does not describe every image, or a part does not fit the image.
    """
    (first,) = blackbox.generate_arrays_from_images([image])
    reference = np.asarray(first)
    others = np.asarray(list(blackbox.generate_arrays_from_images(queries)))
    perturbed = _Perturbed.of(image, perturber, fill, device)
    alone = isinstance(generator, SimilarityScoring) and not generator.of_all

    def similarities(descriptors: np.ndarray) -> np.ndarray:
        return generator.similarities(others, descriptors)  # type: ignore[attr-defined]

    if isinstance(blackbox, Descriptor):
        read = similarities if alone else None
        scores = blackbox.scores(image, perturbed.masks, fill, read)
    else:

        def row(descriptor: np.ndarray) -> np.ndarray:
            return similarities(np.asarray(descriptor)[None])[0] if alone else np.asarray(descriptor)

        found = blackbox.generate_arrays_from_images(perturbed.images(True))
        scores = _rows(found, row, len(perturbed.bound))
    if not isinstance(generator, SimilarityScoring):
        return generator(reference, others, scores, perturbed.array())
    if not alone:
        scores = similarities(scores)
    return scaled(perturbed.maps(Similarity(), generator.own(reference, others), scores))


def _rows(given: Iterable[Any], read: Callable[[Any], Any], count: int) -> np.ndarray:
    """What a black box gives for each of ``count`` perturbed images, one row each.

    Raises:
        ValueError: when it gives more or fewer.
    """
    rows = [read(each) for each in given]
    if len(rows) != count:
        raise ValueError(f"the black box gave {len(rows)} results for {count} perturbed images: it must give one each")
    return np.asarray(rows, dtype=np.float64)


def _check_classes(references: np.ndarray, rows: np.ndarray) -> None:
    if references.shape[1] != rows.shape[1]:
        raise ValueError(
            "Dimensions of reference detections and perturbed detections do not match. Both should be of dimension "
            f"(n_classes + 4 + 1). Got {references.shape[1]} and {rows.shape[1]}"
        )


def _padded(every: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Rows of each image, as many as the most have: ones with an objectness of 0 behind them, as xaitk-saliency."""
    padded = np.ones((len(every), max(map(len, every)), width))
    padded[:, :, 4] = 0
    for place, rows in zip(padded, every, strict=True):
        if len(rows):
            place[: len(rows)] = rows
    return padded
