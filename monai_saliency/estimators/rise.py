"""RISE, D-RISE and MC-RISE: how far keeping a voxel raises the score."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from monai_saliency.estimators.base import (
    Estimator,
    Meaning,
    centred,
    in_groups,
    ratio_error,
    scaled,
    score_rounding,
    split_coverage,
    with_ones,
)
from monai_saliency.masks.base import BoundMasks, Ids, Observed
from monai_saliency.utils.arguments import check_option, probability
from monai_saliency.utils.precision import accumulation_dtype

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
        >>> from monai_saliency.estimators import RISEScoring
        >>> from monai_saliency.masks import Observed, RISEMasks
        >>> masks = RISEMasks(num_masks=200, grid_size=4).bind(torch.zeros(1, 16, 16))
        >>> scores = masks.render(range(200))[:, :, 2, 2]  # a network whose score is the voxel (2, 2) of the mask
        >>> saliency = RISEScoring(p1=0.5).compute(Observed(masks, torch.tensor([1.0]), range(200), scores))
        >>> saliency.shape, divmod(int(saliency.argmax()), 16)
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

    def compute(self, observed: Observed) -> Tensor:
        masks, ids, scores = observed.masks, observed.ids, observed.scores
        if self.form == "plain":
            weighted, coverage = split_coverage(masks.weighted_sum(ids, with_ones(scores)))
            kept = coverage.mean(dim=tuple(range(1, coverage.ndim)), keepdim=True)
            # Masks that keep nothing say nothing about any voxel.
            return torch.where(kept > 0, weighted / kept, weighted).flatten(0, 1).to(masks.dtype)
        if self.form == "centred":
            # The weights sum to 0, so the masks act as `M - p1`.
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

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The standard error of a voxel of the centred and debiased maps; None for the plain one.

        If the scores do not depend on a voxel, that is ``spread(f) * spread(M) / (p1 * sqrt(n))``, with the standard
        deviation of the scores as ``spread(f)``, or their root mean square in the debiased form. ``spread(M)``, of a
        voxel of the masks, is read from a few of them.
        """
        if self.form == "plain":
            return None
        masks, ids, scores = observed.masks, observed.ids, observed.scores
        deviations = centred(scores) if self.form == "centred" else _long(scores)
        spread = deviations.square().mean(dim=0).sqrt() * self._spread_of_masks(masks, ids[:_SPREAD_MASKS])
        return torch.hypot(spread / (self.p1 * len(ids) ** 0.5), score_rounding(observed).to(spread))

    def standard_error(self, observed: Observed) -> Tensor | None:
        """The standard error of each voxel of the centred and debiased maps; None for the plain one, which is read
        relative to its own mean, and for fewer than three masks.

        A map is a mean over masks of ``z = (f - mean f) * (M - mean M) / p1``, or of ``z = f * (M - p1) / p1`` in the
        debiased form. Its standard error is the standard deviation of z over the masks, divided by ``sqrt(n)``, with
        ``n - 1`` under the root if one mean was taken out, and ``n - 2`` if two were.
        """
        masks, ids, scores = observed.masks, observed.ids, observed.scores
        if self.form == "plain" or len(ids) < 3:
            return None
        is_centred = self.form == "centred"
        n, deviations = len(ids), centred(scores) if is_centred else _long(scores)

        def error(d: Tensor) -> Tensor:
            d, scale = scaled(d)
            weights = torch.cat([d, d.square(), d.new_ones(n, 1)], dim=1)
            sums, squares = masks.moments(ids, weights, d.square(), self.p1)
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

    def _spread_of_masks(self, masks: BoundMasks, ids: Ids) -> Tensor:
        """The standard deviation of a voxel over masks, a mean over the voxels that masks hide."""
        hidden = None if masks.regions is None else masks.regions.index > 0
        total = _long(torch.zeros((), device=masks.device))
        for _, rendered in masks.stream(ids):
            squares = rendered.sub_(self.p1).square_()
            total += (squares if hidden is None else squares * hidden).sum(dtype=total.dtype)
        voxels = math.prod(masks.spatial_shape) if hidden is None else hidden.sum()
        return (total / (len(ids) * (masks.channels or 1) * voxels)).sqrt()


def _long(scores: Tensor) -> Tensor:
    return scores.to(accumulation_dtype(scores.device))


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
        >>> from monai_saliency.estimators import DRISEScoring
        >>> from monai_saliency.masks import Observed, RandomGridMasks
        >>> masks = RandomGridMasks(num_masks=200, cell_size=4).bind(torch.zeros(1, 16, 16))
        >>> scores = masks.render(range(200))[:, :, 2, 2]  # a network whose score is the voxel (2, 2) of the mask
        >>> saliency = DRISEScoring().compute(Observed(masks, torch.tensor([1.0]), range(200), scores))
        >>> divmod(int(saliency.argmax()), 16)
        (2, 2)
    """

    def __init__(self, form: str = "centred") -> None:
        self.form = check_option("form", form, ["centred", "plain"])

    def compute(self, observed: Observed) -> Tensor:
        masks, ids, scores = observed.masks, observed.ids, observed.scores
        values = centred(scores) if self.form == "centred" else scores
        total, coverage = split_coverage(masks.weighted_sum(ids, with_ones(values)))
        found = torch.where(coverage > 0, total / coverage, 0.0)
        if self.form == "centred" and masks.regions is not None:
            found[..., masks.regions.index == 0] = 0  # which all masks keep
        return found.flatten(0, 1).to(masks.dtype)

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The rounding of the scores, if windows or regions are hidden in turn; None for masks drawn at random, and for
        the plain form.
        """
        is_known = self.form == "centred" and not observed.masks.drawn
        return score_rounding(observed, rounding) if is_known else None

    def standard_error(self, observed: Observed) -> Tensor | None:
        """Of the centred form, for three or more masks drawn at random: the error of a ratio of two means less a mean
        (:func:`~monai_saliency.estimators.base.ratio_error`). Otherwise None.
        """
        masks = observed.masks
        if self.form == "plain" or not masks.drawn or len(observed.ids) < 3:
            return None
        found = ratio_error(masks, observed.ids, observed.scores, 0.0, above_mean=True)
        return found if masks.regions is None else found * (masks.regions.index > 0)  # as the map


