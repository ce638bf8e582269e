"""Whole methods for classifiers: image and black box in, one map per class out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from xaitk_saliency import (
    GenerateClassifierConfidenceSaliency,
    GenerateImageClassifierBlackboxSaliency,
    PerturbImage,
)

from monai_saliency.xaitk.plugins.base import Configured, Parts, Stack, scaled
from monai_saliency.xaitk.plugins.gen_classifier_conf_sal import MCRISEScoring, OcclusionScoring, RISEScoring
from monai_saliency.xaitk.plugins.perturb_image import MCRISEGrid, RISEGrid, SlidingWindow

__all__ = ["MCRISEStack", "PerturbationOcclusion", "RISEStack", "SlidingWindowStack"]


class PerturbationOcclusion(Parts, GenerateImageClassifierBlackboxSaliency):
    """Any perturber and any scoring.

    A black box that wraps a network (:class:`monai_saliency.xaitk.Classifier`) is run in batches on its device.

    Args:
        perturber: makes the masks.
        generator: makes the maps.
        threads: kept for configurations. The engine uses torch's threads.
    """

    interface = GenerateClassifierConfidenceSaliency

    def __init__(
        self, perturber: PerturbImage, generator: GenerateClassifierConfidenceSaliency, threads: int = 0
    ) -> None:
        super().__init__(perturber, generator, threads=threads)

    def _generate(self, ref_image: np.ndarray, blackbox: ClassifyImage) -> np.ndarray:
        from monai_saliency.xaitk.loop import classifier_maps

        return classifier_maps(ref_image, blackbox, self._perturber, self._generator, self.fill, self.device)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["fill"]  # which is set at run time only
        return config


class _Stack(Stack, GenerateImageClassifierBlackboxSaliency):
    def _generate(self, ref_image: np.ndarray, blackbox: ClassifyImage) -> np.ndarray:
        return self._po.generate(ref_image, blackbox)


class RISEStack(_Stack):
    """RISE (Petsiuk et al., BMVC 2018): random masks, weighted by the confidence while they are in place.

    With a seed, the maps are those of xaitk-saliency's ``RISEStack(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws; None draws a new one for each object.
        threads: kept for configurations. The engine uses torch's threads.
        debiased: take ``p1`` off the masks (Hatakeyama et al., ACCV 2020).

    Raises:
        ValueError: when ``p1`` is not in [0, 1].

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Classifier
        >>> stack = RISEStack(n=20, s=2, p1=0.5, seed=0)
        >>> stack(np.ones((6, 6), np.uint8), Classifier(torch.nn.Flatten(), labels=36, activation="none")).shape
        (36, 6, 6)
    """

    def __init__(
        self, n: int, s: int, p1: float, seed: int | None = None, threads: int = 0, debiased: bool = True
    ) -> None:
        self.n, self.s, self.p1, self.seed, self.threads, self.debiased = n, s, p1, seed, threads, debiased
        scoring = RISEScoring(p1 if debiased else 0.0)
        self._po = PerturbationOcclusion(RISEGrid(n, s, p1, seed, threads), scoring, threads)


class SlidingWindowStack(_Stack):
    """Windows that are hidden in turn, and the average drop of the confidence (Zeiler and Fergus, ECCV 2014).

    Args:
        window_size: height and width of a window.
        stride: steps from window to window, down and across.
        threads: kept for configurations. The engine uses torch's threads.

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Classifier
        >>> stack = SlidingWindowStack((2, 2), (2, 2))
        >>> stack(np.ones((6, 6), np.uint8), Classifier(torch.nn.Flatten(), labels=36, activation="none")).shape
        (36, 6, 6)
    """

    def __init__(
        self, window_size: tuple[int, int] = (50, 50), stride: tuple[int, int] = (20, 20), threads: int = 0
    ) -> None:
        windows = SlidingWindow(window_size, stride)
        self.window_size, self.stride, self.threads = windows.window_size, windows.stride, threads
        self._po = PerturbationOcclusion(windows, OcclusionScoring(), threads)


class MCRISEStack(Configured, GenerateImageClassifierBlackboxSaliency):
    """MC-RISE (Hatakeyama et al., ACCV 2020): each hidden cell is replaced by one of several colours, and each colour
    has its own map of each class.

    With a seed, the maps are those of xaitk-saliency's ``MCRISEStack(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in [0, 1] that a cell is kept.
        fill_colors: the colours, each one number per channel, in [0, 255].
        seed: of all draws; None draws a new one for each object.
        threads: kept for configurations. The engine uses torch's threads.

    Attributes:
        device: where masks and maps are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run
            time.

    Raises:
        ValueError: when ``p1`` is not in [0, 1], when there is no colour, or when colours differ in their channels.

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Classifier
        >>> stack = MCRISEStack(n=20, s=2, p1=0.5, fill_colors=[[0], [255]], seed=0)
        >>> maps = stack(np.ones((6, 6, 1), np.uint8), Classifier(torch.nn.Flatten(), labels=36, activation="none"))
        >>> maps.shape
        (2, 36, 6, 6)
    """

    device: str | None = None

    def __init__(
        self,
        n: int,
        s: int,
        p1: float,
        fill_colors: Sequence[Sequence[int]],
        seed: int | None,
        threads: int = 0,
    ) -> None:
        if len(fill_colors) == 0:
            raise ValueError("At least one fill color must be provided")
        if len({len(each) for each in fill_colors}) > 1:
            raise ValueError(f"All fill colors must have the same number of channels, got {fill_colors}")
        self.n, self.s, self.p1, self.seed, self.threads = n, s, p1, seed, threads
        self.fill_colors = [list(each) for each in fill_colors]
        self._perturber = MCRISEGrid(n, s, p1, len(fill_colors), seed, threads)
        self._generator = MCRISEScoring(len(fill_colors), p1)
        self._threads = threads
        self._fill_colors = self.fill_colors

    def _generate(self, ref_image: np.ndarray, blackbox: ClassifyImage) -> np.ndarray:
        """Maps ``(colours, classes, H, W)``."""
        from monai_saliency.xaitk.fills import fill_maps

        masks, estimator = self._perturber.masks(self.fill_colors), self._generator.estimator()
        return scaled(fill_maps(ref_image, blackbox, masks, estimator, self.fill_colors, self.device))
