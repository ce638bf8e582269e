"""The image itself, blurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.utils.arguments import positive_numbers, written
from monai_saliency.utils.precision import exact_arithmetic

__all__ = ["BlurFill"]


class BlurFill:
    """The image, blurred by a Gaussian: structure is removed, local brightness stays (Fong and Vedaldi, ICCV 2017,
    section 4.1).

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
        sigmas = np.atleast_1d(self.sigma).tolist()
        dims = images.ndim - 2
        if len(sigmas) not in (1, dims):
            raise ValueError(f"`sigma` must be one number or one per spatial axis ({dims}), got {self.sigma}")
        with exact_arithmetic(images.device):
            for sigma in sigmas if len(sigmas) == dims else sigmas * dims:  # the first axis becomes the last one
                images = torch.tensordot(images, _blurring(images.shape[2], sigma).to(images), dims=([2], [1]))
        return images


def _blurring(size: int, sigma: float) -> torch.Tensor:
    """A matrix ``(size, size)`` that blurs a line of voxels."""
    tail = int(4 * sigma + 0.5)
    offsets = torch.arange(-tail, tail + 1)
    kernel = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    read = (torch.arange(size)[:, None] + offsets).clamp(0, size - 1)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, read, (kernel / kernel.sum()).expand_as(read))
