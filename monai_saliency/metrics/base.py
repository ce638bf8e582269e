"""The base of all metrics of maps: MONAI's cumulative metrics, with a value for each map."""

from __future__ import annotations

from abc import abstractmethod

import torch
from monai.metrics import do_metric_reduction
from monai.utils import MetricReduction

from monai_saliency.utils.arguments import check_option, flag
from monai_saliency.utils.monai_private import BatchMetric
from monai_saliency.utils.tensors import check_labels, plain

__all__ = ["SaliencyMetric", "checked_labels", "checked_maps"]


class SaliencyMetric(BatchMetric):
    """A number for each saliency map, usable in any MONAI evaluator. A subclass implements :meth:`compute`.

    Called with a batch, it returns the numbers ``(B, K)`` and keeps them; :meth:`aggregate` reduces what was kept, and
    ``reset`` begins anew. Batches are tensors ``(B, K, *spatial)`` or lists of channel-first items. A value that
    cannot be measured, such as for a case with an empty label, is NaN and left out of the mean.

    Args:
        reduction: how :meth:`aggregate` reduces cases and maps, as MONAI's metrics do: ``"mean"``, ``"sum"``,
            ``"mean_batch"``, ``"sum_batch"``, ``"mean_channel"``, ``"sum_channel"`` or ``"none"``.
        get_not_nans: whether :meth:`aggregate` also returns how many numbers are not NaN.

    Attributes:
        higher_is_better: the direction of the metric.

    Raises:
        ValueError: when ``reduction`` is another word.

    Example::

        >>> import torch
        >>> class Highest(SaliencyMetric):
        ...     def compute(self, y_pred, y=None):
        ...         return y_pred.flatten(2).amax(2)
        >>> metric = Highest()
        >>> metric(torch.tensor([[[[0.0, 2.0]]], [[[4.0, 1.0]]]])).tolist()
        [[2.0], [4.0]]
        >>> metric.aggregate().item()
        3.0
    """

    higher_is_better: bool = True

    def __init__(self, reduction: MetricReduction | str = "mean", get_not_nans: bool = False) -> None:
        super().__init__()
        words = [each.value for each in MetricReduction]
        self.reduction = check_option("reduction", getattr(reduction, "value", reduction), words)
        self.get_not_nans = flag("get_not_nans", get_not_nans)

    @abstractmethod
    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Measure one batch, without keeping the numbers.

        Args:
            y_pred: saliency maps ``(B, K, *spatial)``, finite, 2D or 3D.
            y: what the metric compares them with, batch first.

        Returns:
            ``(B, K)``, on the maps' device.
        """

    def aggregate(
        self, reduction: MetricReduction | str | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Reduce the numbers of all batches since the last reset, by the class's ``reduction`` or another.

        Returns:
            the reduced numbers, NaN where all of them are; with ``get_not_nans`` also how many are not.

        Raises:
            ValueError: when no batch was measured.
        """
        values = self.get_buffer()
        if not isinstance(values, torch.Tensor):
            raise ValueError(f"{type(self).__name__} has measured no map yet: call it with maps first")
        reduction = reduction or self.reduction
        result, not_nans = do_metric_reduction(values, reduction)
        if reduction != MetricReduction.NONE:
            # MONAI gives 0 where nothing could be measured, which would read as the worst map or as the best.
            result = torch.where(not_nans > 0, result, torch.nan)
        return (result, not_nans) if self.get_not_nans else result


def checked_maps(y_pred: torch.Tensor) -> torch.Tensor:
    """Finite 2D or 3D maps ``(B, K, *spatial)`` as a plain tensor, float32 or float64; ValueError for anything else."""
    maps = plain(y_pred)
    if not isinstance(maps, torch.Tensor) or maps.ndim not in (4, 5) or not maps.numel():
        shape = tuple(maps.shape) if isinstance(maps, torch.Tensor) else f"a {type(maps).__name__}"
        raise ValueError(f"`y_pred` must be saliency maps (B, K, *spatial), 2D or 3D, got {shape}")
    if not bool(torch.isfinite(maps).all()):
        wrong = (~torch.isfinite(maps)).flatten(1).any(1).nonzero().flatten().tolist()
        raise ValueError(f"`y_pred` must be finite: the maps of item {wrong[0]} hold NaN or infinity")
    return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()


def checked_labels(maps: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """The voxels of each map's label, bool ``(B, K, *spatial)`` on the maps' device."""
    labels = plain(y)
    if not isinstance(labels, torch.Tensor):
        raise ValueError("`y` must be label maps (B, 1, *spatial), got nothing to compare the maps with")
    fits = labels.ndim == maps.ndim and labels.shape[1] in (1, maps.shape[1])
    if not fits or labels.shape[0] != maps.shape[0] or labels.shape[2:] != maps.shape[2:]:
        expected = (len(maps), 1, *maps.shape[2:])
        raise ValueError(f"`y` must be label maps {expected}, on the grid of the maps, got {tuple(labels.shape)}")
    check_labels(labels)
    return (labels != 0).to(maps.device).expand_as(maps)
