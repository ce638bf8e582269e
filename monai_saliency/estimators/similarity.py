"""Similarity-based saliency: the average loss of similarity while a voxel is hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, Meaning, score_rounding
from monai_saliency.estimators.occlusion import error_while_hidden, mean_while_hidden
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["SimilarityScoring"]


class SimilarityScoring(Estimator):
    """The average loss of similarity while a voxel is hidden; gains count as nothing (SBSM: Dong et al.,
    "Explainability for content-based image retrieval", CVPR workshops 2019, section 3).

    With f the similarity of the perturbed image to a query, f0 that of the unperturbed image and M the mask, the map
    is, voxel by voxel, ``sum(max(f0 - f, 0) * (1 - M)) / sum(1 - M)``, and 0 where no mask hides the voxel. It is in
    the score's unit and has no negative values. A constant network gives a map of zeros.

    With :class:`~monai_saliency.EmbeddingSimilarity` the scores are similarities of embeddings, ``"distance"`` being
    the negative distance; each reference has its own map. xaitk-saliency's ``SimilarityScoring`` is this map, scaled to
    [-1, 1], with ``"distance"`` for its ``"euclidean"`` and ``"cosine"`` for its ``"cosine"``. Any other score may be
    explained too.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, PerturbationInferer, SimilarityScoring, SlidingWindowMasks
        >>> explain = PerturbationInferer(SlidingWindowMasks(1), ClassScore([0], "none"), SimilarityScoring())
        >>> image = torch.tensor([[[[1.0, -2.0], [3.0, 4.0]]]])
        >>> explain(image, lambda x: x.flatten(1).sum(1, keepdim=True)).tolist()  # the score is the sum of the image
        [[[[1.0, 0.0], [3.0, 4.0]]]]
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        return mean_while_hidden(masks, ids, (reference_scores - scores).clamp_min(0))

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("loss of the score", signed=False)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """As :meth:`~monai_saliency.OcclusionScoring.noise`: the rounding of the scores; None for masks drawn at
        random.
        """
        return None if masks.drawn else score_rounding(scores, reference_scores, rounding)

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """As :meth:`~monai_saliency.OcclusionScoring.standard_error`, of the loss."""
        drops = reference_scores.to(accumulation_dtype(scores.device)) - scores
        return error_while_hidden(masks, ids, drops.clamp_min(0))