class MCRISEScoring(Estimator):
    """How far the score is higher where the image is kept than where a fill replaces it, one map for each fill
    (MC-RISE: Hatakeyama et al., ACCV 2020, section 3).

    f is the score of a mask, there are n masks and K fills, ``h_k`` is the share of fill k in a voxel, and
    ``m_0 = 1 - sum_k h_k`` the share of the image (:class:`~monai_saliency.masks.MCRISEMasks`).

    - ``"centred"``: ``sum((f - mean f) * (m_0 / p1 - K * h_k / (1 - p1))) / (n - 1)``, an estimate of ``E[f | the voxel
      is kept] - E[f | fill k replaces it]``: positive where the image supports the score against this fill. A constant
      in all scores changes nothing.
    - ``"debiased"``, the paper's: ``sum(f * (K * h_k / (1 - p1) - m_0 / p1)) / n``. **Its sign is the other way
      round**: positive where fill k raises the score. It adds the average score times what chance kept too often.
      xaitk-saliency's ``MCRISEScoring`` is a quarter of this map for p1 = 1/2, scaled to [-1, 1].

    Both are in the score's unit. Maps are ordered by explained value, then by fill, the case's own fill first.

    Args:
        p1: probability with which the masks keep a cell, above 0 and below 1.
        form: ``"centred"`` or ``"debiased"``.

    Raises:
        ValueError: when ``p1`` is out of its range, for another form, and (from ``compute``) for masks other than
            :class:`~monai_saliency.masks.MCRISEMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, ConstantFill, PerturbationInferer
        >>> from monai_saliency.estimators import MCRISEScoring
        >>> from monai_saliency.masks import MCRISEMasks
        >>> masks = MCRISEMasks(500, [ConstantFill(9.0)], grid_size=2)
        >>> explain = PerturbationInferer(masks, ClassScore([0], "none"), MCRISEScoring(0.5))
        >>> maps = explain(torch.full((1, 1, 4, 4), 3.0), lambda x: x[:, :, 0, 0])  # the score is the first voxel
        >>> (maps[0, :, 0, 0] > 0).tolist()  # 3 is more than fill 0, which is 0, and less than fill 1
        [True, False]
    """

    def __init__(self, p1: float = 0.5, form: str = "centred") -> None:
        probability("p1", p1)
        self.form = check_option("form", form, ["centred", "debiased"])
        if not 0 < p1 < 1:
            raise ValueError(
                f"`p1` must be above 0 and below 1, got {p1}: a voxel that is always kept, or never, has nothing to be "
                "compared with"
            )
        self.p1 = float(p1)

    def check(self, masks: BoundMasks) -> None:
        if masks.layer != "fill":
            raise ValueError(
                f"MC-RISE compares several fills, got masks of {masks.key[0]}, which have one: use MCRISEMasks(...)"
            )

    def compute(self, observed: Observed) -> Tensor:
        return self._as_rise().compute(self._contrasts(observed))

    def meaning(self, masks: BoundMasks) -> Meaning:
        if self.form == "centred":
            return Meaning("change of the score against each fill")
        return Meaning("change of the score by each fill")

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """As of RISE, of the differences in place of the masks."""
        return self._as_rise().noise(self._contrasts(observed), rounding)

    def standard_error(self, observed: Observed) -> Tensor | None:
        """As of RISE, of the differences in place of the masks."""
        return self._as_rise().standard_error(self._contrasts(observed))

    def _as_rise(self) -> RISEScoring:
        return RISEScoring(1.0, "centred" if self.form == "centred" else "debiased")

    def _contrasts(self, observed: Observed) -> Observed:
        """The same scores, of the differences in place of the masks."""
        masks = observed.masks
        self.check(masks)
        sign = 1 if self.form == "centred" else -1
        return replace(observed, masks=_Contrasts(masks, sign / self.p1, sign / (1 - self.p1)))


class _Contrasts(BoundMasks):
    """Takes the place of a mask in the formulas of RISE: ``1 + a * m_0 - b * K * h_k`` for each fill k."""

    def __init__(self, masks: BoundMasks, kept: float, hidden: float) -> None:
        self.base, self.kept, self.hidden = masks, kept, hidden
        self.spatial_shape, self.device, self.dtype = masks.spatial_shape, masks.device, masks.dtype
        self.channels, self.layer, self.key = masks.channels, masks.layer, masks.key

    def __len__(self) -> int:
        return len(self.base)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        return self.base.codes(ids)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> Tensor:
        shares = 1 - self.base._render(codes, device)
        kept = 1 - shares.sum(dim=1, keepdim=True)
        return shares.mul_(-self.hidden * shares.shape[1]).add_(kept, alpha=self.kept).add_(1)
