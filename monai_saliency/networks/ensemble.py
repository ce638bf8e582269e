"""Several networks, such as the folds of a cross-validation, as one network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.utils.arguments import instance


class Ensemble(torch.nn.Module):
    """Several networks as one: its output is the mean of their outputs, which all have one shape.

    Explained by any method, the map is the mean of the members' maps, and
    :attr:`~monai_saliency.Explanation.disagreement` the standard deviation between them. The members explain
    the image one after another. The predicted class, or the region, is frozen on their mean output.

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
        self.networks = torch.nn.ModuleList(networks)

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """The mean output ``(B, C, ...)`` of the members."""
        return torch.stack([network(*inputs, **named) for network in self.networks]).mean(dim=0)
