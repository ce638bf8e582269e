"""Fills of one value."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ConstantFill", "MeanFill"]


class ConstantFill:
    """One value everywhere, in the units of the network's input (after normalisation, not the scan's own units).

    Args:
        value: one number, or one per channel.
    """

    def __init__(self, value: float | Sequence[float] = 0.0) -> None:
        self.value = value

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        values = torch.as_tensor(self.value, dtype=images.dtype, device=images.device)
        if values.ndim and values.numel() != images.shape[1]:
            raise ValueError(
                f"`value` must be one number or one per channel, got {values.numel()} for {images.shape[1]} channels"
            )
        return values.reshape(1, -1, *[1] * (images.ndim - 2)).expand_as(images)


class MeanFill:
    """Each channel's mean over its image, background included."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=tuple(range(2, images.ndim)), keepdim=True).expand_as(images)
