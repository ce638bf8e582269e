"""Class scores of perturbed images whose confidence is corrected, by a temperature for each strength of perturbation
(ReCalX: Decker, Tresp, Buettner, NeurIPS 2025, arXiv 2511.10439).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.targets.base import ACTIVATIONS, BoundTarget, Target, to_float
from monai_saliency.targets.classification import ClassScore

__all__ = ["STRENGTHS", "Recalibrated", "fit_temperature", "softened"]

#: the shares of the image that are hidden for which temperatures are fitted: the middles of ten bins
STRENGTHS = tuple((bin + 0.5) / 10 for bin in range(10))
#: the logarithms of the lowest and the highest temperature
_LOGARITHMS = (math.log(0.01), math.log(100.0))
#: keeps a temperature at 1 where no other one is better
_PULL = 1e-6


class Recalibrated(Target):
    """Class scores whose logits are divided by a temperature that depends on the hidden share of the image.

    A network is often too sure of images that it was not trained on, such as those with hidden parts. ReCalX (Decker et
    al., section 4) fits a temperature for each of ten bins of strengths, the share of the image that is hidden. Unlike
    there, the temperature changes linearly on a logarithmic scale between the middles of the bins, and it is 1 where
    nothing is hidden. So the explained prediction stays what it is.

    Args:
        target: a :class:`ClassScore` of logits, so with the activation ``"softmax"`` or ``"sigmoid"``.
        temperatures: ten, above 0, for a hidden share of 0.05, 0.15, ... 0.95. None leaves the fit to the handler of an
            evaluator, or to :func:`monai_saliency.inferers.recalibrated`.
        network: the fingerprint of the network that they were fitted for; for another one they are fitted again. None
            keeps given temperatures for every network.

    Raises:
        ValueError: for another target, for other activations, and for other temperatures; from ``bind`` when there are
            no temperatures yet.

    Example::

        >>> from monai_saliency import ClassScore, Recalibrated
        >>> target = Recalibrated(ClassScore([1], "softmax"), [1.0] * 5 + [2.0] * 5)
        >>> softened(torch.tensor([[4.0]] * 3), torch.tensor([0.0, 0.3, 0.8]), target.temperatures).tolist()
        [[4.0], [4.0], [2.0]]
    """

    def __init__(self, target: Target, temperatures: Sequence[float] | None = None, network: str | None = None) -> None:
        name = type(target).__name__
        if not isinstance(target, ClassScore):
            raise ValueError(f"only class scores can be recalibrated: `target` must be a ClassScore, got {name}")
        if target.activation == "none":
            raise ValueError("recalibration divides logits: use activation='softmax' or 'sigmoid', and logits")
        if temperatures and (len(temperatures) != len(STRENGTHS) or not min(temperatures) > 0):
            raise ValueError(f"`temperatures` must be {len(STRENGTHS)} numbers above 0, got {temperatures}")
        self.target = target
        self.temperatures = tuple(map(float, temperatures or ()))
        self.network = network

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        if not self.temperatures:
            raise ValueError(
                "the temperatures are fitted once for a cohort by a SaliencyHandler: elsewhere call "
                "monai_saliency.inferers.recalibrated(inferer, network, cases) first, or give `temperatures`"
            )
        bound = self.target.bind(reference_output, case)
        bound.temperatures = self.temperatures
        return bound


def softened(output: torch.Tensor, hidden: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Logits ``(n, C)`` divided by the temperatures for hidden shares ``(n,)`` in [0, 1]."""
    knots = hidden.new_tensor([0.0, *STRENGTHS])
    logarithms = hidden.new_tensor([0.0, *map(math.log, temperatures)])
    passed = ((hidden[:, None] - knots[:-1]) / knots.diff()).clamp(0, 1)
    output = to_float(output)
    return output / (passed @ logarithms.diff()).exp()[:, None].to(output)


def fit_temperature(logits: torch.Tensor, wanted: torch.Tensor, activation: str) -> float:
    """The temperature in [0.01, 100] of least cross-entropy between probabilities ``wanted``, and those of the logits,
    ``(n, C)`` each: four digits, found by bisection. The cross-entropy is convex in the inverse of the temperature.
    """
    low, high = _LOGARITHMS
    for _ in range(40):
        middle = (low + high) / 2
        found = ACTIVATIONS[activation](logits / math.exp(middle))
        slope = float((logits * (found - wanted)).sum(dim=1).mean())  # of the cross-entropy over the inverse
        low, high = (middle, high) if slope > _PULL * middle else (low, middle)
    return float(f"{math.exp(low):.4g}")
