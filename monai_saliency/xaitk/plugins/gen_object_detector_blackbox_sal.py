"""Whole methods for detectors: image, detections and black box in, one map per detection out."""

from __future__ import annotations

import numpy as np
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from xaitk_saliency import (
    GenerateDetectorProposalSaliency,
    GenerateObjectDetectorBlackboxSaliency,
    PerturbImage,
)

from monai_saliency.xaitk.plugins.base import Fill, Parts, Stack
from monai_saliency.xaitk.plugins.gen_detector_prop_sal import DRISEScoring
from monai_saliency.xaitk.plugins.perturb_image import RandomGrid, RISEGrid

__all__ = ["DRISEStack", "PerturbationOcclusion", "RandomGridStack"]


class PerturbationOcclusion(Parts, GenerateObjectDetectorBlackboxSaliency):
    """Any perturber and any scoring.

    A black box that wraps a network (:class:`monai_saliency.xaitk.Detector`) is run in batches on its device.

    Args:
        perturber: makes the masks.
        generator: makes the maps.
        fill: what replaces hidden pixels, in the image's unit: a number, one per channel, or an image; None for zeros.
        threads: kept for configurations. The engine uses torch's threads.
    """

    interface = GenerateDetectorProposalSaliency

    def __init__(
        self,
        perturber: PerturbImage,
        generator: GenerateDetectorProposalSaliency,
        fill: Fill = None,
        threads: int | None = 0,
    ) -> None:
        super().__init__(perturber, generator, fill, threads)

    def _generate(
        self,
        ref_image: np.ndarray,
        bboxes: np.ndarray,
        scores: np.ndarray,
        blackbox: DetectImageObjects,
        objectness: np.ndarray | None = None,
    ) -> np.ndarray:
        from monai_saliency.xaitk.loop import detector_maps

        parts = self._perturber, self._generator, self.fill, self.device
        return detector_maps(ref_image, bboxes, scores, blackbox, objectness, *parts)


class _Stack(Stack, GenerateObjectDetectorBlackboxSaliency):
    def _generate(
        self,
        ref_image: np.ndarray,
        bboxes: np.ndarray,
        scores: np.ndarray,
        blackbox: DetectImageObjects,
        objectness: np.ndarray | None = None,
    ) -> np.ndarray:
        return self._po.generate(ref_image, bboxes, scores, blackbox, objectness)


class DRISEStack(_Stack):
    """D-RISE (Petsiuk et al., CVPR 2021): random masks, weighted by how well a detection is still found.

    With a seed, the maps are those of xaitk-saliency's ``DRISEStack(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws; None draws a new one for each object.
        fill: what replaces hidden pixels, see :class:`PerturbationOcclusion`.
        threads: kept for configurations. The engine uses torch's threads.

    Raises:
        ValueError: when ``p1`` is not in [0, 1].

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Detector
        >>> def network(images):
        ...     found = {"boxes": torch.tensor([[1.0, 1, 4, 4]]), "labels": torch.tensor([0])}
        ...     return [found | {"scores": each.mean().reshape(1)} for each in images]
        >>> stack = DRISEStack(n=20, s=2, p1=0.5, seed=0)
        >>> boxes, scores = np.array([[1, 1, 4, 4]]), np.array([[1.0]])
        >>> stack(np.ones((6, 6), np.uint8), boxes, scores, Detector(network, labels=1)).shape
        (1, 6, 6)
    """

    def __init__(
        self,
        n: int,
        s: int,
        p1: float,
        seed: int | None = None,
        fill: Fill = None,
        threads: int | None = 0,
    ) -> None:
        self.n, self.s, self.p1, self.seed, self.threads = n, s, p1, seed, threads
        self._po = PerturbationOcclusion(RISEGrid(n, s, p1, seed, threads), DRISEScoring(), fill, threads)


class RandomGridStack(_Stack):
    """D-RISE (Petsiuk et al., CVPR 2021) with masks whose cells have one size, whatever the image's.

    With a seed, the maps are those of xaitk-saliency's ``RandomGridStack(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: height and width of a cell, in pixels.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws; None draws a new one for each object.
        fill: what replaces hidden pixels, see :class:`PerturbationOcclusion`.
        threads: kept for configurations. The engine uses torch's threads.

    Raises:
        ValueError: when ``p1`` is not in [0, 1].

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Detector
        >>> def network(images):
        ...     found = {"boxes": torch.tensor([[1.0, 1, 4, 4]]), "labels": torch.tensor([0])}
        ...     return [found | {"scores": each.mean().reshape(1)} for each in images]
        >>> stack = RandomGridStack(n=20, s=(2, 2), p1=0.5, seed=0)
        >>> boxes, scores = np.array([[1, 1, 4, 4]]), np.array([[1.0]])
        >>> stack(np.ones((6, 6), np.uint8), boxes, scores, Detector(network, labels=1)).shape
        (1, 6, 6)
    """

    def __init__(
        self,
        n: int,
        s: tuple[int, int],
        p1: float,
        seed: int | None = None,
        fill: Fill = None,
        threads: int = 0,
    ) -> None:
        grid = RandomGrid(n, s, p1, seed, threads)
        self.n, self.s, self.p1, self.seed, self.threads = n, grid.s, p1, seed, threads
        self._po = PerturbationOcclusion(grid, DRISEScoring(), fill, threads)
