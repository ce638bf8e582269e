"""Fills that need the image alone: a given value, each channel's mean, and the image itself, blurred."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monai_saliency.utils.arguments import finite_numbers, per_axis, positive_numbers, written
from monai_saliency.utils.precision import exact_arithmetic


class ConstantFill:
    """One value everywhere, in the unit of the network's input.

    The value is the value after preprocessing. For a value in the scan's own unit, such as -1000 HU, use
    :class:`~monai_saliency.ScanUnitFill`.

    Args:
        value: one number for all channels, or one per channel.

    Raises:
        ValueError: when ``value`` is not a finite number or several, and (when called) unless each channel has one.

    Example::

        >>> import torch
        >>> from monai_saliency import ConstantFill
        >>> ConstantFill([0.5, -1.0])(torch.zeros(1, 2, 1, 3)).tolist()
        [[[[0.5, 0.5, 0.5]], [[-1.0, -1.0, -1.0]]]]
    """

    __repr__ = written

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

    __repr__ = written

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=tuple(range(2, images.ndim)), keepdim=True).expand_as(images)


class BlurFill:
    """The image, blurred by a Gaussian: local brightness stays (Fong and Vedaldi, ICCV 2017, section 4.1).

    The Gaussian is cut off at four standard deviations. Beyond the border the edge voxel is repeated, so that borders
    do not get darker.

    Args:
        sigma: standard deviation of the Gaussian in voxels, above 0, one number or one per spatial axis.

    Raises:
        ValueError: when ``sigma`` is not positive, or (when called) has not one number per spatial axis.

    Example::

        >>> import torch
        >>> from monai_saliency import BlurFill
        >>> image = torch.zeros(1, 1, 5, 5)
        >>> image[0, 0, 2, 2] = 1
        >>> round(float(BlurFill(sigma=1.0)(image)[0, 0, 2, 2]), 3)  # 1 / (2 * pi * sigma ** 2)
        0.159
    """

    __repr__ = written

    def __init__(self, sigma: float | Sequence[float] = 5.0) -> None:
        positive_numbers("sigma", sigma)
        self.sigma = sigma

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        with exact_arithmetic(images.device):
            for sigma in per_axis("sigma", self.sigma, images.ndim - 2):  # the first axis becomes the last one
                matrix = _blurring(images.shape[2], sigma).to(images)
                images = torch.tensordot(images, matrix, dims=([2], [1]))
        return images


def _blurring(size: int, sigma: float) -> torch.Tensor:
    """A matrix ``(size, size)`` that blurs a line of voxels."""
    tail = int(4 * sigma + 0.5)
    offsets = torch.arange(-tail, tail + 1)
    kernel = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    weights = kernel / kernel.sum()
    places = torch.arange(size)[:, None]
    read = (places + offsets).clamp(0, size - 1)  # (size, 2 * tail + 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, read, weights.expand_as(read))
