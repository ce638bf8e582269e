"""A fill that blurs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from monai.networks.layers import separable_filtering

from monai_saliency.utils.precision import exact_arithmetic

__all__ = ["BlurFill"]


class BlurFill:
    """The image itself, blurred, so that structure goes and the local brightness stays (Fong and Vedaldi, ICCV 2017,
    section 4.1).

    The kernel is cut at four standard deviations; beyond the border the edge voxel is repeated, so that borders do
    not darken.

    Args:
        sigma: standard deviation of the Gaussian in voxels, one number or one per spatial axis.
    """

    def __init__(self, sigma: float | Sequence[float] = 5.0) -> None:
        if np.min(sigma) <= 0:
            raise ValueError(f"`sigma` must be positive, got {sigma}")
        self.sigma = sigma

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        sigmas = np.atleast_1d(self.sigma).tolist()
        dims = images.ndim - 2
        if len(sigmas) not in (1, dims):
            raise ValueError(f"`sigma` must be one number or one per spatial axis ({dims}), got {self.sigma}")
        kernels = [_gaussian_kernel(sigma).to(images) for sigma in (sigmas if len(sigmas) == dims else sigmas * dims)]
        with exact_arithmetic(images.device):
            return separable_filtering(images, kernels, mode="replicate")


def _gaussian_kernel(sigma: float) -> torch.Tensor:
    # MONAI's gaussian_1d is float32 only, which would round the fill of a float64 image.
    tail = int(4 * sigma + 0.5)
    offset = torch.arange(-tail, tail + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (offset / sigma) ** 2)
    return kernel / kernel.sum()
