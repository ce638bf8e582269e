"""Several networks of one architecture, such as the folds of a cross-validation, as one network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from monai_saliency.utils.arguments import instance

__all__ = ["Ensemble", "Members", "ensemble_of"]


class Ensemble(torch.nn.Module):
    """Several networks of one architecture as one: its output is the mean of their outputs.

    Explained by any method, the map is the mean of the members' maps, and
    :attr:`~monai_saliency.Explanation.disagreement` the standard deviation between them. All members see the same
    perturbed images. The predicted class, or the region, is frozen on the mean output.

    Args:
        networks: two modules or more of one architecture, whose output is a tensor ``(B, C, ...)``.

    Attributes:
        members: returns the outputs of all members.

    Raises:
        ValueError: when there are fewer than two, or when their parameters differ in name or shape.

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
        for number, each in enumerate(networks):
            instance("networks", each, torch.nn.Module, "a list of modules")
            problem = _different(networks[0], each)
            if problem:
                raise ValueError(f"`networks` must be of one architecture: network {number} {problem}")
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
        outputs = []
        for number, network in enumerate(self.networks):
            output = network(*inputs, **named)
            if not isinstance(output, torch.Tensor) or output.ndim < 2:
                found = f"shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
                raise ValueError(
                    f"a member of an Ensemble must give a tensor (B, C, ...), number {number} gave {found}"
                )
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def _different(first: torch.nn.Module, other: torch.nn.Module) -> str:
    """Describes how a network differs from the first one; empty if it does not."""
    if type(other) is not type(first):
        return f"is a {type(other).__name__}, network 0 a {type(first).__name__}"
    ours, theirs = first.state_dict(), other.state_dict()
    for name in {**ours, **theirs}:
        shapes = [tuple(state[name].shape) if name in state else None for state in (ours, theirs)]
        if shapes[0] != shapes[1]:
            return f"has {name} of shape {shapes[1]}, network 0 of {shapes[0]}"
    return ""


def ensemble_of(
    network: torch.nn.Module, checkpoint: str | Path | Sequence[str | Path] | None
) -> torch.nn.Module | Ensemble:
    """A network for a checkpoint, or an :class:`Ensemble` of copies of it for a list of checkpoints, without weights.

    Args:
        network: the network.
        checkpoint: a file, or a list of files with the weights of one member each.

    Returns:
        the network itself for one file; :func:`~monai_saliency.networks.load_checkpoint` loads the weights.
    """
    if checkpoint is None or isinstance(checkpoint, (str, Path)):
        return network
    return Ensemble([copy.deepcopy(network) for _ in checkpoint])
