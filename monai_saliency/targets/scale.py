"""The scale of a probability: explained unchanged, or as its log-odds where it is saturated."""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import logsigmoid

from monai_saliency.cases import Case
from monai_saliency.targets.base import Quantity, in_unit_interval

__all__ = ["SCALES", "in_log_odds", "log_odds_of", "log_probabilities"]

logger = logging.getLogger(__name__)

#: ``"auto"`` explains the log-odds of a probability that is saturated, below the lowest or above the highest of
#: :data:`UNSATURATED` for the unperturbed image
SCALES = ("auto", "probability", "log_odds")
UNSATURATED = (0.01, 0.99)


def in_log_odds(scale: str, scores: torch.Tensor, are_probabilities: bool, case: Case) -> list[bool]:
    """Which of the scores ``(K,)`` of the unperturbed image are explained as log-odds, each by itself."""
    if scale == "log_odds" and not in_unit_interval(scores):
        raise ValueError(
            f"`scale` 'log_odds' needs probabilities, and the scores lie in [{float(scores.min()):.3g}, "
            f"{float(scores.max()):.3g}]; use activation='softmax' or 'sigmoid' for logits"
        )
    if scale != "auto":
        return [scale == "log_odds"] * len(scores)
    saturated = (scores < UNSATURATED[0]) | (scores > UNSATURATED[1])
    if are_probabilities and bool(saturated.any()):
        values = ", ".join(f"{score:.6g}" for score in scores[saturated].tolist())
        logger.info("case %s: the probability %s is saturated, so its log-odds are explained", case.name, values)
    return (saturated & are_probabilities).tolist()


def log_probabilities(output: torch.Tensor, activation: str, channel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithms of the probability of a channel and of its complement, ``(B, ...)`` each.

    They are computed from the logits ``(B, C, ...)``, so that 1 - 1e-12 is not rounded to 1. Without an activation the
    output holds probabilities, which are kept one rounding of their type away from 0 and 1.
    """
    own = output[:, channel]
    if activation == "sigmoid":
        return logsigmoid(own), logsigmoid(-own)
    if activation == "none":
        rounding = torch.finfo(own.dtype).eps
        own = own.clamp(rounding, 1 - rounding)
        return own.log(), (-own).log1p()
    others = torch.cat([output[:, :channel], output[:, channel + 1 :]], dim=1).logsumexp(dim=1)
    total = output.logsumexp(dim=1)
    return own - total, others - total


def log_odds_of(quantity: Quantity, activation: str) -> Quantity:
    """The log-odds of a probability, in words."""
    clamped = "clamped " if activation == "none" else ""
    return Quantity(f"log-odds of the {clamped}{quantity.words}", "log-odds")
