"""Constant fills: a given value, or each channel's mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.utils.arguments import finite_numbers

__all__ = ["ConstantFill", "MeanFill"]


class ConstantFill:
    """One value everywhere, in the unit of the network's input.

    The value is the value after preprocessing. For a value in the scan's own unit, such as -1000 HU, use
    :class:`~monai_saliency.ScanUnitFill`.

    Args:
        value: one number for all channels, or one per channel.

    Raises:
        ValueError: when ``value`` is not a finite number or several, and (when called) if there is not one value per
            channel.

    Example::

        >>> import torch
        >>> from monai_saliency import ConstantFill
        >>> ConstantFill([0.5, -1.0])(torch.zeros(1, 2, 1, 3)).tolist()
        [[[[0.5, 0.5, 0.5]], [[-1.0, -1.0, -1.0]]]]
    """

    def __init__(self, value: float | Sequence[float] = 0.0) -> None:
        finite_numbers("value", value)
        self.value = value

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        values = torch.as_tensor(self.value, dtype=images.dtype, device=images.device)
        if values.ndim and values.numel() != images.shape[1]:
            raise ValueError(
                f"`value` must be one number or one per channel, got {values.numel()} for {images.shape[1]} channels"
            )
        return values.reshape(1, -1, *[1] * (images.ndim - 2)).expand_as(images)


class MeanFill:
    """The mean of each channel of each image, over all voxels including the background.

    Example::

        >>> import torch
        >>> from monai_saliency import MeanFill
        >>> MeanFill()(torch.tensor([[[[1.0, 2.0, 6.0]]]])).tolist()
        [[[[3.0, 3.0, 3.0]]]]
    """

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=tuple(range(2, images.ndim)), keepdim=True).expand_as(images)
