"""Scorings of detections: how the match with a box becomes a map."""

from __future__ import annotations

import numpy as np
from xaitk_saliency import GenerateDetectorProposalSaliency

from monai_saliency.xaitk.plugins.base import Configured, check_counts, scaled

__all__ = ["DRISEScoring"]


class DRISEScoring(Configured, GenerateDetectorProposalSaliency):
    """The average match with a reference detection while a pixel is kept (D-RISE: Petsiuk et al., CVPR 2021).

    A match is the overlap of the boxes, times the cosine of the class scores, times the objectness, of the detection
    that matches best.

    Attributes:
        device: where maps are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run time.

    Example::

        >>> import numpy as np
        >>> box = np.array([[0, 0, 2, 2, 1.0, 1.0]])  # corners, objectness, one class
        >>> found = np.array([[[0, 0, 2, 2, 0.9, 1.0]], [[0, 0, 2, 2, 0.1, 1.0]]])  # under two masks
        >>> masks = np.eye(2, dtype=np.float32)[:, None]
        >>> DRISEScoring()(box, found, masks).round(2).tolist()
        [[[1.0, 0.11]]]
    """

    device: str | None = None

    def __init__(self) -> None:
        pass

    def generate(self, ref_dets: np.ndarray, perturbed_dets: np.ndarray, perturbed_masks: np.ndarray) -> np.ndarray:
        """Maps from detections and masks.

        Args:
            ref_dets: ``(detections, 4 + 1 + classes)``: corners, objectness, class scores.
            perturbed_dets: ``(masks, proposals, 4 + 1 + classes)``.
            perturbed_masks: ``(masks, H, W)`` in [0, 1].

        Returns:
            ``(detections, H, W)`` in [-1, 1].

        Raises:
            ValueError: when the numbers of masks or classes do not agree.
        """
        from monai_saliency.estimators.drise import DRISEScoring as Engine
        from monai_saliency.xaitk.arrays import maps_of
        from monai_saliency.xaitk.detections import matches

        check_counts(perturbed_dets, perturbed_masks, "detections vector")
        if ref_dets.shape[1] != perturbed_dets.shape[2]:
            raise ValueError(
                "Dimensions of reference detections and perturbed detections do not match. Both should be of "
                f"dimension (n_classes + 4 + 1). Got {ref_dets.shape[1]} and {perturbed_dets.shape[2]}"
            )
        scores = matches(ref_dets, perturbed_dets)
        reference = np.zeros(scores.shape[1])  # which is not read
        return scaled(maps_of(Engine("plain"), reference, scores, perturbed_masks, self.device))
