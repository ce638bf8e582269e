"""RISE: how far keeping a voxel raises the score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, score_rounding, split_coverage, with_ones
from monai_saliency.estimators.moments import centred, in_groups, moments, scaled
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.arguments import check_option, probability
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["RISEScoring"]

_FORMS = ["centred", "debiased", "plain"]
# Masks from which the spread of a voxel is read: 16 grids of 4 x 4 cells are 256 draws.
_SPREAD_MASKS = 16


class RISEScoring(Estimator):
    """How far keeping a voxel raises the score (RISE: Petsiuk et al., BMVC 2018, equation 6).

    f is the score of a mask M, there are n masks, and each keeps a voxel with probability p1.

    - ``"centred"``: ``sum((f - mean f) * (M - p1)) / ((n - 1) * p1)``, how far keeping a voxel raises the score above
      the average perturbed score. A constant in all scores changes nothing. Voxels in no region, which no mask hides,
      are 0.
    - ``"debiased"`` (Hatakeyama et al., ACCV 2020): ``sum(f * (M - p1)) / (n * p1)``. Its expectation is the same, but
      it adds the average score times ``mean(M) / p1 - 1``: how often chance kept a voxel.
    - ``"plain"``, the paper's: ``sum(f * M) / (n * E[M])``, where E[M] is the mean value of the masks. Read such a map
      relative to its own mean.

    All are in the score's unit. xaitk-saliency's ``RISEScoring`` gives the debiased and the plain map, scaled to
    [-1, 1].

    Args:
        p1: probability in (0, 1] with which the masks keep a cell or region. The plain form does not read it.
        form: ``"centred"``, ``"debiased"`` or ``"plain"``.

    Raises:
        ValueError: when ``p1`` is not in (0, 1], or for another form.

    Example::

        >>> import torch
        >>> from monai_saliency import RISEMasks, RISEScoring
        >>> masks = RISEMasks(num_masks=200, grid_size=4).bind(torch.zeros(1, 16, 16))
        >>> scores = masks.render(range(200))[:, :, 2, 2]  # a network whose score is the voxel (2, 2) of the mask
        >>> state = RISEScoring(p1=0.5).start(masks, torch.tensor([1.0]))
        >>> state.update(range(200), scores)
        >>> state.compute().shape, divmod(int(state.compute().argmax()), 16)
        (torch.Size([1, 16, 16]), (2, 2))
    """

    def __init__(self, p1: float = 0.5, form: str = "centred") -> None:
        probability("p1", p1)
        self.form = check_option("form", form, _FORMS)
        if p1 == 0 and form != "plain":
            raise ValueError(
                "`p1` must be above 0, got 0: masks that keep nothing explain nothing, and the paper's plain form is "
                "RISEScoring(form='plain')"
            )
        self.p1 = 0.0 if form == "plain" else float(p1)  # what does not count is the same in equal settings

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        if self.form == "plain":
            weighted, coverage = split_coverage(masks.weighted_sum(ids, with_ones(scores)))
            kept = coverage.mean(dim=tuple(range(1, coverage.ndim)), keepdim=True)
            # Masks that keep nothing say nothing about any voxel.
            return torch.where(kept > 0, weighted / kept, weighted).flatten(0, 1).to(masks.dtype)
        if self.form == "centred":
            # The weights sum to 0, so that masks stand for `M - p1`.
            weighted = masks.weighted_sum(ids, centred(scores))
            weighted /= self.p1 * max(1, len(ids) - 1)
        else:
            weighted = masks.weighted_sum(ids, scores)
            total = scores.to(weighted).sum(dim=0)
            weighted -= self.p1 * total.reshape(-1, *[1] * (weighted.ndim - 1))
            weighted /= self.p1 * len(ids)
        if masks.regions is not None:
            # All masks keep the voxels in no region, not a fraction p1 of them, so nothing is known about these.
            weighted[..., masks.regions.index == 0] = 0
        return weighted.flatten(0, 1).to(masks.dtype)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The standard error of a voxel of the centred and debiased maps; None for the plain one.

        If the scores do not depend on a voxel, its value has this standard deviation over other random masks:
        ``spread(f) * spread(M) / (p1 * sqrt(n))``, with the standard deviation of the scores as ``spread(f)`` in the
        centred form, and their root mean square in the debiased one. ``spread(M)``, of a voxel of the masks, is read
        from a few of them.
        """
        if self.form == "plain":
            return None
        deviations = centred(scores) if self.form == "centred" else _long(scores)
        spread = deviations.square().mean(dim=0).sqrt() * self._spread_of_masks(masks, ids[:_SPREAD_MASKS])
        return torch.hypot(spread / (self.p1 * len(ids) ** 0.5), score_rounding(scores, reference_scores).to(spread))

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """The standard error of each voxel of the centred and debiased maps; None for the plain one, which is read
        relative to its own mean, and for fewer than three masks.

        A map is a mean over masks of ``z = (f - mean f) * (M - mean M) / p1``, or of ``z = f * (M - p1) / p1`` in the
        debiased form. Its standard error is the standard deviation of z over the masks, divided by ``sqrt(n)``, with
        ``n - 1`` under the root if one mean was taken out, and ``n - 2`` if two were.
        """
        if self.form == "plain" or len(ids) < 3:
            return None
        is_centred = self.form == "centred"
        n, deviations = len(ids), centred(scores) if is_centred else _long(scores)

        def error(d: torch.Tensor) -> torch.Tensor:
            d, scale = scaled(d)
            weights = torch.cat([d, d.square(), d.new_ones(n, 1)], dim=1)
            sums, squares = moments(masks, ids, weights, d.square(), self.p1)
            linear, quadratic, coverage = sums.split([d.shape[1], d.shape[1], 1])
            # How far the masks' own mean is from p1, voxel by voxel.
            shift = coverage / n if is_centred else torch.zeros_like(coverage)
            totals = [each.to(sums).reshape(-1, *[1] * (sums.ndim - 1)) for each in (d.sum(0), d.square().sum(0))]
            mean = (linear - shift * totals[0]) / n
            squares += shift * (shift * totals[1] - 2 * quadratic)
            variance = (squares / n - mean.square()).clamp_min_(0) / (n - 2 if is_centred else n - 1)
            found = variance.sqrt_() * scale.to(sums).reshape(-1, *[1] * (sums.ndim - 1)) / self.p1
            if masks.regions is not None:
                found[..., masks.regions.index == 0] = 0  # as the map
            return found.flatten(0, 1).to(masks.dtype)

        return in_groups(masks, error, deviations)

    def _spread_of_masks(self, masks: BoundMasks, ids: Sequence[Id]) -> torch.Tensor:
        """The standard deviation of a voxel over masks, a mean over the voxels that masks hide."""
        hidden = None if masks.regions is None else masks.regions.index > 0
        total = _long(torch.zeros((), device=masks.device))
        for _, rendered in masks.stream(ids):
            squares = rendered.sub_(self.p1).square_()
            total += (squares if hidden is None else squares * hidden).sum(dtype=total.dtype)
        voxels = math.prod(masks.spatial_shape) if hidden is None else hidden.sum()
        return (total / (len(ids) * (masks.channels or 1) * voxels)).sqrt()


def _long(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(accumulation_dtype(scores.device))
