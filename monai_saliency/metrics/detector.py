"""The map as a detector of the label's voxels: average precision, and intersection over union."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monai_saliency.metrics.base import SaliencyMetric, checked_labels, checked_maps
from monai_saliency.metrics.ranks import last_of_ties
from monai_saliency.utils.arguments import number
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["AUPRC", "MeanIoU"]


class AUPRC(SaliencyMetric):
    """The average precision of a map's values as a detector of the label's voxels: the area under the precision-recall
    curve as a step function. In [0, 1], higher is better; a random map gives about the label's share of the voxels.

    Voxels with equal values are found together. Equal to scikit-learn's ``average_precision_score``. A case with an
    empty label counts as NaN.

    ``reduction`` and ``get_not_nans`` are those of :class:`~monai_saliency.metrics.base.SaliencyMetric`.

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

    ``reduction`` and ``get_not_nans`` are those of :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Args:
        threshold: in the map's unit; voxels above it are compared with the label. None: the best.

    Raises:
        ValueError: when ``threshold`` is not a finite number.

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
        yield label[order], last_of_ties(ordered[None])[0]


def _average_precision(inside: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    precise = accumulation_dtype(inside.device)
    precision = inside.cumsum(0)[last].to(precise) / (last + 1)
    return (precision * inside).sum() / inside.sum()  # NaN without a label


def _best_iou(inside: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    both, total = inside.cumsum(0)[last].to(accumulation_dtype(inside.device)), inside.sum()
    return torch.where(total > 0, (both / (last + 1 + total - both)).max(), torch.nan)
