"""Integrated gradients (Sundararajan, Taly and Yan, ICML 2017)."""

from __future__ import annotations

import numpy as np
import torch

from monai_saliency.estimators.base import Meaning
from monai_saliency.gradients.base import GradientMethod
from monai_saliency.utils.arguments import whole_number


class IntegratedGradients(GradientMethod):
    """The derivative, integrated along the straight line from the fill to the image, times the way from the one to the
    other (Section 3, equation 1). The baseline of the paper is the fill.

    A voxel's value is its share of ``f(image) - f(fill)``, in the score's unit; channels are added up. The integral is
    the Gauss-Legendre sum of ``steps`` points, where the paper adds up points at equal distances.

    Args:
        steps: points on the line.

    Raises:
        ValueError: when ``steps`` is not a whole number of at least 1.
    """

    meaning = Meaning("integrated gradients: the voxel's share of the change of the score", 0.0, in_score_unit=False)

    def __init__(self, steps: int = 50) -> None:
        self.steps = whole_number("steps", steps, 1)

    def __len__(self) -> int:
        return self.steps

    def at(self, number: int, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        points, _ = np.polynomial.legendre.leggauss(self.steps)
        return torch.lerp(fill, image, float(1 + points[number]) / 2)

    def weights(self) -> torch.Tensor:
        return torch.from_numpy(np.polynomial.legendre.leggauss(self.steps)[1] / 2)

    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return (mean * (image.to(mean) - fill.to(mean))).sum(dim=0)
