"""Hierarchical occlusion: what a voxel takes from the score while it is hidden, summed over the levels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, Meaning, score_rounding
from monai_saliency.estimators.occlusion import sum_of_hidden
from monai_saliency.masks.base import BoundMasks, Id

__all__ = ["HierarchicalScoring"]


class HierarchicalScoring(Estimator):
    """The drop of the score while a voxel is hidden, summed over the levels of windows that hid it (HiPe, Cooper et
    al., arXiv 2103.05108, section 3).

    With f the score, f0 the score of the unperturbed image and M the mask, the map is, voxel by voxel,
    ``sum((f0 - f) * (1 - M))``. Windows of one level do not overlap, so each level adds one drop: that of its window
    over the voxel. The map of a probability can so reach as many as there are levels, not only 1. Near smooth edges it
    adds a part of the drop of each window that hides the voxel in part. The map is in the score's unit. A voxel that
    was refined has more terms, and so stands out from its surroundings; divide by the number of levels for a drop per
    level. A constant network gives a map of zeros.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, HierarchicalMasks, HierarchicalScoring, PerturbationInferer
        >>> masks = HierarchicalMasks(window_size=2, levels=2)
        >>> explain = PerturbationInferer(masks, ClassScore([0], "none"), HierarchicalScoring())
        >>> image = torch.tensor([[[[1.0, 2.0, 0.0, 1.0], [3.0, 4.0, 0.0, 0.0]]]])
        >>> explain(image, lambda x: x.flatten(1).sum(1, keepdim=True)).tolist()  # the score is the sum of the image
        [[[[11.0, 12.0, 1.0, 1.0], [13.0, 14.0, 1.0, 1.0]]]]
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        return sum_of_hidden(masks, ids, reference_scores - scores).flatten(0, 1).to(masks.dtype)

    def meaning(self, masks: BoundMasks) -> Meaning:
        levels = getattr(masks, "num_levels", 1)
        if levels == 1:
            return Meaning("change of the score")
        return Meaning(f"sum of the score's changes, one for each of {levels} window sizes", levels)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The rounding of the scores, once for each level: nothing is left to chance."""
        return getattr(masks, "num_levels", 1) * score_rounding(scores, reference_scores, rounding)
