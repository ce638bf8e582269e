"""A map against a label: where its peak lies, how much of it lies inside, and how well its values find the label."""

from __future__ import annotations

import math

import torch

from monai_saliency.metrics.base import SaliencyMetric, checked_labels, checked_maps
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.arguments import fraction
from monai_saliency.utils.precision import accumulation_dtype


class Pointing(SaliencyMetric):
    """Whether the peak of a map lies inside the label: 1 or 0 (the pointing game of Zhang et al., ECCV 2016, section
    4.2, who also count peaks within 15 pixels of it). Higher is better; the mean is the share of hits.

    The peak is found by :func:`~monai_saliency.metrics.peak.peak_voxel`. A map whose voxels are all equal points
    nowhere: it counts as 0. A case with an empty label counts as NaN.

    Example::

        >>> maps = torch.tensor([[[[0.0, 1.0, 3.0], [0.0, 2.0, 1.0]]]])
        >>> Pointing()(maps, torch.tensor([[[[0, 1, 1], [0, 0, 0]]]])).tolist()
        [[1.0]]
    """

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        labels = checked_labels(maps, y)
        hits = []
        for saliency, label in zip(maps.flatten(0, 1), labels.flatten(0, 1), strict=True):
            hits.append(_hit(saliency, label))
        return torch.tensor(hits, device=maps.device).reshape(maps.shape[:2])


def _hit(saliency: torch.Tensor, label: torch.Tensor) -> float:
    """Whether the peak of a map ``(*spatial)`` lies inside its label: 1.0 or 0.0; NaN for an empty label."""
    if not label.any():
        return math.nan
    if saliency.min() == saliency.max():
        return 0.0
    return float(label[peak_voxel(saliency.numpy(force=True))])


class MassInLabel(SaliencyMetric):
    """The share of a map's positive mass that lies inside the label (the energy-based pointing game of Wang et al.,
    Score-CAM, CVPR workshops 2020, section 4.3). In [0, 1], higher is better.

    Negative values count as 0. A map without positive values counts as 0, a case with an empty label as NaN.

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

    Args:
        top: measure the highest voxels instead of the positive mass: their share of all voxels, in (0, 1], rounded up.
            All voxels as high as the last of them count too.

    Example::

        >>> maps, label = torch.tensor([[[[3.0, -2.0], [1.0, 0.0]]]]), torch.tensor([[[[1, 1], [0, 0]]]])
        >>> Leakage()(maps, label).tolist(), Leakage(top=0.5)(maps, label).tolist()
        ([[0.25]], [[0.5]])
    """

    higher_is_better = False

    def __init__(self, top: float | None = None, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.top = None if top is None else fraction("top", top)

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        labels = checked_labels(maps, y)
        if self.top is not None:
            maps = highest_voxels(maps, self.top).to(maps)
        return 1 - _share_inside(maps, labels)


def highest_voxels(maps: torch.Tensor, share: float) -> torch.Tensor:
    """The highest voxels of maps ``(B, K, *spatial)``: a share of all, rounded up, and those as high as the last."""
    flat = maps.flatten(2)
    voxels = flat.shape[2]
    count = math.ceil(share * voxels * (1 - 1e-12))  # 0.07 * 100 is above 7
    level = flat.kthvalue(voxels - count + 1, dim=2, keepdim=True).values
    is_flat = flat.amax(2, keepdim=True) == flat.amin(2, keepdim=True)
    return ((flat >= level) & ~is_flat).reshape(maps.shape)


def _share_inside(maps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share ``(B, K)`` of the positive mass of maps that lies inside their labels; NaN where a label is empty."""
    mass = maps.clamp(min=0).flatten(2).to(accumulation_dtype(maps.device))
    inside, total = (mass * labels.flatten(2)).sum(2), mass.sum(2)
    share = torch.where(total > 0, inside / total, 0)
    return torch.where(labels.flatten(2).any(2), share, torch.nan)


class AUPRC(SaliencyMetric):
    """The average precision of a map's values as a detector of the label's voxels: the area under the precision-recall
    curve as a step function. In [0, 1], higher is better; a random map gives about the label's share of the voxels.

    Voxels with equal values are found together. Equal to scikit-learn's ``average_precision_score``. A case with an
    empty label counts as NaN.

    Example::

        >>> maps = torch.tensor([[[[4.0, 3.0], [2.0, 1.0]]]])
        >>> round(AUPRC()(maps, torch.tensor([[[[1, 0], [1, 0]]]])).item(), 3)  # (1 / 1 + 2 / 3) / 2
        0.833
    """

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        labels = checked_labels(maps, y)
        precisions = []
        # One at a time: indices of many maps would take several times their memory.
        for saliency, label in zip(maps.flatten(0, 1), labels.flatten(0, 1), strict=True):
            precisions.append(_average_precision(saliency.flatten(), label.flatten()))
        return torch.stack(precisions).reshape(maps.shape[:2])


def _average_precision(values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The average precision of a map's voxels ``(n,)``, of which some are inside the label; NaN without a label."""
    ordered, order = values.sort(descending=True)
    inside = inside[order]
    last_equal = len(values) - 1 - torch.searchsorted(ordered.flip(0), ordered)  # the place of the last equal voxel
    hits = inside.cumsum(0)[last_equal].to(accumulation_dtype(values.device))
    precision = hits / (last_equal + 1)
    return (precision * inside).sum() / inside.sum()
