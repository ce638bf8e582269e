"""Numbers: those that a network predicts, such as an age, and any that a user's function makes of its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.networks.outputs import choices, num_rows, shape
from monai_saliency.targets.base import (
    BoundTarget,
    Quantity,
    Target,
    check_indices,
    check_tensor,
    to_float,
)
from monai_saliency.utils.arguments import indices_or_word, instance
from monai_saliency.utils.tensors import columns, shape_in_words


class RegressionScore(Target):
    """The predicted numbers themselves. The network's output is ``(B,)`` or ``(B, ...)``, flattened for each image.

    Each number gets its own map, in the number's unit. The map is positive where the image raises the number. To ask
    whether an output stays near a value rather than whether it is high (such as a landmark's place), use
    :class:`EmbeddingSimilarity` with ``measure="distance"``.

    Args:
        values: an index into an image's flattened output, several, or ``"all"``.
        names: names of the values with their units, such as ``["age (years)"]``; by default ``"value 0"``, ...

    Raises:
        ValueError: for another string, and (from ``bind``) when the output is not a tensor, has NaN or infinite values,
            or has no such value, or when there is not one name per value.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, RegressionScore
        >>> case = Case("ct_7", torch.zeros(1, 8, 8))
        >>> bound = RegressionScore([1], ["age (years)"]).bind(torch.tensor([[2.0, 61.5]]), case)
        >>> bound.labels, bound(torch.tensor([[1.0, 60.0], [1.0, 63.0]])).tolist()
        (['age (years)'], [[60.0], [63.0]])
    """

    def __init__(self, values: Sequence[int] | int | str = 0, names: Sequence[str] | None = None) -> None:
        self.values = indices_or_word("values", values, ["all"])
        self.names = None if names is None else [str(name) for name in np.atleast_1d(names)]

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        numbers = check_tensor(reference_output, case, "RegressionScore").reshape(-1).clone()
        values = list(range(len(numbers))) if isinstance(self.values, str) else self.values
        check_indices(values, len(numbers), "values", "value")
        names = self.names
        if names is None:
            names = [f"value {index}" for index in values]
        if len(names) != len(values):
            raise ValueError(f"`names` has {len(names)} entries for {len(values)} values")
        return _BoundRegressionScore(names, values, numbers)


@dataclass(eq=False)
class _BoundRegressionScore(BoundTarget):
    labels: Sequence[str]
    values: Sequence[int]
    reference: torch.Tensor  # all numbers of the unperturbed image

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return columns(to_float(output).reshape(len(output), -1), self.values)

    def describe(self) -> dict[str, Any]:
        return {"prediction": " ".join(f"{value:.6g}" for value in self.reference[self.values].tolist())}

    def quantity(self) -> Quantity:
        return Quantity("predicted value", "network output")


class FunctionScore(Target):
    """The scores that a user's function computes from the network's output.

    Args:
        function: takes the network's output for B images (the part that the inferer's ``output`` reads) and returns
            scores ``(B,)`` or ``(B, K)``. Each row must depend on its own image only.
        labels: names of the K scores; by default ``"score"``, or ``"score 1"``, ``"score 2"``, ...

    Raises:
        ValueError: when ``function`` cannot be called, and (from ``bind`` and the bound target) when it returns
            anything else, or another number of scores than ``labels``.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, FunctionScore
        >>> target = FunctionScore(lambda output: output["left"] - output["right"], ["asymmetry"])
        >>> case = Case("ct_7", torch.zeros(1, 8, 8))
        >>> bound = target.bind({"left": torch.tensor([3.0]), "right": torch.tensor([1.0])}, case)
        >>> bound({"left": torch.tensor([2.0, 5.0]), "right": torch.tensor([1.0, 7.0])}).tolist()
        [[1.0], [-2.0]]
    """

    def __init__(self, function: Callable[[Any], torch.Tensor], labels: Sequence[str] | None = None) -> None:
        words = "a function of the network's output"
        self.function = instance("function", function, (), words, function=True)
        self.labels = None if labels is None else [str(label) for label in labels]

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        scores = _scores(self.function, reference_output)
        count = scores.shape[1]
        labels = ["score"] if count == 1 else [f"score {number}" for number in range(1, count + 1)]
        if self.labels:
            labels = self.labels
        if len(labels) != count:
            raise ValueError(f"`function` gave {count} scores per image for {len(labels)} `labels`")
        return _BoundFunctionScore(labels, self.function)


@dataclass(eq=False)
class _BoundFunctionScore(BoundTarget):
    labels: Sequence[str]
    function: Callable[[Any], torch.Tensor]

    def __call__(self, output: Any) -> torch.Tensor:
        return _scores(self.function, output)

    def quantity(self) -> Quantity:
        return Quantity("score of a function", "as the function gives it")


def _scores(function: Callable[[Any], torch.Tensor], output: Any) -> torch.Tensor:
    """The function's scores as ``(B, K)``."""
    count = num_rows(output)
    wanted = "`function` must give a tensor (B,) or (B, K), one row per image, such as output[:, 1]"
    try:
        scores = function(output)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        given = shape(output) if isinstance(output, torch.Tensor) else choices(output) or f"a {type(output).__name__}"
        raise ValueError(f"{wanted}; of {given} it failed with {type(error).__name__}: {error}") from error
    if not isinstance(scores, torch.Tensor) or scores.ndim not in (1, 2) or len(scores) != count:
        raise ValueError(f"{wanted}; it gave {shape_in_words(scores)} for {count} images")
    return to_float(scores).reshape(count, -1)
