"""Total Sobol indices: the share of the score's variance that a cell has a part in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator, Meaning, score_rounding
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.sobol import BoundSobolMasks
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["SobolScoring"]


class SobolScoring(Estimator):
    """The share of the score's variance that a cell has a part in, alone or together with others (total Sobol indices:
    Fel et al., NeurIPS 2021, arXiv 2111.04138, section 3; estimator of Jansen, Comput. Phys. Commun. 117, 1999).

    With f(A) the score of a design's first mask and f(C) that of the mask in which one cell is exchanged, the cell's
    value is ``mean((f(A) - f(C))^2) / (2 V)`` over the designs. V is the variance of all scores of masks A and B; the
    authors' code takes those of A alone.

    **Unit**: a share of the variance, without sign: 0 where the cell changes nothing, 1 where it alone decides; a small
    sample may give more than 1. The map is flat in each cell. Scores that differ by rounding alone give zeros.

    Raises:
        ValueError: (from ``compute``) for masks other than :class:`~monai_saliency.SobolMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency import SobolMasks, SobolScoring
        >>> masks = SobolMasks(num_designs=64, grid_size=(1, 2)).bind(torch.zeros(1, 1, 4))
        >>> rendered = masks.render(range(len(masks)))[:, 0, 0]
        >>> state = SobolScoring().start(masks, torch.tensor([5.0]))
        >>> state.update(range(len(masks)), rendered[:, :1] * 2 + rendered[:, 3:])  # 2 x + y: shares of 4 to 1
        >>> [round(value, 1) for value in state.compute()[0, 0].tolist()]
        [0.8, 0.8, 0.2, 0.2]
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(masks, BoundSobolMasks):
            raise ValueError(f"total Sobol indices need SobolMasks, got masks of {masks.key[0]}: use sobol(...)")
        cells = len(masks.values)
        values = scores.to("cpu", accumulation_dtype(scores.device))
        values = values - values[:1]
        design, place = (torch.from_numpy(each) for each in np.divmod(np.asarray(ids, dtype=int), cells + 2))
        own = values.new_full((masks.num_designs, cells + 2, values.shape[1]), float("nan"))
        own[design, place] = values
        # Masks without a score are NaN, and so are their differences, which are left out.
        changes = (own[:, 2:] - own[:, :1]).square()
        spread = own[:, :2].flatten(0, 1)
        variance = (spread - spread.nanmean(dim=0)).square().nansum(dim=0)
        variance /= (spread[:, 0].isfinite().sum() - 1).clamp_min(1)
        shares = changes.nanmean(dim=0).nan_to_num() / (2 * variance)
        differ = (values.amax(dim=0) - values.amin(dim=0)) > score_rounding(scores, reference_scores).cpu()
        return masks.spread(torch.where(differ & (variance > 0), shares, 0.0).T)

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("share of the score's variance (Sobol)", in_score_unit=False, signed=False)
