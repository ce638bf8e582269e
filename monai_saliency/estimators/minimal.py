"""The minimal region: 1 inside the smallest set of windows that keeps the score."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, Meaning
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.minimal import BoundMinimalMasks

__all__ = ["MinimalRegionScoring"]


class MinimalRegionScoring(Estimator):
    """1 inside the smallest set of windows that keeps the score, 0 outside; of each explained score its own.

    **Unit**: none, it is a region. ``explanation.masks.found(...)`` gives its number of voxels, and the scores with
    only the region kept or hidden (:class:`~monai_saliency.masks.minimal.FoundRegion`). The map is zero if the image's
    score is not above the fill's.

    Raises:
        ValueError: (from ``compute``) for masks other than :class:`~monai_saliency.MinimalMasks`, or when rounds are
            missing.

    Example::

        >>> import torch
        >>> from monai_saliency import RegressionScore, minimal_region
        >>> explain = minimal_region(0.9, window_size=2, levels=2, keep=1, target=RegressionScore())
        >>> image = torch.ones(1, 1, 4, 4)
        >>> (found,) = explain.explain(image, lambda x: x[:, :, 1, 1:3].sum(-1))  # the score is the sum of two voxels
        >>> found.saliency[0].tolist()
        [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
        >>> (region,) = found.masks.found(found.ids, found.scores, found.reference_scores)
        >>> region.voxels, region.kept_score, region.hidden_score
        (2, 2.0, 0.0)
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(masks, BoundMinimalMasks):
            raise ValueError(
                f"a minimal region needs MinimalMasks, got masks of {masks.key[0]}: use minimal_region(...)"
            )
        found = masks.found(ids, scores, reference_scores)
        maps = torch.zeros(len(found), *masks.spatial_shape, dtype=masks.dtype, device=masks.device)
        for each, region in zip(maps, found, strict=True):
            for box in region.boxes:
                each[box] = 1
        return maps

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("1 in the smallest set that keeps the score", in_score_unit=False, signed=False)
