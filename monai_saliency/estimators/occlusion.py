"""Occlusion: what a voxel takes from the score while it is hidden, on average or summed over levels; and the smallest
set of windows that keeps the score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monai_saliency.estimators.base import Estimator, Meaning, ratio_error, score_rounding, split_coverage, with_ones
from monai_saliency.masks.base import BoundMasks, Ids, Observed
from monai_saliency.masks.minimal import BoundMinimalMasks
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic


class OcclusionScoring(Estimator):
    """The average drop of the score while a voxel is hidden (Zeiler and Fergus, ECCV 2014, section 4.2).

    With f the score, f0 the score of the unperturbed image and M the mask, the map is, voxel by voxel,
    ``sum((f0 - f) * (1 - M)) / sum(1 - M)``, and 0 where no mask hides the voxel. It is in the score's unit. A constant
    network gives a map of zeros. xaitk-saliency's ``OcclusionScoring`` is this map, scaled to [-1, 1].

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, PerturbationInferer
        >>> from monai_saliency.estimators import OcclusionScoring
        >>> from monai_saliency.masks import SlidingWindowMasks
        >>> explain = PerturbationInferer(SlidingWindowMasks(1), ClassScore([0], "none"), OcclusionScoring())
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> explain(image, lambda x: x.flatten(1).sum(1, keepdim=True)).tolist()  # the score is the sum of the image
        [[[[1.0, 2.0], [3.0, 4.0]]]]
    """

    def _averaged(self, drops: Tensor) -> Tensor:
        """The values of masks that are averaged, of the drops ``f0 - f``. A subclass averages others."""
        return drops

    def compute(self, observed: Observed) -> Tensor:
        values = with_ones(self._averaged(observed.reference_scores - observed.scores))
        total, coverage = split_coverage(_sum_of_hidden(observed.masks, observed.ids, values))
        return torch.where(coverage > 0, total / coverage, 0.0).flatten(0, 1).to(observed.masks.dtype)

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The rounding of the scores, if windows or regions are hidden in turn; None for masks drawn at random."""
        return None if observed.masks.drawn else self._averaged(score_rounding(observed, rounding))

    def standard_error(self, observed: Observed) -> Tensor | None:
        """The standard error of each voxel for masks drawn at random; None for windows or regions that are hidden in
        turn, and for fewer than three masks.

        A value is a ratio of two means over masks (:func:`~monai_saliency.estimators.base.ratio_error`).
        """
        if not observed.masks.drawn or len(observed.ids) < 3:
            return None
        drops = observed.reference_scores.to(accumulation_dtype(observed.scores.device)) - observed.scores
        return ratio_error(observed.masks, observed.ids, self._averaged(drops), 1.0, above_mean=False)


class SimilarityScoring(OcclusionScoring):
    """The average loss of similarity while a voxel is hidden; gains count as nothing (SBSM: Dong et al.,
    "Explainability for content-based image retrieval", CVPR workshops 2019, section 3).

    With f the similarity of the perturbed image to a query, f0 the similarity of the unperturbed image and M the mask,
    the map is, voxel by voxel, ``sum(max(f0 - f, 0) * (1 - M)) / sum(1 - M)``, and 0 where no mask hides the voxel. It
    is in the score's unit and has no negative values. A constant network gives a map of zeros.

    With :class:`~monai_saliency.EmbeddingSimilarity` each reference has its own map. xaitk-saliency's
    ``SimilarityScoring`` is this map, scaled to [-1, 1], with ``"distance"`` for its ``"euclidean"``.
    """

    def _averaged(self, drops: Tensor) -> Tensor:
        return drops.clamp_min(0)

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("loss of the score", signed=False)


class SquaredDifferenceScoring(OcclusionScoring):
    """Half the squared change of the score while a voxel is hidden, on average (Greydanus et al., ICML 2018, arXiv
    1711.00138, equations 2 and 4).

    With f the score, f0 the score of the unperturbed image and M the mask, the map of a score is, voxel by voxel,
    ``sum(0.5 * (f0 - f)^2 * (1 - M)) / sum(1 - M)``, and 0 where no mask hides the voxel. A voxel that lowers a score
    counts as one that raises it. A constant network gives a map of zeros. Greydanus et al. add up these maps over all
    outputs; xaitk-saliency's ``SquaredDifferenceScoring`` is this sum, moved and scaled to [0, 1].

    **Unit**: the square of the score's, without sign.
    """

    def _averaged(self, drops: Tensor) -> Tensor:
        return 0.5 * drops.square()

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("half the squared change of the score", 0.5, in_score_unit=False, signed=False)


