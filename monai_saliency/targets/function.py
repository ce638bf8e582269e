"""Any number that a user's function computes from the network's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.networks.outputs import num_rows
from monai_saliency.targets.base import BoundTarget, Quantity, Target, to_float
from monai_saliency.utils.arguments import instance

__all__ = ["FunctionScore"]


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
        >>> from monai_saliency import FunctionScore
        >>> from monai_saliency.cases import Case
        >>> target = FunctionScore(lambda output: output["left"] - output["right"], ["asymmetry"])
        >>> case = Case("ct_7", torch.zeros(1, 8, 8))
        >>> bound = target.bind({"left": torch.tensor([3.0]), "right": torch.tensor([1.0])}, case)
        >>> bound({"left": torch.tensor([2.0, 5.0]), "right": torch.tensor([1.0, 7.0])}).tolist()
        [[1.0], [-2.0]]
    """

    def __init__(self, function: Callable[[Any], torch.Tensor], labels: Sequence[str] | None = None) -> None:
        words = "a function of the network's output"
        self.function = instance("function", function, (), words, function=True)
        if labels is not None and (isinstance(labels, str) or not isinstance(labels, Sequence)):
            raise ValueError(f"`labels` must be a list of names, one for each score, got {labels!r}")
        self.labels = None if labels is None else [str(label) for label in labels]

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        scores = _scores(self.function, reference_output, case)
        count = scores.shape[1]
        labels = self.labels
        if labels is None:
            labels = ["score"] if count == 1 else [f"score {i}" for i in range(1, count + 1)]
        if len(labels) != count:
            raise CaseError(case.name, f"`function` gave {count} scores per image for {len(labels)} `labels`")
        return _BoundFunctionScore(labels, self.function, case)


class _BoundFunctionScore(BoundTarget):
    def __init__(self, labels: Sequence[str], function: Callable[[Any], torch.Tensor], case: Case) -> None:
        self.labels = labels
        self.function = function
        self.case = case

    def __call__(self, output: Any) -> torch.Tensor:
        scores = _scores(self.function, output, self.case)
        if scores.shape[1] != len(self.labels):
            raise CaseError(
                self.case.name,
                f"`function` gave {scores.shape[1]} scores per image, and {len(self.labels)} for the unperturbed image",
            )
        return scores

    def quantity(self) -> Quantity:
        return Quantity("score of a function", "as the function gives it")


def _scores(function: Callable[[Any], torch.Tensor], output: Any, case: Case) -> torch.Tensor:
    """The function's scores as ``(B, K)``."""
    scores, count = function(output), num_rows(output)
    if not isinstance(scores, torch.Tensor) or scores.ndim not in (1, 2) or len(scores) != count:
        what = f"shape {tuple(scores.shape)}" if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
        raise CaseError(
            case.name,
            f"`function` must give a tensor (B,) or (B, K), one row per image; it gave {what} for {count} images",
        )
    return to_float(scores).reshape(count, -1)
