"""D-RISE: the average score while a voxel is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, score_rounding, split_coverage, with_ones
from monai_saliency.estimators.moments import centred, in_groups, moments, scaled
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.arguments import check_option

__all__ = ["DRISEScoring"]


class DRISEScoring(Estimator):
    """The average score while a voxel is kept (D-RISE: Petsiuk et al., CVPR 2021, arXiv 2006.03204, section 3).

    f is the score of a mask M, of a detector the best match of a reference box among the perturbed image's detections
    (:class:`~monai_saliency.DetectionScore`).

    - ``"centred"``: ``sum((f - mean f) * M) / sum(M)``, how far the average score while the voxel is kept is above the
      average score of all masks. A constant in all scores changes nothing.
    - ``"plain"``: ``sum(f * M) / sum(M)``, the average score itself. Read such a map relative to its own mean.

    The paper's map is ``sum(f * M)``; here each voxel is divided by how often it was kept. Voxels that no mask keeps,
    and of the centred form those in no region, are 0. Both forms are in the score's unit. Masks of any family will do.
    xaitk-saliency's ``DRISEScoring`` gives the plain map, scaled to [-1, 1].

    Args:
        form: ``"centred"`` or ``"plain"``.

    Raises:
        ValueError: for another form.

    Example::

        >>> import torch
        >>> from monai_saliency import DRISEScoring, RandomGridMasks
        >>> masks = RandomGridMasks(num_masks=200, cell_size=4).bind(torch.zeros(1, 16, 16))
        >>> scores = masks.render(range(200))[:, :, 2, 2]  # a network whose score is the voxel (2, 2) of the mask
        >>> state = DRISEScoring().start(masks, torch.tensor([1.0]))
        >>> state.update(range(200), scores)
        >>> divmod(int(state.compute().argmax()), 16)
        (2, 2)
    """

    def __init__(self, form: str = "centred") -> None:
        self.form = check_option("form", form, ["centred", "plain"])

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        values = centred(scores) if self.form == "centred" else scores
        total, coverage = split_coverage(masks.weighted_sum(ids, with_ones(values)))
        found = torch.where(coverage > 0, total / coverage, 0.0)
        if self.form == "centred" and masks.regions is not None:
            found[..., masks.regions.index == 0] = 0  # which all masks keep
        return found.flatten(0, 1).to(masks.dtype)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The rounding of the scores, if windows or regions are hidden in turn; None for masks drawn at random, and for
        the plain form.
        """
        is_known = self.form == "centred" and not masks.drawn
        return score_rounding(scores, reference_scores, rounding) if is_known else None

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """The standard error of each voxel of the centred map for masks drawn at random; otherwise None, and for fewer
        than three masks.

        A value S is a ratio of two means less a mean. With ``d = f - mean f`` and ``m = mean M``, its standard error is
        the root mean square of ``(d - S) * M / m - d`` over masks, divided by ``sqrt(n - 1)``.
        """
        n = len(ids)
        if self.form == "plain" or not masks.drawn or n < 3:
            return None

        def error(deviations: torch.Tensor) -> torch.Tensor:
            d, scale = scaled(deviations)
            k = d.shape[1]
            weights = with_ones(torch.cat([d.square(), d], dim=1))
            first, second = moments(masks, ids, weights, weights, 0.0)
            square, linear, kept = first.split([k, k, 1])
            kept_square, kept_linear, kept_twice = second.split([k, k, 1])
            value = torch.where(kept > 0, linear / kept, 0.0)
            own = kept_square - 2 * value * kept_linear + value.square() * kept_twice
            both = square - value * linear
            total = d.square().sum(dim=0).to(own).reshape(-1, *[1] * (own.ndim - 1))
            sums = own * (n / kept).square() - 2 * both * (n / kept) + total
            found = (sums.clamp_min(0) / (n * (n - 1))).sqrt() * scale.to(sums).reshape(-1, *[1] * (sums.ndim - 1))
            found = torch.where(kept > 0, found, 0.0)
            if masks.regions is not None:
                found[..., masks.regions.index == 0] = 0  # as the map
            return found.flatten(0, 1).to(masks.dtype)

        return in_groups(masks, error, centred(scores))
