"""Several networks, such as the folds of a cross-validation, as one network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.utils.arguments import instance

__all__ = ["Ensemble", "Members"]


class Ensemble(torch.nn.Module):
    """Several networks as one: its output is the mean of their outputs, which all have one shape.

    Explained by any method, the map is the mean of the members' maps, and
    :attr:`~monai_saliency.Explanation.disagreement` the standard deviation between them. All members see the same
    perturbed images. The predicted class, or the region, is frozen on the mean output.

    Args:
        networks: two modules or more, whose output is a tensor ``(B, C, ...)``.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> folds = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)) for _ in range(3)]
        >>> explain = ms.sliding_window(1, target=ms.ClassScore([1], "softmax"))
        >>> (found,) = explain.explain(torch.rand(1, 1, 2, 2), Ensemble(folds))
        >>> found.saliency.shape, found.disagreement.shape
        (torch.Size([1, 2, 2]), torch.Size([1, 2, 2]))
    """

    def __init__(self, networks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        instance("networks", networks, (Sequence, torch.nn.ModuleList), "a list of networks")
        if len(networks) < 2:
            raise ValueError(f"`networks` must hold at least two networks, got {len(networks)}")
        for each in networks:
            instance("networks", each, torch.nn.Module, "a list of modules")
        self.members: Any = Members(networks)
        self.count = len(networks)

    def __len__(self) -> int:
        return self.count

    def around(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Ensemble:
        """The same members inside a module that calls them and returns outputs of the same shape."""
        other = Ensemble.__new__(Ensemble)
        torch.nn.Module.__init__(other)
        other.members, other.count, other.training = wrap(self.members), self.count, self.training
        return other

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """The mean output ``(B, C, ...)`` of the members."""
        return self.members(*inputs, **named).unflatten(1, (len(self), -1)).mean(dim=1)


class Members(torch.nn.Module):
    """The members of an :class:`Ensemble`, whose outputs it joins: ``(B, k * C, ...)``, the first member's first."""

    def __init__(self, networks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.networks = torch.nn.ModuleList(networks)

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """Run the members one after another."""
        outputs = [network(*inputs, **named) for network in self.networks]
        shapes = {tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in outputs}
        if len(shapes) > 1 or not isinstance(outputs[0], torch.Tensor) or outputs[0].ndim < 2:
            words = " and ".join(sorted(map(str, shapes)))
            raise ValueError(f"the members of an Ensemble must give tensors (B, C, ...) of one shape, got {words}")
        return torch.cat(outputs, dim=1)
