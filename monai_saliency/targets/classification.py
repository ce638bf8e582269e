"""Whole-image classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.networks.outputs import shape
from monai_saliency.targets.base import (
    ACTIVATIONS,
    BoundTarget,
    Target,
    check_activation,
    check_finite,
    check_indices,
    check_tensor,
    to_float,
)
from monai_saliency.utils.arguments import check_option

__all__ = ["ClassScore"]


class ClassScore(Target):
    """The score of whole-image classes: the network's output is ``(B, classes)``.

    Args:
        classes: a list of class indices, ``"predicted"`` (the highest score of the unperturbed image), ``"positive"``
            (all whose score of the unperturbed image is above one half, for networks with several labels an image) or
            ``"all"``. One map is made for each.
        activation: what turns the output into scores: ``"softmax"``, ``"sigmoid"``, or ``"none"`` where the network
            ends in one already, or to explain logits. Never guessed; a warning is given where it is applied to what
            looks like probabilities.
    """

    def __init__(self, classes: Sequence[int] | int | str, activation: str) -> None:
        activation = check_option("activation", activation, list(ACTIVATIONS))
        if isinstance(classes, str):
            if classes not in ("predicted", "positive", "all"):
                raise ValueError(
                    f"`classes` must be a list of indices, 'predicted', 'positive' or 'all', got {classes!r}"
                )
        else:
            classes = [int(c) for c in np.atleast_1d(classes)]
            if not classes:
                raise ValueError("`classes` must name at least one class, got an empty list")
        self.classes: list[int] | str = classes
        self.activation = activation

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_tensor(reference_output, case, "ClassScore")
        if output.ndim != 2:
            raise CaseError(
                case.name,
                f"ClassScore reads one row of class scores an image, shape (B, classes), the network "
                f"gave {shape(output)}" + ("; use RegionScore for a segmentation" if output.ndim > 3 else ""),
            )
        check_finite(output, case)
        output = to_float(output)
        check_activation(output, self.activation, case)
        # A copy: the output may live in a buffer that the next batch overwrites.
        scores = ACTIVATIONS[self.activation](output)[0].clone()
        return _BoundClassScore(self._classes(scores, case), self.activation, scores)

    def _classes(self, scores: torch.Tensor, case: Case) -> list[int]:
        if not isinstance(self.classes, str):
            check_indices(self.classes, len(scores), "classes", "class", case)
            return self.classes
        if self.classes == "all":
            return list(range(len(scores)))
        if self.classes == "predicted":
            return [int(scores.argmax())]
        if bool(((scores < 0) | (scores > 1)).any()):
            raise CaseError(
                case.name,
                "classes='positive' compares probabilities with one half, and the scores lie in "
                f"[{float(scores.min()):.3g}, {float(scores.max()):.3g}]; use activation='sigmoid' for logits",
            )
        positive = (scores > 0.5).nonzero().flatten().tolist()
        if not positive:
            raise CaseError(
                case.name,
                f"no class scores above one half (the highest: {float(scores.max()):.3f}), so classes='positive' has "
                "nothing to explain; use classes='predicted' or name the classes",
            )
        return positive


class _BoundClassScore(BoundTarget):
    labels: list[int]

    def __init__(self, classes: list[int], activation: str, reference: torch.Tensor) -> None:
        self.labels = classes
        self.activation = activation
        self.reference = reference

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](to_float(output))[:, self.labels]

    def describe(self) -> dict[str, Any]:
        # Without an activation the scores may be logits, of which only the order is known.
        probable = self.activation != "none" or bool(((self.reference >= 0) & (self.reference <= 1)).all())
        if len(self.reference) == 1:
            score = float(self.reference)
            if not probable:
                return {"prediction": int(score > 0)}
            return {"prediction": int(score > 0.5), "probability": max(score, 1 - score)}
        predicted = int(self.reference.argmax())
        return {"prediction": predicted} | ({"probability": float(self.reference[predicted])} if probable else {})
