"""The pointing game: does the peak of a map lie inside the label?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from monai_saliency.metrics.base import SaliencyMetric, checked_labels, checked_maps
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.arguments import number

__all__ = ["Pointing"]


class Pointing(SaliencyMetric):
    """Whether the peak of a map lies inside the label: 1 or 0 (the pointing game of Zhang et al., ECCV 2016, section
    4.2). Higher is better; the mean is the share of hits.

    The peak is found by :func:`~monai_saliency.metrics.peak.peak_voxel`. A map whose voxels are all equal points
    nowhere: it counts as 0. A case with an empty label counts as NaN.

    ``reduction`` and ``get_not_nans`` are those of :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Args:
        tolerance: how far from the label the peak may lie, in voxels, Euclidean, at least 0. By default it must lie
            strictly inside. Zhang et al. allow 15 pixels.

    Raises:
        ValueError: when ``tolerance`` is negative, and (when called) for maps that are not finite and labels that are
            not on their grid.

    Example::

        >>> maps = torch.tensor([[[[0.0, 1.0, 3.0], [0.0, 2.0, 1.0]]]])
        >>> label = torch.tensor([[[[0, 1, 0], [0, 1, 0]]]])
        >>> Pointing()(maps, label).tolist(), Pointing(tolerance=1)(maps, label).tolist()
        ([[0.0]], [[1.0]])
    """

    def __init__(self, tolerance: float = 0.0, reduction: str = "mean", get_not_nans: bool = False) -> None:
        super().__init__(reduction, get_not_nans)
        self.tolerance = number("tolerance", tolerance, 0)

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        labels = checked_labels(maps, y)
        found = [
            self._hit(one.numpy(force=True), label)
            for one, label in zip(maps.flatten(0, 1), labels.flatten(0, 1), strict=True)
        ]
        return torch.tensor(found, device=maps.device).reshape(maps.shape[:2])

    def _hit(self, saliency: np.ndarray[Any, Any], label: torch.Tensor) -> float:
        inside = label.nonzero()
        if not len(inside):
            return float("nan")
        if saliency.min() == saliency.max():
            return 0.0
        peak = torch.tensor(peak_voxel(saliency), device=label.device)
        return float(((inside - peak) ** 2).sum(1).min() <= self.tolerance**2)
