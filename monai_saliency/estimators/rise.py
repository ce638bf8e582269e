"""RISE: the average score while a voxel is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.estimators.base import Estimator, split_coverage, with_ones
from monai_saliency.masks.base import BoundMasks
from monai_saliency.utils.arguments import probability

__all__ = ["RISEScoring"]


class RISEScoring(Estimator):
    """The average score while a voxel is kept (RISE: Petsiuk et al., BMVC 2018, equation 6).

    f is the score of a mask M, and there are n masks.

    - Plain form (``p1=0``): ``sum(f * M) / (n * E[M])``, where E[M] is the mean value of the masks. Read such a map
      relative to its own mean.
    - Debiased form (``p1`` above 0; Hatakeyama et al., ACCV 2020): ``sum(f * (M - p1)) / (n * p1)``. It is centred at
      zero, and says how far keeping a voxel raises the score above the average perturbed score. Voxels in no region,
      which no mask hides, are 0.

    Both are in the score's unit. xaitk-saliency's ``RISEScoring`` gives the same maps, scaled to [-1, 1].

    Args:
        p1: probability in [0, 1] with which the masks keep a cell or region, for the debiased form; 0 for the plain
            form.

    Raises:
        ValueError: when ``p1`` is not in [0, 1].

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

    def __init__(self, p1: float = 0.0) -> None:
        probability("p1", p1)
        self.p1 = float(p1)

    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        if self.p1:
            weighted = masks.weighted_sum(indices, scores)
            total = scores.to(weighted).sum(dim=0)
            weighted -= self.p1 * total.reshape(-1, *[1] * (weighted.ndim - 1))
            weighted /= self.p1 * len(indices)
            if masks.regions is not None:
                # All masks keep the voxels in no region, not a fraction p1 of them, so nothing is known about these.
                weighted[..., masks.regions.index == 0] = 0
        else:
            weighted, coverage = split_coverage(masks.weighted_sum(indices, with_ones(scores)))
            kept = coverage.mean(dim=tuple(range(1, coverage.ndim)), keepdim=True)
            # Masks that keep nothing say nothing about any voxel.
            weighted = torch.where(kept > 0, weighted / kept, weighted)
        return weighted.flatten(0, 1).to(masks.dtype)