class HierarchicalScoring(Estimator):
    """The drop of the score while a voxel is hidden, summed over the levels of windows that hid it (HiPe, Cooper et
    al., arXiv 2103.05108, section 3).

    With f the score, f0 the score of the unperturbed image and M the mask, the map is, voxel by voxel,
    ``sum((f0 - f) * (1 - M))``. Windows of one level do not overlap, so each level adds the drop of its window over the
    voxel: the map of a probability can reach the number of levels. It is in the score's unit; divide by the number of
    levels for a drop per level. A constant network gives a map of zeros.
    """

    def compute(self, observed: Observed) -> Tensor:
        drops = observed.reference_scores - observed.scores
        return _sum_of_hidden(observed.masks, observed.ids, drops).flatten(0, 1).to(observed.masks.dtype)

    def meaning(self, masks: BoundMasks) -> Meaning:
        levels = getattr(masks, "num_levels", 1)
        if levels == 1:
            return Meaning("change of the score")
        return Meaning(f"score change, summed over {levels} window sizes", levels)

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The rounding of the scores, once for each level: nothing is left to chance."""
        return getattr(observed.masks, "num_levels", 1) * score_rounding(observed, rounding)


class MinimalRegionScoring(Estimator):
    """1 inside the smallest set of windows that keeps the score, 0 outside; of each explained score its own.

    **Unit**: none, it is a region. The ``finding`` of each of ``explanation.observed`` has its number of voxels, and
    the scores with only the region kept or hidden (:class:`~monai_saliency.masks.minimal.FoundRegion`). The map is zero
    if the image's score is not above the fill's.

    Raises:
        ValueError: (from ``compute``) for masks other than ``MinimalMasks``.

    Example::

        >>> import torch
        >>> from monai_saliency import RegressionScore, minimal_region
        >>> explain = minimal_region(0.9, window_size=2, levels=2, keep=1, target=RegressionScore())
        >>> image = torch.ones(1, 1, 4, 4)
        >>> (found,) = explain.explain(image, lambda x: x[:, :, 1, 1:3].sum(-1))  # the score is the sum of two voxels
        >>> found.saliency[0].tolist()
        [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
        >>> region = found.observed[0].finding
        >>> region.voxels, region.kept_score, region.hidden_score
        (2, 2.0, 0.0)
    """

    def check(self, masks: BoundMasks) -> None:
        if not isinstance(masks, BoundMinimalMasks):
            raise ValueError(
                f"a minimal region needs MinimalMasks, got masks of {masks.key[0]}: use minimal_region(...)"
            )

    def compute(self, observed: Observed) -> Tensor:
        masks, region = observed.masks, observed.finding
        self.check(masks)
        saliency = torch.zeros(len(observed.reference_scores), *masks.spatial_shape, dtype=masks.dtype)
        for box in [] if region is None else region.boxes:
            saliency[0][box] = 1
        return saliency.to(masks.device)

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("1 in the smallest set that keeps the score", in_score_unit=False, signed=False)


def _sum_of_hidden(masks: BoundMasks, ids: Ids, weights: Tensor) -> Tensor:
    """``sum_i weights[i, k] * (1 - M_i)`` as ``(K, channels or 1, *spatial)``."""
    weights = weights.to(masks.device, masks.dtype)
    if (found := masks.hidden_sum(ids, weights)) is not None:
        return found
    sums = masks.zero_sums(weights)
    if (boxes := masks.changed_boxes(ids)) is not None:
        for number, box, each in zip(ids, boxes, weights.to(sums), strict=True):
            inside: Any = (..., *box)
            hidden = each.reshape(-1, *[1] * (sums.ndim - 1))
            sums[inside] += hidden if masks.hides_boxes else hidden * (1 - masks.render([number], box=box)[0])
        return sums
    with exact_arithmetic(masks.device):
        for chunk, rendered in masks.stream(ids):
            hidden = rendered.flatten(1).neg_().add_(1)
            sums += (weights[chunk].T @ hidden).reshape(sums.shape)
    return sums
