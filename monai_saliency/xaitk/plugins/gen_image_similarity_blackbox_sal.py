"""Whole methods for descriptors: image, queries and black box in, one map per query out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from xaitk_saliency import (
    GenerateDescriptorSimilaritySaliency,
    GenerateImageSimilarityBlackboxSaliency,
    PerturbImage,
)

from monai_saliency.xaitk.plugins.base import Fill, Parts, Stack
from monai_saliency.xaitk.plugins.gen_descriptor_sim_sal import SimilarityScoring
from monai_saliency.xaitk.plugins.perturb_image import SlidingWindow

__all__ = ["PerturbationOcclusion", "SBSMStack"]


class PerturbationOcclusion(Parts, GenerateImageSimilarityBlackboxSaliency):
    """Any perturber and any scoring.

    A black box that wraps a network (:class:`monai_saliency.xaitk.Descriptor`) is run in batches on its device.

    Args:
        perturber: makes the masks.
        generator: makes the maps.
        fill: what replaces hidden pixels, in the image's unit: a number, one per channel, or an image; None for zeros.
        threads: kept for configurations. The engine uses torch's threads.
    """

    interface = GenerateDescriptorSimilaritySaliency

    def __init__(
        self,
        perturber: PerturbImage,
        generator: GenerateDescriptorSimilaritySaliency,
        fill: Fill = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(perturber, generator, fill, threads)

    def _generate(
        self, ref_image: np.ndarray, query_images: Sequence[np.ndarray], blackbox: ImageDescriptorGenerator
    ) -> np.ndarray:
        from monai_saliency.xaitk.loop import descriptor_maps

        parts = self._perturber, self._generator, self.fill, self.device
        return descriptor_maps(ref_image, query_images, blackbox, *parts)


class SBSMStack(Stack, GenerateImageSimilarityBlackboxSaliency):
    """Windows that are hidden in turn, and how far the descriptor moves away from each query's (SBSM: Dong et al., CVPR
    workshops 2019).

    Args:
        window_size: height and width of a window.
        stride: steps from window to window, down and across.
        proximity_metric: a distance of ``scipy.spatial.distance.cdist``.
        fill: what replaces hidden pixels, see :class:`PerturbationOcclusion`.
        threads: kept for configurations. The engine uses torch's threads.

    Raises:
        ValueError: when SciPy has no such distance.

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Descriptor
        >>> image, query = np.arange(36, dtype=np.uint8).reshape(6, 6), np.ones((6, 6), np.uint8)
        >>> SBSMStack((2, 2), (2, 2))(image, [query], Descriptor(torch.nn.Flatten())).shape
        (1, 6, 6)
    """

    def __init__(
        self,
        window_size: tuple[int, int] = (50, 50),
        stride: tuple[int, int] = (20, 20),
        proximity_metric: str = "euclidean",
        fill: Fill = None,
        threads: int | None = None,
    ) -> None:
        windows = SlidingWindow(window_size, stride)
        self.window_size, self.stride, self.threads = windows.window_size, windows.stride, threads
        self.proximity_metric = proximity_metric
        self._po = PerturbationOcclusion(windows, SimilarityScoring(proximity_metric), fill, threads)

    def _generate(
        self, ref_image: np.ndarray, query_images: Sequence[np.ndarray], blackbox: ImageDescriptorGenerator
    ) -> np.ndarray:
        return self._po.generate(ref_image, query_images, blackbox)
