"""A map against a label: where its peak lies, how much of it lies inside, and how well its values find the label."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from monai_saliency.metrics.base import SaliencyMetric, checked_labels, checked_maps
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.arguments import number
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["AUPRC", "Leakage", "MassInLabel", "MeanIoU", "Pointing", "highest_voxels"]


class Pointing(SaliencyMetric):
    """Whether the peak of a map lies inside the label: 1 or 0 (the pointing game of Zhang et al., ECCV 2016, section
    4.2). Higher is better; the mean is the share of hits.

    The peak is found by :func:`~monai_saliency.metrics.peak.peak_voxel`. A map whose voxels are all equal points
    nowhere: it counts as 0. A case with an empty label counts as NaN.

    Args:
        tolerance: how far from the label the peak may lie, in voxels, Euclidean, at least 0. By default it must lie
            strictly inside. Zhang et al. allow 15 pixels.

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
        found = [self._hit(*each) for each in zip(maps.flatten(0, 1), labels.flatten(0, 1), strict=True)]
        return torch.tensor(found, device=maps.device).reshape(maps.shape[:2])

    def _hit(self, saliency: torch.Tensor, label: torch.Tensor) -> float:
        inside = label.nonzero()
        if not len(inside):
            return math.nan
        if saliency.min() == saliency.max():
            return 0.0
        peak = torch.tensor(peak_voxel(saliency.numpy(force=True)), device=label.device)
        return float(((inside - peak) ** 2).sum(1).min() <= self.tolerance**2)


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
        found = [_average_precision(*each) for each in _sorted_maps(maps, labels)]
        return torch.stack(found).reshape(maps.shape[:2])


class MeanIoU(SaliencyMetric):
    """The intersection over union of the label and the voxels above a threshold. In [0, 1], higher is better. The mean
    is over cases and maps.

    By default each map has the threshold that suits it best, among its own values. That is an upper bound: nobody knows
    this threshold without the label. Compare it with the controls, or give a threshold.

    A case with an empty label counts as NaN.

    Args:
        threshold: in the map's unit; voxels above it are compared with the label. None: the best.

    Example::

        >>> maps, label = torch.tensor([[[[4.0, 3.0], [2.0, 1.0]]]]), torch.tensor([[[[1, 1], [0, 0]]]])
        >>> MeanIoU()(maps, label).tolist(), MeanIoU(threshold=3.5)(maps, label).tolist()
        ([[1.0]], [[0.5]])
    """

    def __init__(self, threshold: float | None = None, reduction: str = "mean", get_not_nans: bool = False) -> None:
        super().__init__(reduction, get_not_nans)
        self.threshold = None if threshold is None else number("threshold", threshold)

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        labels = checked_labels(maps, y)
        if self.threshold is None:
            return torch.stack([_best_iou(*each) for each in _sorted_maps(maps, labels)]).reshape(maps.shape[:2])
        above = maps > self.threshold
        both, either = ((above & labels).flatten(2).sum(2), (above | labels).flatten(2).sum(2))
        precise = accumulation_dtype(maps.device)
        return torch.where(labels.flatten(2).any(2), both.to(precise) / either, torch.nan)


def _sorted_maps(maps: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each map, at its voxels from the highest down: whether the label holds it, and the last equal voxel."""
    # One at a time: indices of many maps would take several times their memory.
    for one, label in zip(maps.flatten(0, 1).flatten(1), labels.flatten(0, 1).flatten(1), strict=True):
        ordered, order = one.sort(descending=True)
        yield label[order], len(one) - 1 - torch.searchsorted(ordered.flip(0), ordered)


def _average_precision(inside: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    precise = accumulation_dtype(inside.device)
    precision = inside.cumsum(0)[last].to(precise) / (last + 1)
    return (precision * inside).sum() / inside.sum()  # NaN without a label


def _best_iou(inside: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    both, total = inside.cumsum(0)[last].to(accumulation_dtype(inside.device)), inside.sum()
    return torch.where(total > 0, (both / (last + 1 + total - both)).max(), torch.nan)
