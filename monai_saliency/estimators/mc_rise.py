"""MC-RISE: how far each of several fills lowers the score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator, Meaning
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.arguments import check_option, probability

__all__ = ["MCRISEScoring"]


class MCRISEScoring(Estimator):
    """How far the score is higher where the image is kept than where a fill replaces it, one map for each fill
    (MC-RISE: Hatakeyama et al., ACCV 2020, section 3).

    f is the score of a mask, there are n masks and K fills, ``h_k`` is the share of fill k in a voxel, and
    ``m_0 = 1 - sum_k h_k`` the share of the image (:class:`~monai_saliency.MCRISEMasks`).

    - ``"centred"``: ``sum((f - mean f) * (m_0 / p1 - K * h_k / (1 - p1))) / (n - 1)``, an estimate of ``E[f | the voxel
      is kept] - E[f | fill k replaces it]``: positive where the image supports the score against this fill. A constant
      in all scores changes nothing.
    - ``"debiased"``, the paper's: ``sum(f * (K * h_k / (1 - p1) - m_0 / p1)) / n``. **Its sign is the other way
      round**: positive where fill k raises the score. It adds the average score times what chance kept too often.
    - ``"xaitk"``: ``sum(f * (K * h_k * (1 - p1) - m_0 * p1)) / n``, which xaitk-saliency's ``MCRISEScoring`` scales to
      [-1, 1]. For p1 = 1/2 it is a quarter of the paper's map; for another p1 it is biased by the average score.

    The first two are in the score's unit. Maps are ordered by explained value, then by fill, the case's own fill first.

    Args:
        p1: probability with which the masks keep a cell, above 0 and below 1; in [0, 1] for ``"xaitk"``.
        form: ``"centred"``, ``"debiased"`` or ``"xaitk"``.

    Raises:
        ValueError: when ``p1`` is out of its range, for another form, and (from ``compute``) for masks other than
            :class:`~monai_saliency.MCRISEMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, ConstantFill, MCRISEMasks, MCRISEScoring, PerturbationInferer
        >>> masks = MCRISEMasks(500, [ConstantFill(9.0)], grid_size=2)
        >>> explain = PerturbationInferer(masks, ClassScore([0], "none"), MCRISEScoring(0.5))
        >>> maps = explain(torch.full((1, 1, 4, 4), 3.0), lambda x: x[:, :, 0, 0])  # the score is the first voxel
        >>> (maps[0, :, 0, 0] > 0).tolist()  # 3 is more than fill 0, which is 0, and less than fill 1
        [True, False]
    """

    def __init__(self, p1: float = 0.5, form: str = "centred") -> None:
        probability("p1", p1)
        self.form = check_option("form", form, ["centred", "debiased", "xaitk"])
        if form != "xaitk" and not 0 < p1 < 1:
            raise ValueError(
                f"`p1` must be above 0 and below 1, got {p1}: a voxel that is always kept, or never, has nothing to be "
                "compared with"
            )
        self.p1 = float(p1)

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        return self._as_rise().compute(self._contrasts(masks), ids, scores, reference_scores)

    def meaning(self, masks: BoundMasks) -> Meaning:
        if self.form == "centred":
            return Meaning("change of the score against each fill")
        return Meaning("change of the score by each fill", in_score_unit=self.form != "xaitk")

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """As :meth:`~monai_saliency.RISEScoring.noise`, of the differences in place of the masks; None for ``"xaitk"``,
        which is biased.
        """
        if self.form == "xaitk":
            return None
        return self._as_rise().noise(self._contrasts(masks), ids, scores, reference_scores, rounding)

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """As :meth:`~monai_saliency.RISEScoring.standard_error`, of the differences in place of the masks; None for
        ``"xaitk"``, which is biased, and for fewer than three masks.
        """
        if self.form == "xaitk":
            return None
        return self._as_rise().standard_error(self._contrasts(masks), ids, scores, reference_scores)

    def _as_rise(self) -> RISEScoring:
        return RISEScoring(1.0, "centred" if self.form == "centred" else "debiased")

    def _contrasts(self, masks: BoundMasks) -> _Contrasts:
        if masks.layer != "fill":
            raise ValueError(
                f"MC-RISE compares several fills, got masks of {masks.key[0]}, which have one: use MCRISEMasks(...)"
            )
        if self.form == "xaitk":
            return _Contrasts(masks, -self.p1, -(1 - self.p1))
        sign = 1 if self.form == "centred" else -1
        return _Contrasts(masks, sign / self.p1, sign / (1 - self.p1))


class _Contrasts(BoundMasks):
    """What stands in the place of a mask in the formulas of RISE: ``1 + a * m_0 - b * K * h_k`` for each fill k."""

    def __init__(self, masks: BoundMasks, kept: float, hidden: float) -> None:
        self.base, self.kept, self.hidden = masks, kept, hidden
        self.spatial_shape, self.device, self.dtype = masks.spatial_shape, masks.device, masks.dtype
        self.channels, self.layer, self.key = masks.channels, masks.layer, masks.key

    def __len__(self) -> int:
        return len(self.base)

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        return self.base.codes(ids)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        shares = 1 - self.base._render(codes, device)
        kept = 1 - shares.sum(dim=1, keepdim=True)
        return shares.mul_(-self.hidden * shares.shape[1]).add_(kept, alpha=self.kept).add_(1)
