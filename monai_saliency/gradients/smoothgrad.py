"""SmoothGrad (Smilkov et al., 2017)."""

from __future__ import annotations

import numpy as np
import torch

from monai_saliency.estimators.base import Meaning
from monai_saliency.gradients.base import GradientMethod
from monai_saliency.utils.arguments import check_option, number, whole_number

_WORDS = {
    "times_input": Meaning("SmoothGrad times the image less its fill", 0.0, in_score_unit=False),
    "absolute": Meaning("SmoothGrad, without sign", 0.0, in_score_unit=False, signed=False),
    "signed": Meaning("SmoothGrad: change of the score by a brighter voxel", 0.0, in_score_unit=False),
}


class SmoothGrad(GradientMethod):
    """The mean derivative over copies of the image with noise (Section 2.1).

    The noise is drawn on the CPU: the noise of sample ``i`` depends on the seed, ``i`` and the image's shape only.

    Args:
        num_samples: copies; the paper finds little change above 50.
        noise_level: standard deviation of the noise, in shares of the image's range (the paper: 0.1 to 0.2). 0 and one
            sample give the plain gradient.
        seed: of the noise.
        reading: what is read of the mean derivative:

            - ``"times_input"``: it times the image less its fill, added over channels. Positive where the image
              supports the score, to first order, in the score's unit;
            - ``"absolute"``: its absolute value, added over channels, as in the paper's pictures;
            - ``"signed"``: itself, added over channels. Positive where a brighter voxel raises the score.

    Raises:
        ValueError: for other settings.
    """

    def __init__(
        self, num_samples: int = 50, noise_level: float = 0.15, seed: int = 0, reading: str = "times_input"
    ) -> None:
        self.num_samples = whole_number("num_samples", num_samples, 1)
        self.noise_level = number("noise_level", noise_level, 0)
        self.seed = whole_number("seed", seed, 0)
        self.reading = check_option("reading", reading, list(_WORDS))
        self.meaning = _WORDS[self.reading]

    def __len__(self) -> int:
        return self.num_samples

    def at(self, number: int, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        sigma = self.noise_level * (image.max() - image.min())
        dtype = np.float64 if image.dtype == torch.float64 else np.float32
        noise = np.random.default_rng([self.seed, number]).standard_normal(image.shape, dtype)
        return image + sigma * torch.from_numpy(noise).to(image)

    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        if self.reading == "times_input":
            mean = mean * (image.to(mean) - fill.to(mean))
        return (mean.abs() if self.reading == "absolute" else mean).sum(dim=0)
