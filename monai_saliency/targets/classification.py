"""Classes of the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.networks.outputs import shape
from monai_saliency.targets.base import (
    ACTIVATIONS,
    BoundTarget,
    Quantity,
    Target,
    check_activation,
    check_indices,
    check_tensor,
    in_unit_interval,
    quantity_after,
    sums_to_one,
    to_float,
)
from monai_saliency.utils.arguments import check_option, indices
from monai_saliency.utils.tensors import columns

__all__ = ["ClassScore"]


class ClassScore(Target):
    """The scores of classes of the whole image. The network's output is ``(B, classes)``.

    Each class gets its own map.

    Args:
        classes: a class index or several, or one of:

            - ``"predicted"``: the class with the highest score for the unperturbed image;
            - ``"positive"``: all classes with a score above 0.5 for the unperturbed image, for networks that give
              several labels per image;
            - ``"all"``.
        activation: turns the output into scores: ``"softmax"``, ``"sigmoid"``, or ``"none"`` if the network ends with
            an activation, or to explain logits. It is never guessed. A warning is given when it is applied to values
            that look like probabilities.

    Raises:
        ValueError: for other settings, and (from ``bind``) when the output is not ``(B, classes)``, has NaN or infinite
            values, or has no such class.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, ClassScore
        >>> output = torch.tensor([[0.1, 0.7, 0.2]])  # probabilities of three classes
        >>> bound = ClassScore("predicted", "none").bind(output, Case("ct_7", torch.zeros(1, 8, 8)))
        >>> bound.labels, bound(torch.tensor([[0.5, 0.25, 0.25]])).tolist()
        ([1], [[0.25]])
    """

    def __init__(self, classes: Sequence[int] | int | str, activation: str) -> None:
        activation = check_option("activation", activation, list(ACTIVATIONS))
        if isinstance(classes, str):
            if classes not in ("predicted", "positive", "all"):
                raise ValueError(
                    f"`classes` must be a list of indices, 'predicted', 'positive' or 'all', got {classes!r}"
                )
        else:
            classes = indices("classes", classes, "'predicted', 'positive' or 'all'")
        self.classes: list[int] | str = classes
        self.activation = activation

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_tensor(reference_output, case, "ClassScore")
        if output.ndim != 2:
            raise ValueError(
                f"ClassScore reads one row of class scores per image, shape (B, classes), the network "
                f"gave {shape(output)}; "
                + ("use RegionScore for a segmentation" if output.ndim > 3 else "let it return the classes alone"),
            )
        check_activation(output, self.activation, case)
        # A copy: the output may live in a buffer that the next batch overwrites.
        scores = ACTIVATIONS[self.activation](output)[0].clone()
        return _BoundClassScore(self._classes(scores), self.activation, scores)

    def _classes(self, scores: torch.Tensor) -> list[int]:
        if not isinstance(self.classes, str):
            check_indices(self.classes, len(scores), "classes", "class")
            return self.classes
        if self.classes == "all":
            return list(range(len(scores)))
        if self.classes == "predicted":
            return [int(scores.argmax())]
        if not in_unit_interval(scores):
            raise ValueError(
                "classes='positive' compares probabilities with 0.5, and the scores lie in "
                f"[{float(scores.min()):.3g}, {float(scores.max()):.3g}]; use activation='sigmoid' for logits"
            )
        positive = (scores > 0.5).nonzero().flatten().tolist()
        if not positive:
            raise ValueError(
                f"no class scores above 0.5 (the highest: {float(scores.max()):.3f}), so classes='positive' has "
                "nothing to explain; use classes='predicted' or name the classes"
            )
        return positive


class _BoundClassScore(BoundTarget):
    labels: list[int]

    def __init__(self, classes: list[int], activation: str, reference: torch.Tensor) -> None:
        self.labels = classes
        self.activation = activation
        self.reference = reference

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return columns(ACTIVATIONS[self.activation](to_float(output)), self.labels)

    def describe(self) -> dict[str, Any]:
        score = float(self.reference.max())
        if len(self.reference) == 1:
            if self.activation != "none":
                return {"prediction": int(score > 0.5), "probability": max(score, 1 - score)}
            # A logit or a probability: between 0 and one half they disagree.
            return {} if 0 < score <= 0.5 else {"prediction": int(score > 0)}
        # Without an activation the scores may be logits: only their order is known.
        probable = self.activation != "none" or (in_unit_interval(self.reference) and sums_to_one(self.reference[None]))
        return {"prediction": int(self.reference.argmax())} | ({"probability": score} if probable else {})

    def quantity(self) -> Quantity:
        found = quantity_after(self.activation)
        # Of a single output channel 0 is explained, and its high scores are the prediction 1.
        which = "the class" if len(self.reference) > 1 else "prediction 1, the network's one output"
        return found._replace(words=f"{found.words} of {which}")
