"""Scorings of descriptors: how a move away from a query becomes a map."""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist
from xaitk_saliency import GenerateDescriptorSimilaritySaliency

from monai_saliency.xaitk.plugins.base import Configured, check_counts, scaled

__all__ = ["SimilarityScoring"]


class SimilarityScoring(Configured, GenerateDescriptorSimilaritySaliency):
    """How far the descriptor moves away from each query's while a pixel is hidden, on average (SBSM: Dong et al., CVPR
    workshops 2019). A move towards the query counts as none.

    Args:
        proximity_metric: a distance of ``scipy.spatial.distance.cdist``.

    Attributes:
        device: where maps are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run time.

    Raises:
        ValueError: when SciPy has no such distance.

    Example::

        >>> import numpy as np
        >>> masks = np.eye(2, dtype=np.float32)[:, None]  # the first hides the right of two pixels
        >>> image, query, perturbed = np.array([1.0, 0.0]), np.array([[1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> SimilarityScoring()(image, query, perturbed, masks).tolist()
        [[[1.0, 0.0]]]
    """

    device: str | None = None

    def __init__(self, proximity_metric: str = "euclidean") -> None:
        try:
            cdist([[1], [1]], [[1], [1]], proximity_metric)
        except ValueError as error:
            raise ValueError(
                "Chosen comparison metric not supported or may not be available in scipy: "
                f"`proximity_metric` {proximity_metric!r}"
            ) from error
        self.proximity_metric = proximity_metric

    @property
    def of_all(self) -> bool:
        """Whether a distance depends on all vectors that are compared, not only on its two."""
        return self.proximity_metric in ("seuclidean", "mahalanobis")

    def similarities(self, query_descrs: np.ndarray, descrs: np.ndarray) -> np.ndarray:
        """How near descriptors are to each query's: distances below zero.

        Args:
            query_descrs: ``(Q, D)``.
            descrs: ``(n, D)``, of perturbed images.

        Returns:
            ``(n, Q)``, at most 0.
        """
        return -cdist(query_descrs, descrs, metric=self.proximity_metric).T

    def own(self, ref_descr: np.ndarray, query_descrs: np.ndarray) -> np.ndarray:
        """How near the image's descriptor is to each query's, ``(Q,)``.

        Args:
            ref_descr: ``(D,)``.
            query_descrs: ``(Q, D)``.

        Raises:
            ValueError: when the numbers of features do not agree.
        """
        if len(ref_descr) != query_descrs.shape[1]:
            raise ValueError(
                "Size of feature vectors between reference and query images do not match. "
                f"Got {len(ref_descr)} and {query_descrs.shape[1]}"
            )
        return -cdist(ref_descr.reshape(1, -1), query_descrs, metric=self.proximity_metric)[0]

    def generate(
        self,
        ref_descr: np.ndarray,
        query_descrs: np.ndarray,
        perturbed_descrs: np.ndarray,
        perturbed_masks: np.ndarray,
    ) -> np.ndarray:
        """Maps from descriptors and masks.

        Args:
            ref_descr: ``(D,)``, of the image.
            query_descrs: ``(Q, D)``, of the queries.
            perturbed_descrs: ``(masks, D)``, of the perturbed images.
            perturbed_masks: ``(masks, H, W)`` in [0, 1].

        Returns:
            ``(Q, H, W)`` in [0, 1].

        Raises:
            ValueError: when the numbers of masks or features do not agree.
        """
        from monai_saliency.estimators.similarity import SimilarityScoring as Engine
        from monai_saliency.xaitk.arrays import maps_of

        check_counts(perturbed_descrs, perturbed_masks, "feature vector")
        reference = self.own(ref_descr, query_descrs)
        scores = self.similarities(query_descrs, perturbed_descrs)
        return scaled(maps_of(Engine(), reference, scores, perturbed_masks, self.device))
