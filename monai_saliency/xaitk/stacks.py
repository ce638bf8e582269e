"""Whole methods for xaitk-saliency: its own pipelines and scorings, with our masks in them.

Parameters are the same as in xaitk-saliency's classes of these names; ``threads`` apply the masks. Where an interface
takes a ``fill`` at run time, it is an attribute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from xaitk_saliency import (
    GenerateImageClassifierBlackboxSaliency,
    GenerateImageSimilarityBlackboxSaliency,
    GenerateObjectDetectorBlackboxSaliency,
    PerturbImage,
)
from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.rise_scoring import RISEScoring
from xaitk_saliency.impls.gen_descriptor_sim_sal.similarity_scoring import SimilarityScoring
from xaitk_saliency.impls.gen_detector_prop_sal.drise_scoring import DRISEScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import occlusion_based as of_classifiers
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import occlusion_based as of_descriptors
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import occlusion_based as of_detectors

from monai_saliency.xaitk.perturbers import Configured, RandomGrid, RISEGrid, SlidingWindow

#: what replaces hidden pixels, in the image's own unit: zeros (None), a number, one for each channel, or an image
Fill: TypeAlias = "int | Sequence[int] | np.ndarray | None"


class _Stack(Configured):
    """A pipeline of xaitk-saliency with a perturber and a scoring that belong together."""

    pipeline: ClassVar[Any]
    fill: Any = None
    threads: int | None

    @abstractmethod
    def parts(self) -> tuple[PerturbImage, Any]:
        """The perturber and the scoring."""

    def __post_init__(self) -> None:
        self._parts = self.parts()

    def _generate(self, *args: Any, **kwargs: Any) -> np.ndarray:
        whole = self.pipeline(*self._parts, threads=self.threads)
        whole.fill = self.fill
        return whole.generate(*args, **kwargs)


class _ClassifierStack(_Stack, GenerateImageClassifierBlackboxSaliency):
    pipeline = of_classifiers.PerturbationOcclusion


class _DetectorStack(_Stack, GenerateObjectDetectorBlackboxSaliency):
    pipeline = of_detectors.PerturbationOcclusion


@dataclass(eq=False)
class RISEStack(_ClassifierStack):
    """RISE (Petsiuk et al., BMVC 2018): random masks, weighted by the confidence while they are in place.

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws; None draws one.
        threads: that apply the masks.
        debiased: subtract ``p1`` from the masks (Hatakeyama et al., ACCV 2020).

    Example::

        >>> import torch
        >>> import numpy as np
        >>> from monai_saliency.xaitk import Classifier, RISEStack
        >>> stack = RISEStack(n=20, s=2, p1=0.5, seed=0)
        >>> stack(np.ones((6, 6), np.uint8), Classifier(torch.nn.Flatten(), labels=36, activation="none")).shape
        (36, 6, 6)
    """

    n: int
    s: int
    p1: float
    seed: int | None = None
    threads: int | None = 0
    debiased: bool = True

    def parts(self) -> tuple[PerturbImage, Any]:
        return RISEGrid(self.n, self.s, self.p1, self.seed), RISEScoring(self.p1 if self.debiased else 0.0)


@dataclass(eq=False)
class SlidingWindowStack(_ClassifierStack):
    """Windows that are hidden in turn, and the average drop of the confidence (Zeiler and Fergus, ECCV 2014)."""

    window_size: tuple[int, int] = (50, 50)
    stride: tuple[int, int] = (20, 20)
    threads: int | None = 0

    def parts(self) -> tuple[PerturbImage, Any]:
        return SlidingWindow(self.window_size, self.stride), OcclusionScoring()


@dataclass(eq=False)
class DRISEStack(_DetectorStack):
    """D-RISE (Petsiuk et al., CVPR 2021): random masks, weighted by how well a detection is still found.

    Args:
        n: of the masks, as for :class:`RISEStack`.
        s: of the masks, as for :class:`RISEStack`.
        p1: of the masks, as for :class:`RISEStack`.
        seed: of the masks, as for :class:`RISEStack`.
        fill: what replaces hidden pixels, in the image's unit: a number, one for each channel, or an image; None: 0.
        threads: that apply the masks.
    """

    n: int
    s: int
    p1: float
    seed: int | None = None
    fill: Fill = None
    threads: int | None = 0

    def parts(self) -> tuple[PerturbImage, Any]:
        return RISEGrid(self.n, self.s, self.p1, self.seed), DRISEScoring()


@dataclass(eq=False)
class RandomGridStack(DRISEStack):
    """:class:`DRISEStack` with masks whose cells have one size ``s`` in pixels, whatever the image's size."""

    s: tuple[int, int]  # type: ignore[assignment]

    def parts(self) -> tuple[PerturbImage, Any]:
        return RandomGrid(self.n, self.s, self.p1, self.seed), DRISEScoring()


@dataclass(eq=False)
class SBSMStack(_Stack, GenerateImageSimilarityBlackboxSaliency):
    """Windows that are hidden in turn, and how far the descriptor moves away from each query's (SBSM: Dong et al., CVPR
    workshops 2019).

    ``proximity_metric`` is a distance of ``scipy.spatial.distance.cdist``.
    """

    window_size: tuple[int, int] = (50, 50)
    stride: tuple[int, int] = (20, 20)
    proximity_metric: str = "euclidean"
    fill: Fill = None
    threads: int | None = None

    pipeline = of_descriptors.PerturbationOcclusion

    def parts(self) -> tuple[PerturbImage, Any]:
        return SlidingWindow(self.window_size, self.stride), SimilarityScoring(self.proximity_metric)
