"""Our estimators as xaitk-saliency's scorings. Parameters are those of xaitk-saliency's classes of these names."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial.distance import cdist
from xaitk_saliency import (
    GenerateClassifierConfidenceSaliency,
    GenerateDescriptorSimilaritySaliency,
    GenerateDetectorProposalSaliency,
)

from monai_saliency import estimators
from monai_saliency.estimators.base import Estimator
from monai_saliency.targets.base import cosine
from monai_saliency.xaitk.masks import BoundArrayMasks
from monai_saliency.xaitk.perturbers import Configured, check_p1

__all__ = [
    "DRISEScoring",
    "OcclusionScoring",
    "RISEScoring",
    "SimilarityScoring",
    "SquaredDifferenceScoring",
]


class _Confidences(Configured, GenerateClassifierConfidenceSaliency):
    """A scoring of a classifier's confidences."""

    @abstractmethod
    def estimator(self) -> Estimator:
        """The estimator of this package."""

    def generate(self, reference: np.ndarray, perturbed: np.ndarray, perturbed_masks: np.ndarray) -> np.ndarray:
        """Maps ``(K, H, W)`` in [-1, 1].

        Args:
            reference: ``(K,)``, the confidences of the image.
            perturbed: ``(masks, K)``, the confidences of the perturbed images.
            perturbed_masks: ``(masks, H, W)`` in [0, 1].

        Raises:
            ValueError: when the numbers of masks or classes do not agree.
        """
        _check_counts(perturbed, perturbed_masks)
        if len(reference) != np.shape(perturbed)[1]:
            raise ValueError(
                "Number of classes in original image and perturbed image do not match. Got "
                f"{len(reference)} and {np.shape(perturbed)[1]}"
            )
        return self._scaled(_maps(self.estimator(), reference, perturbed, perturbed_masks))

    def _scaled(self, maps: np.ndarray) -> np.ndarray:
        return _scaled(maps)


@dataclass(eq=False)
class RISEScoring(_Confidences):
    """Confidences as weights of the masks (RISE: Petsiuk et al., BMVC 2018; debiased: Hatakeyama et al., ACCV 2020).

    Args:
        p1: the masks' probability in [0, 1] to keep a cell, which is subtracted from them; 0 for the first paper's
            form.

    Example::

        >>> import numpy as np
        >>> from monai_saliency.xaitk import RISEScoring
        >>> masks = np.eye(2, dtype=np.float32)[:, None]  # the first keeps the left of two pixels
        >>> RISEScoring(p1=0.5)(np.array([1.0]), np.array([[0.8], [0.2]]), masks).round(2).tolist()
        [[[1.0, -1.0]]]
    """

    p1: float = 0.0

    def __post_init__(self) -> None:
        check_p1(self.p1)

    def estimator(self) -> Estimator:
        return estimators.RISEScoring(self.p1, "debiased") if self.p1 else estimators.RISEScoring(form="plain")


@dataclass(eq=False)
class OcclusionScoring(_Confidences):
    """The average drop of the confidence while a pixel is hidden (Zeiler and Fergus, ECCV 2014, section 4.2)."""

    def estimator(self) -> Estimator:
        return estimators.OcclusionScoring()


@dataclass(eq=False)
class SquaredDifferenceScoring(_Confidences):
    """The average squared change of all confidences while a pixel is hidden: one map ``(H, W)`` in [0, 1] for all
    classes (Greydanus et al., ICML 2018, equations 2 and 4). A map that is the same everywhere is 0.
    """

    def estimator(self) -> Estimator:
        return estimators.SquaredDifferenceScoring()

    def _scaled(self, maps: np.ndarray) -> np.ndarray:
        total = maps.sum(axis=0)
        return _scaled(total - total.min())


@dataclass(eq=False)
class SimilarityScoring(Configured, GenerateDescriptorSimilaritySaliency):
    """How far the descriptor moves away from each query's while a pixel is hidden, on average (SBSM: Dong et al., CVPR
    workshops 2019). A move towards the query counts as none.

    Args:
        proximity_metric: a distance of ``scipy.spatial.distance.cdist``.
    """

    proximity_metric: str = "euclidean"

    def __post_init__(self) -> None:
        try:
            cdist([[1], [1]], [[1], [1]], self.proximity_metric)
        except ValueError as error:
            raise ValueError(
                "Chosen comparison metric not supported or may not be available in scipy: "
                f"`proximity_metric` {self.proximity_metric!r}"
            ) from error

    def generate(
        self,
        ref_descr: np.ndarray,
        query_descrs: np.ndarray,
        perturbed_descrs: np.ndarray,
        perturbed_masks: np.ndarray,
    ) -> np.ndarray:
        """Maps ``(Q, H, W)`` in [0, 1].

        Args:
            ref_descr: ``(D,)``, of the image.
            query_descrs: ``(Q, D)``, of the queries.
            perturbed_descrs: ``(masks, D)``, of the perturbed images.
            perturbed_masks: ``(masks, H, W)`` in [0, 1].

        Raises:
            ValueError: when the numbers of masks or features do not agree.
        """
        _check_counts(perturbed_descrs, perturbed_masks, "feature vector")
        if len(ref_descr) != query_descrs.shape[1]:
            raise ValueError(
                "Size of feature vectors between reference and query images do not match. "
                f"Got {len(ref_descr)} and {query_descrs.shape[1]}"
            )
        reference = -cdist(ref_descr.reshape(1, -1), query_descrs, metric=self.proximity_metric)[0]
        scores = -cdist(query_descrs, perturbed_descrs, metric=self.proximity_metric).T
        return _scaled(_maps(estimators.SimilarityScoring(), reference, scores, perturbed_masks))


