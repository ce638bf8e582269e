"""Classes of the whole image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import NothingToExplain, SettingError
from monai_saliency.networks.outputs import shape
from monai_saliency.targets.base import (
    ACTIVATIONS,
    SCALES,
    BoundTarget,
    Quantity,
    Target,
    check_activation,
    check_indices,
    check_probabilities,
    check_tensor,
    in_unit_interval,
    log_odds,
    log_odds_of,
    log_probabilities,
    quantity_after,
    rows_sum_to_one,
    to_float,
)
from monai_saliency.utils.arguments import check_option, indices_or_word, whole_number
from monai_saliency.utils.tensors import columns


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
        scale: ``"log_odds"``, the natural logarithm of p / (1 - p), or ``"probability"``. A probability near 1 hardly
            moves until all of its evidence is hidden, and its log-odds move with each piece. So they are the default
            after a softmax or sigmoid: computed from the logits, and finite wherever these are. With
            ``activation="none"`` the default is the output as it is; ``"log_odds"`` takes it for probabilities, clipped
            to [e, 1 - e] with the rounding e of their type (float32: 1.2e-7, so within 15.9 log-odds of 0).
        against: the index of a class B, to explain why the network chooses a class A and not B, by the difference of
            their scores. In log-odds that is the difference of the two logits, whatever the other classes are. None
            explains each class alone.

    Raises:
        NothingToExplain: from ``bind``, when no class is ``"positive"``.
        ValueError: for other settings, and (from ``bind``) when the output is not ``(B, classes)``, has NaN or infinite
            values, or has no such class, or when a class would be explained against itself.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, ClassScore
        >>> output = torch.tensor([[0.1, 0.7, 0.2]])  # probabilities of three classes
        >>> bound = ClassScore("predicted", "none").bind(output, Case("ct_7", torch.zeros(1, 8, 8)))
        >>> bound.labels, bound(torch.tensor([[0.5, 0.25, 0.25]])).tolist()
        ([1], [[0.25]])
    """

    def __init__(
        self,
        classes: Sequence[int] | int | str,
        activation: str,
        scale: str | None = None,
        against: int | None = None,
    ) -> None:
        self.classes = indices_or_word("classes", classes, ["predicted", "positive", "all"])
        self.activation = check_option("activation", activation, list(ACTIVATIONS))
        if scale is None:
            scale = "probability" if self.activation == "none" else "log_odds"
        self.scale = check_option("scale", scale, SCALES)
        self.against = None if against is None else whole_number("against", against, 0)

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_tensor(reference_output, case, "ClassScore")
        if output.ndim != 2:
            advice = "let it return the classes alone"
            if output.ndim > 3:
                flag = f"'monai_saliency.RegionScore', 'channel': 'predicted', 'activation': '{self.activation}'"
                advice = (
                    f"for a segmenter give target=ms.RegionScore('predicted', '{self.activation}'), or on a command "
                )
                advice += f"line --target \"{{'_target_': {flag}}}\""
            raise SettingError(
                f"ClassScore reads one row of class scores per image, shape (B, classes), the network "
                f"gave {shape(output)}; {advice}"
            )
        check_activation(output, self.activation, case)
        # A copy: the output may live in a buffer that the next batch overwrites.
        scores = ACTIVATIONS[self.activation](output)[0].clone()
        classes = self._classes(scores, case)
        if self.against is not None:
            check_indices([self.against], len(scores), "against", "class")
            if self.against in classes:
                raise ValueError(
                    f"class {self.against} cannot be explained against itself: choose other `classes`, or `against`"
                )
        if self.scale == "log_odds" and self.activation == "none":
            check_probabilities(scores[classes])
        return _BoundClassScore(classes, self.activation, scores, self.scale == "log_odds", self.against)

    def _classes(self, scores: torch.Tensor, case: Case) -> list[int]:
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
            raise NothingToExplain(
                case.name,
                f"no class scores above 0.5 (the highest: {float(scores.max()):.3f}), and classes='positive' explains "
                "those that do; classes='predicted' explains the highest",
            )
        return positive


def _are_probabilities(scores: torch.Tensor, activation: str) -> bool:
    """Whether the scores ``(classes,)`` of an image are probabilities, which without an activation several tell."""
    return activation != "none" or (len(scores) > 1 and bool(rows_sum_to_one(scores[None]).all()))


@dataclass(eq=False)
class _BoundClassScore(BoundTarget):
    classes: list[int]
    activation: str
    reference: torch.Tensor  # the scores (classes,) of the unperturbed image
    in_log_odds: bool
    against: int | None = None

    def __post_init__(self) -> None:
        self.labels: Sequence[int | str] = self.classes
        if self.against is not None:
            self.labels = [f"class {index} against class {self.against}" for index in self.classes]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        values = to_float(output)
        if not self.in_log_odds:
            scores = ACTIVATIONS[self.activation](values)
            explained = columns(scores, self.classes)
            return explained if self.against is None else explained - scores[:, self.against, None]
        return torch.stack([self._logits(values, index) for index in self.classes], dim=1)

    def _logits(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """The log-odds ``(B,)`` of a class, or the difference of two classes' logits."""
        if self.against is None:
            return log_odds(values, self.activation, index)
        if self.activation != "none":
            return values[:, index] - values[:, self.against]
        own, _ = log_probabilities(values, self.activation, index)
        other, _ = log_probabilities(values, self.activation, self.against)
        return own - other

    def describe(self) -> dict[str, Any]:
        score = float(self.reference.max())
        if len(self.reference) == 1:
            if self.activation != "none":
                return {"prediction": int(score > 0.5), "probability": max(score, 1 - score)}
            # A logit or a probability: between 0 and one half they disagree.
            return {} if 0 < score <= 0.5 else {"prediction": int(score > 0)}
        described: dict[str, Any] = {"prediction": int(self.reference.argmax())}
        # Without an activation the scores may be logits: only their order is known.
        if _are_probabilities(self.reference, self.activation):
            described["probability"] = score
        return described

    def quantity(self) -> Quantity:
        plain = quantity_after(self.activation)
        if self.against is not None and self.in_log_odds:
            return Quantity("difference of the logits of two classes", "logits")
        if self.against is not None:
            unit = "-1 to 1" if plain.unit == "probability" else plain.unit
            return Quantity(f"difference of the {plain.words} of two classes", unit)
        # Of a single output channel 0 is explained, and its high scores are the prediction 1.
        which = "the class" if len(self.reference) > 1 else "prediction 1, the network's one output"
        plain = plain._replace(words=f"{plain.words} of {which}")
        return log_odds_of(plain, self.activation) if self.in_log_odds else plain

    def uninformed(self) -> list[float]:
        if self.activation == "none" and not self.in_log_odds:
            return super().uninformed()
        chance = 0.5 if self.activation == "sigmoid" else 1 / len(self.reference)
        if self.against is not None:
            chance = 0.0
        elif self.in_log_odds:
            chance = math.log(chance / (1 - chance))
        return [chance] * len(self.classes)
