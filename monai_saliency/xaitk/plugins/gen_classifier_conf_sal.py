"""Scorings: how confidences and masks become maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from xaitk_saliency import GenerateClassifierConfidenceSaliency

from monai_saliency.xaitk.plugins.base import Configured, EngineScoring, check_counts, check_k, check_p1, scaled

if TYPE_CHECKING:
    from monai_saliency.estimators.base import Estimator

__all__ = ["MCRISEScoring", "OcclusionScoring", "RISEScoring", "SquaredDifferenceScoring"]


class RISEScoring(EngineScoring):
    """Confidences as weights of the masks (RISE: Petsiuk et al., BMVC 2018; debiased: Hatakeyama et al., ACCV 2020).

    Args:
        p1: probability in [0, 1] with which the masks keep a pixel, which is taken off them; 0 for the first paper's
            form.

    Raises:
        ValueError: when ``p1`` is not in [0, 1].

    Example::

        >>> import numpy as np
        >>> masks = np.eye(2, dtype=np.float32)[:, None]  # the first keeps the left of two pixels
        >>> RISEScoring(p1=0.5)(np.array([1.0]), np.array([[0.8], [0.2]]), masks).round(2).tolist()
        [[[1.0, -1.0]]]
    """

    def __init__(self, p1: float = 0.0) -> None:
        self.p1 = check_p1(p1)

    def estimator(self) -> Estimator:
        from monai_saliency.estimators.rise import RISEScoring as Engine

        return Engine(self.p1, "debiased") if self.p1 else Engine(form="plain")


class OcclusionScoring(EngineScoring):
    """The average drop of the confidence while a pixel is hidden (Zeiler and Fergus, ECCV 2014, section 4.2).

    Example::

        >>> import numpy as np
        >>> masks = np.eye(2, dtype=np.float32)[:, None]  # the first hides the right of two pixels
        >>> OcclusionScoring()(np.array([1.0]), np.array([[0.8], [0.2]]), masks).round(2).tolist()
        [[[1.0, 0.25]]]
    """

    def __init__(self) -> None:
        pass

    def estimator(self) -> Estimator:
        from monai_saliency.estimators.occlusion import OcclusionScoring as Engine

        return Engine()

    def scores(self, reference: np.ndarray, perturbed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        check_classes(reference, perturbed)
        return reference, perturbed


class SquaredDifferenceScoring(EngineScoring):
    """The average squared change of all confidences while a pixel is hidden: one map ``(H, W)`` in [0, 1] for all
    classes (Greydanus et al., ICML 2018, equations 2 and 4). A map that is the same everywhere is 0.

    Example::

        >>> import numpy as np
        >>> masks = np.eye(2, dtype=np.float32)[:, None]  # the first hides the right of two pixels
        >>> SquaredDifferenceScoring()(np.array([1.0]), np.array([[0.8], [0.2]]), masks).round(2).tolist()
        [[1.0, 0.0]]
    """

    def __init__(self) -> None:
        pass

    def estimator(self) -> Estimator:
        from monai_saliency.estimators.squared_difference import SquaredDifferenceScoring as Engine

        return Engine()

    def scores(self, reference: np.ndarray, perturbed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        check_classes(reference, perturbed)
        return reference, perturbed

    def finished(self, maps: np.ndarray) -> np.ndarray:
        total = maps.sum(axis=0)
        above = total - total.min()
        largest = above.max()
        return above / largest if largest > 0 else above


class MCRISEScoring(Configured, GenerateClassifierConfidenceSaliency):
    """How far each of k fills raises the confidence, one map for each fill and class (MC-RISE: Hatakeyama et al., ACCV
    2020), as xaitk-saliency computes it: see the form ``"xaitk"`` of :class:`monai_saliency.MCRISEScoring`.

    Args:
        k: number of fills.
        p1: probability in [0, 1] with which the masks keep a cell.

    Attributes:
        device: where maps are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run time.

    Raises:
        ValueError: when ``p1`` is not in [0, 1], or ``k`` is below 1.

    Example::

        >>> import numpy as np
        >>> masks = np.array([[[[1.0, 0.0]], [[0.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 1.0]]]])  # (fills, masks, H, W)
        >>> MCRISEScoring(k=2, p1=0.5)(np.array([1.0]), np.array([[0.8], [0.2]]), masks).shape
        (2, 1, 1, 2)
    """

    device: str | None = None

    def __init__(self, k: int, p1: float = 0.0) -> None:
        self.p1 = check_p1(p1)
        self.k = check_k(k)

    def estimator(self) -> Estimator:
        """The engine's estimator."""
        from monai_saliency.estimators.mc_rise import MCRISEScoring as Engine

        return Engine(self.p1, "xaitk")

    def generate(self, reference: np.ndarray, perturbed: np.ndarray, perturbed_masks: np.ndarray) -> np.ndarray:
        """Maps from confidences and masks.

        Args:
            reference: ``(K,)``, which is not read.
            perturbed: ``(masks, K)``, the confidences of the perturbed images.
            perturbed_masks: ``(k, masks, H, W)`` in [0, 1].

        Returns:
            ``(k, K, H, W)`` in [-1, 1].

        Raises:
            ValueError: when the numbers of masks or fills do not agree.
        """
        from monai_saliency.xaitk.fills import fill_maps_of

        if perturbed_masks.ndim != 4 or len(perturbed_masks) != self.k:
            raise ValueError(f"masks have the axes (k, masks, H, W), with k {self.k}, got {perturbed_masks.shape}")
        check_counts(perturbed, perturbed_masks[0])
        return scaled(fill_maps_of(self.estimator(), perturbed, perturbed_masks, self.device))


def check_classes(reference: np.ndarray, perturbed: np.ndarray) -> None:
    """Refuse another number of classes for perturbed images than for the image."""
    if len(reference) != np.shape(perturbed)[1]:
        raise ValueError(
            "Number of classes in original image and perturbed image do not match. Got "
            f"{len(reference)} and {np.shape(perturbed)[1]}"
        )
