"""One target for each of several networks, whose outputs stand side by side."""

from __future__ import annotations

from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.targets.base import BoundTarget, Quantity, Target, check_tensor
from monai_saliency.utils.boxes import Box

__all__ = ["MemberTarget"]


class MemberTarget(Target):
    """The scores of a target for each of k networks, whose outputs ``(B, C, ...)`` stand side by side along axis 1."""

    def __init__(self, target: Target, count: int) -> None:
        self.target = target
        self.count = count

    @property
    def is_additive(self) -> bool:
        return self.target.is_additive

    @property
    def is_linear(self) -> bool:
        return self.target.is_linear

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_tensor(reference_output, case, type(self.target).__name__)
        mean = output.unflatten(1, (self.count, -1)).mean(dim=1)
        return _BoundMemberTarget(self.target.bind(mean, case), self.count, mean.shape[1])


class _BoundMemberTarget(BoundTarget):
    def __init__(self, bound: BoundTarget, count: int, channels: int) -> None:
        self.bound_to_mean = bound
        self.members = count
        self.labels = list(bound.labels) * count
        self.additive, self.summed = bound.additive, bound.summed
        self.vouch = bound.vouch
        read = bound.channels_read
        self.channels_read = None if read is None else [m * channels + c for m in range(count) for c in read]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.bound_to_mean(each) for each in output.chunk(self.members, dim=1)], dim=1)

    def reach(self) -> torch.Tensor | None:
        return self.bound_to_mean.reach()

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        parts = output.chunk(self.members, dim=1)
        return self._by_kind([self.bound_to_mean.contribution(each, box) for each in parts])

    def sums(self, output: torch.Tensor) -> torch.Tensor:
        return self._by_kind([self.bound_to_mean.sums(each) for each in output.chunk(self.members, dim=1)])

    def of_sums(self, sums: torch.Tensor) -> torch.Tensor:
        each = sums.unflatten(1, (-1, self.members, len(self.bound_to_mean.labels))).unbind(2)
        return torch.cat([self.bound_to_mean.of_sums(one.flatten(1)) for one in each], dim=1)

    def _by_kind(self, each: list[torch.Tensor]) -> torch.Tensor:
        """The members' sums ``(B, J)``: all members' of one kind, then all of the next."""
        kinds = [one.unflatten(1, (-1, len(self.bound_to_mean.labels))) for one in each]
        return torch.cat(kinds, dim=2).flatten(1, 2)

    def describe(self) -> dict[str, Any]:
        return self.bound_to_mean.describe()

    def quantity(self) -> Quantity:
        return self.bound_to_mean.quantity()