@dataclass(eq=False)
class DRISEScoring(Configured, GenerateDetectorProposalSaliency):
    """The average match with a reference detection while a pixel is kept (D-RISE: Petsiuk et al., CVPR 2021).

    A match is the overlap of the boxes, times the cosine of the class scores, times the objectness, of the detection
    that matches best.

    Example::

        >>> import numpy as np
        >>> from monai_saliency.xaitk import DRISEScoring
        >>> box = np.array([[0, 0, 2, 2, 1.0, 1.0]])  # corners, objectness, one class
        >>> found = np.array([[[0, 0, 2, 2, 0.9, 1.0]], [[0, 0, 2, 2, 0.1, 1.0]]])  # under two masks
        >>> masks = np.eye(2, dtype=np.float32)[:, None]
        >>> DRISEScoring()(box, found, masks).round(2).tolist()
        [[[1.0, 0.11]]]
    """

    def generate(self, ref_dets: np.ndarray, perturbed_dets: np.ndarray, perturbed_masks: np.ndarray) -> np.ndarray:
        """Maps ``(detections, H, W)`` in [-1, 1].

        Args:
            ref_dets: ``(detections, 4 + 1 + classes)``: corners, objectness, class scores.
            perturbed_dets: ``(masks, proposals, 4 + 1 + classes)``.
            perturbed_masks: ``(masks, H, W)`` in [0, 1].

        Raises:
            ValueError: when the numbers of masks or classes do not agree.
        """
        _check_counts(perturbed_dets, perturbed_masks, "detections vector")
        if ref_dets.shape[1] != perturbed_dets.shape[2]:
            raise ValueError(
                "Dimensions of reference detections and perturbed detections do not match. Both should be of "
                f"dimension (n_classes + 4 + 1). Got {ref_dets.shape[1]} and {perturbed_dets.shape[2]}"
            )
        found, references = (torch.from_numpy(each.astype(np.float64)) for each in (perturbed_dets, ref_dets))
        scores = _matches(found, references).numpy()
        return _scaled(_maps(estimators.DRISEScoring("plain"), np.zeros(len(ref_dets)), scores, perturbed_masks))


def _matches(found: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """How well the best of some detections ``(B, N, ...)`` matches each reference ``(M, ...)``, as ``(B, M)``.

    The overlap counts pixels, corners included, as xaitk-saliency does: a box from 2 to 4 is 3 pixels wide.
    """
    lower = torch.maximum(found[:, :, None, :2], references[:, :2])
    upper = torch.minimum(found[:, :, None, 2:4], references[:, 2:4])
    both = (upper - lower + 1).clamp_min(0).prod(dim=-1)
    areas = [(boxes[..., 2:4] - boxes[..., :2] + 1).prod(dim=-1) for boxes in (found, references)]
    overlap = both / (areas[0][..., None] + areas[1] - both + torch.finfo(torch.float64).eps)
    return (overlap * cosine(found[..., 5:], references[:, 5:]) * found[..., 4:5]).amax(dim=1)


def _maps(estimator: Estimator, reference: np.ndarray, scores: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Maps of scores ``(masks, K)``, in double precision and not scaled."""
    bound = BoundArrayMasks(torch.empty(1, *masks.shape[-2:], dtype=torch.float64), masks)
    given = (torch.as_tensor(np.asarray(each, dtype=np.float64)) for each in (scores, reference))
    return estimator.compute(bound, range(len(masks)), *given).numpy()


def _scaled(maps: np.ndarray) -> np.ndarray:
    """Each map ``(H, W)`` divided by its largest magnitude; a map of zeros stays."""
    largest = np.abs(maps).max(axis=(-2, -1), keepdims=True)
    return maps / np.where(largest > 0, largest, 1.0)


def _check_counts(perturbed: np.ndarray, masks: np.ndarray, what: str = "confidence lengths") -> None:
    if len(perturbed) != len(masks):
        raise ValueError(
            f"Number of perturbation masks and respective {what} do not match. Got {len(masks)} masks and "
            f"{len(perturbed)} rows"
        )
