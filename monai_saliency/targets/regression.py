"""Numbers that a network predicts, such as an age, a volume, or a landmark's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.targets.base import (
    BoundTarget,
    Quantity,
    Target,
    check_finite,
    check_indices,
    check_tensor,
    to_float,
)
from monai_saliency.utils.arguments import indices
from monai_saliency.utils.tensors import columns

__all__ = ["RegressionScore"]


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
        >>> from monai_saliency import RegressionScore
        >>> from monai_saliency.cases import Case
        >>> case = Case("ct_7", torch.zeros(1, 8, 8))
        >>> bound = RegressionScore([1], ["age (years)"]).bind(torch.tensor([[2.0, 61.5]]), case)
        >>> bound.labels, bound(torch.tensor([[1.0, 60.0], [1.0, 63.0]])).tolist()
        (['age (years)'], [[60.0], [63.0]])
    """

    def __init__(self, values: Sequence[int] | int | str = 0, names: Sequence[str] | None = None) -> None:
        if isinstance(values, str) and values != "all":
            raise ValueError(f"`values` must be a list of indices or 'all', got {values!r}")
        self.values = values if isinstance(values, str) else indices("values", values, "'all'")
        self.names = None if names is None else [str(name) for name in np.atleast_1d(names)]

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_tensor(reference_output, case, "RegressionScore")
        check_finite(output, case)
        numbers = to_float(output).reshape(-1).clone()
        values = list(range(len(numbers))) if isinstance(self.values, str) else self.values
        check_indices(values, len(numbers), "values", "value", case)
        names = self.names if self.names is not None else [f"value {v}" for v in values]
        if len(names) != len(values):
            raise CaseError(case.name, f"`names` has {len(names)} entries for {len(values)} values")
        return _BoundRegressionScore(names, values, numbers)


class _BoundRegressionScore(BoundTarget):
    def __init__(self, names: Sequence[str], values: Sequence[int], reference: torch.Tensor) -> None:
        self.labels = names
        self.values = values
        self.reference = reference

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return columns(to_float(output).reshape(len(output), -1), self.values)

    def describe(self) -> dict[str, Any]:
        return {"prediction": " ".join(f"{value:.6g}" for value in self.reference[self.values].tolist())}

    def quantity(self) -> Quantity:
        return Quantity("predicted value", "network output")
