"""Squared differences: how far hiding a voxel moves the score, whichever way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, Meaning, score_rounding
from monai_saliency.estimators.occlusion import error_while_hidden, mean_while_hidden
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["SquaredDifferenceScoring"]


class SquaredDifferenceScoring(Estimator):
    """Half the squared change of the score while a voxel is hidden, on average (Greydanus et al., ICML 2018, arXiv
    1711.00138, equations 2 and 4).

    With f the score, f0 the score of the unperturbed image and M the mask, the map of a score is, voxel by voxel,
    ``sum(0.5 * (f0 - f)^2 * (1 - M)) / sum(1 - M)``, and 0 where no mask hides the voxel. It shows where the score
    depends on the image at all: a voxel that lowers a score counts as one that raises it. A constant network gives a
    map of zeros.

    Greydanus et al. add up the squares of all outputs, ``0.5 * |f0 - f|^2`` of vectors, so that their map is the sum of
    these maps over all explained values. xaitk-saliency's ``SquaredDifferenceScoring`` is this sum, moved and scaled to
    [0, 1].

    **Unit**: the square of the score's, so it is not in the score's unit, and has no sign.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, PerturbationInferer, SlidingWindowMasks, SquaredDifferenceScoring
        >>> explain = PerturbationInferer(SlidingWindowMasks(1), ClassScore([0], "none"), SquaredDifferenceScoring())
        >>> image = torch.tensor([[[[1.0, -2.0], [3.0, 4.0]]]])
        >>> explain(image, lambda x: x.flatten(1).sum(1, keepdim=True)).tolist()  # the score is the sum of the image
        [[[[0.5, 2.0], [4.5, 8.0]]]]
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        return mean_while_hidden(masks, ids, 0.5 * (reference_scores - scores).square())

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("half the squared change of the score", 0.5, in_score_unit=False, signed=False)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """Half the square of the scores' rounding, where windows or regions are hidden in turn; None for masks drawn at
        random.
        """
        return None if masks.drawn else 0.5 * score_rounding(scores, reference_scores, rounding).square()

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """As :meth:`~monai_saliency.OcclusionScoring.standard_error`, of half the squared change."""
        drops = reference_scores.to(accumulation_dtype(scores.device)) - scores
        return error_while_hidden(masks, ids, 0.5 * drops.square())
