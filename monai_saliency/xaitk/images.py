"""Images at the border: arrays with the channel last, and tensors with the channel first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["fill_of", "image_of", "tensor_of"]


def tensor_of(image: np.ndarray, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """An image ``(H, W)`` or ``(H, W, C)`` as a tensor ``(C, H, W)``.

    Args:
        image: of any real type.
        dtype: of the tensor; float32 by default, or float64 where that holds the image's type and float32 does not.
        device: of the tensor.

    Raises:
        ValueError: for other axes, or numbers that are not real.
    """
    image = np.asarray(image)
    if image.ndim not in (2, 3):
        raise ValueError(f"an image has the axes (H, W) or (H, W, C), got shape {image.shape}")
    if image.dtype.kind not in "buif":
        raise ValueError(f"an image holds real numbers, got type {image.dtype}")
    if dtype is None:
        dtype = torch.float32 if np.can_cast(image.dtype, np.float32) else torch.float64
    first = image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)
    as_float = first.astype(np.float64 if dtype == torch.float64 else np.float32, order="C")
    return torch.from_numpy(as_float).to(device, dtype)


def image_of(image: torch.Tensor) -> np.ndarray:
    """An image ``(C, H, W)`` as an array ``(H, W)``, where it has one channel, or ``(H, W, C)``.

    Raises:
        ValueError: for an image with other axes, such as a volume.
    """
    if image.ndim != 3:
        raise ValueError(
            f"xaitk-saliency explains 2D images, got one of shape {tuple(image.shape)} (C, *spatial); for volumes use "
            "the methods of monai_saliency"
        )
    array = image.detach().cpu().numpy()
    return array[0] if len(array) == 1 else np.ascontiguousarray(np.moveaxis(array, 0, -1))


def fill_of(fill: Any, image: np.ndarray) -> np.ndarray:
    """A fill as an array that is broadcast with an image: a number, one per channel, or an image.

    Raises:
        ValueError: when it does not fit the image, or the image's type does not hold it.
    """
    values = np.asarray(0 if fill is None else fill)
    if values.dtype.kind not in "buif":
        raise ValueError(f"`fill` must be a number, one per channel, or an image, got {fill!r}")
    try:
        fits = np.broadcast_shapes(values.shape, image.shape) == image.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`fill` of shape {values.shape} does not fit an image of shape {image.shape}: give a number, one number "
            "per channel, or an image of that shape"
        )
    if image.dtype.kind in "ui" and values.size:
        kind = np.iinfo(image.dtype)
        if values.min() < kind.min or values.max() > kind.max:
            raise ValueError(
                f"`fill` must lie in [{kind.min}, {kind.max}], as the image's type {image.dtype}, got {fill}"
            )
    return values
