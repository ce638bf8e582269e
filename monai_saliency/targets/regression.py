"""Numbers that a network predicts: an age, a volume, a landmark's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.targets.base import BoundTarget, Target, check_finite, check_indices, check_tensor, to_float

__all__ = ["RegressionScore"]


class RegressionScore(Target):
    """The predicted numbers themselves: the network's output is ``(B,)``, ``(B, values)`` or ``(B, ...)``, flattened.

    The map is in the number's own unit, and positive where the image raises it. Where being near to a value is the
    question rather than being high (a landmark that should stay), use :class:`EmbeddingSimilarity` with
    ``measure="distance"``.

    Args:
        values: a list of indices into the image's flattened output, or ``"all"``. One map is made for each.
        names: what the values are called, with their units, such as ``["age (years)"]``; ``"value 0"``, ... by default.
    """

    def __init__(self, values: Sequence[int] | int | str = 0, names: Sequence[str] | None = None) -> None:
        if isinstance(values, str) and values != "all":
            raise ValueError(f"`values` must be a list of indices or 'all', got {values!r}")
        self.values = values if isinstance(values, str) else [int(v) for v in np.atleast_1d(values)]
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
        return to_float(output).reshape(len(output), -1)[:, self.values]

    def describe(self) -> dict[str, Any]:
        return {"prediction": " ".join(f"{value:.6g}" for value in self.reference[self.values].tolist())}
