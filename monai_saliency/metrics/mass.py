"""How much of a map lies inside the label, and how much outside."""

from __future__ import annotations

import math

import torch

from monai_saliency.metrics.base import SaliencyMetric, checked_labels, checked_maps
from monai_saliency.utils.arguments import number
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["Leakage", "MassInLabel", "highest_voxels"]


class MassInLabel(SaliencyMetric):
    """The share of a map's positive mass that lies inside the label (the energy-based pointing game of Wang et al.,
    Score-CAM, CVPR workshops 2020, section 4.3). In [0, 1], higher is better.

    Negative values count as 0. A map without positive values shows nothing: it counts as 0. A case with an empty label
    counts as NaN.

    ``reduction`` and ``get_not_nans`` are those of :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Example::

        >>> maps = torch.tensor([[[[3.0, -2.0], [1.0, 0.0]]]])
        >>> MassInLabel()(maps, torch.tensor([[[[1, 1], [0, 0]]]])).tolist()  # 3 of 4
        [[0.75]]
    """

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        return _share_inside(maps, checked_labels(maps, y))


class Leakage(SaliencyMetric):
    """The share of a map that lies outside a region: outside the label, or outside the field that the network can see.
    In [0, 1], lower is better.

    Give the region as the label map: a lesion, an organ, or the voxels that can change the score, such as the patches
    that reach what is explained. Outside of these a right map is 0.

    A map without positive values shows nothing: it counts as 1. A case with an empty region counts as NaN.

    ``reduction`` and ``get_not_nans`` are those of :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Args:
        top: measure the highest voxels instead of the positive mass: their share of all voxels, in (0, 1], rounded up.
            All voxels as high as the last of them count too.

    Raises:
        ValueError: when ``top`` is not in (0, 1].

    Example::

        >>> maps, label = torch.tensor([[[[3.0, -2.0], [1.0, 0.0]]]]), torch.tensor([[[[1, 1], [0, 0]]]])
        >>> Leakage()(maps, label).tolist(), Leakage(top=0.5)(maps, label).tolist()
        ([[0.25]], [[0.5]])
    """

    higher_is_better = False

    def __init__(self, top: float | None = None, reduction: str = "mean", get_not_nans: bool = False) -> None:
        super().__init__(reduction, get_not_nans)
        if top is not None and not 0 < number("top", top) <= 1:
            raise ValueError(f"`top` must be in (0, 1], a share of the voxels, got {top}")
        self.top = top

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        labels = checked_labels(maps, y)
        if self.top is not None:
            maps = highest_voxels(maps, self.top).to(maps)
        return 1 - _share_inside(maps, labels)


def highest_voxels(maps: torch.Tensor, share: float) -> torch.Tensor:
    """The highest voxels of maps ``(B, K, *spatial)``: a share of all, rounded up, and those as high as the last."""
    flat = maps.flatten(2)
    count = math.ceil(share * flat.shape[2] * (1 - 1e-12))  # 0.07 * 100 is above 7
    least = flat.kthvalue(flat.shape[2] - count + 1, dim=2).values
    level = least.reshape(*maps.shape[:2], *[1] * (maps.ndim - 2))
    shows = (flat.max(2).values > flat.min(2).values).reshape_as(level)
    return (maps >= level) & shows


def _share_inside(maps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mass = maps.clamp(min=0).flatten(2).to(accumulation_dtype(maps.device))
    inside, total = (mass * labels.flatten(2)).sum(2), mass.sum(2)
    share = torch.where(total > 0, inside / total, 0)
    return torch.where(labels.flatten(2).any(2), share, torch.nan)
