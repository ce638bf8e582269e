"""Several networks of one architecture, such as the folds of a cross-validation, as one network.

Their parameters are stacked, and one call of ``torch.vmap`` runs all of them. Where that is slower, or cannot be done,
they run one after another.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.func import functional_call, stack_module_state, vmap

from monai_saliency.utils.arguments import instance, whole_number
from monai_saliency.utils.monai_private import tensor_version
from monai_saliency.utils.precision import rounding_of

__all__ = ["Ensemble", "Members", "ensemble_of"]

logger = logging.getLogger(__name__)


class Ensemble(torch.nn.Module):
    """Several networks of one architecture as one: called, it gives the mean of their outputs.

    Explained by any method, the map is the mean of the members' maps, and
    :attr:`~monai_saliency.Explanation.disagreement` the standard deviation between them. All members see the same
    perturbed images. What is asked (the predicted class, the region) is frozen on the mean output.

    Args:
        networks: two modules or more of one architecture, whose output is a tensor ``(B, C, ...)``.
        together_up_to: on a CPU, the largest number of values in a batch of images for which the members run together;
            larger batches keep its cores busy alone. On a GPU they always do.

    Attributes:
        members: gives the outputs of all members.

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

    def __init__(self, networks: Sequence[torch.nn.Module], together_up_to: int = 2**17) -> None:
        super().__init__()
        instance("networks", networks, (Sequence, torch.nn.ModuleList), "a list of networks")
        if len(networks) < 2:
            raise ValueError(f"`networks` must hold at least two networks, got {len(networks)}")
        for number, each in enumerate(networks):
            instance("networks", each, torch.nn.Module, "a list of modules")
            problem = _different(networks[0], each)
            if problem:
                raise ValueError(f"`networks` must be of one architecture: network {number} {problem}")
        self.members: Any = Members(networks, whole_number("together_up_to", together_up_to, 0))
        self.count = len(networks)

    def __len__(self) -> int:
        return self.count

    def around(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Ensemble:
        """The same members, run in another way.

        Args:
            wrap: gives a module that calls the one it is given, and gives outputs of the same shape.
        """
        other = Ensemble.__new__(Ensemble)
        torch.nn.Module.__init__(other)
        other.members, other.count, other.training = wrap(self.members), self.count, self.training
        return other

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """The mean output ``(B, C, ...)`` of the members."""
        return self.members(*inputs, **named).unflatten(1, (len(self), -1)).mean(dim=1)


class Members(torch.nn.Module):
    """The members of an :class:`Ensemble`: called, it gives their outputs side by side, ``(B, k * C, ...)``.

    Args:
        networks: as for :class:`Ensemble`.
        together_up_to: as for :class:`Ensemble`.
    """

    def __init__(self, networks: Sequence[torch.nn.Module], together_up_to: int) -> None:
        super().__init__()
        self.networks = torch.nn.ModuleList(networks)
        self.together_up_to = together_up_to

    def extra_repr(self) -> str:
        """The settings, for printing and for :func:`~monai_saliency.networks.identity.network_fingerprint`."""
        return f"together_up_to={self.together_up_to}"

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """The outputs of the members, the first member's channels first.

        Raises:
            ValueError: when a member does not give a tensor ``(B, C, ...)``.
        """
        stacked = self._stacked() if self._pays(inputs) else None
        if stacked is None or stacked.problem:
            return self._one_by_one(inputs, named)
        if stacked.is_checked:
            return _run(stacked, inputs, named)
        expected = self._one_by_one(inputs, named)
        try:
            found = _run(stacked, inputs, named)
            kind = found.device.type
            cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            tolerance = rounding_of(self, found.device, cast)(found.dtype) * float(expected.abs().max())
            if not torch.allclose(found, expected, rtol=0, atol=tolerance):
                raise ValueError(
                    f"together they give other outputs, by up to {float((found - expected).abs().max()):.3g}: what is "
                    "no parameter or buffer may differ between them"
                )
        except Exception as error:
            self._give_up(stacked, error)
        else:
            _stacks[self] = stacked._replace(is_checked=True)
        return expected

    def _pays(self, inputs: Sequence[Any]) -> bool:
        """Whether running together is worth it for these inputs."""
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        return bool(tensors) and (
            tensors[0].device.type != "cpu" or sum(each.numel() for each in tensors) <= self.together_up_to
        )

    def _one_by_one(self, inputs: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
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

    def _stacked(self) -> _Stacked:
        """The stacked parameters, made anew where a member has changed."""
        tensors = [*self.parameters(), *self.buffers()]
        of_tensors = tuple((each.data_ptr(), tensor_version(each)) for each in tensors)
        signs = of_tensors, tuple(each.training for each in self.modules())
        known = _stacks.get(self)
        if known is None or known.signs != signs:
            # Before, so that there are never two.
            _stacks.pop(self, None)
            try:
                with torch.no_grad():
                    parameters, buffers = stack_module_state(list(self.networks))
                state = {name: value.detach() for name, value in {**parameters, **buffers}.items()}
                known = _Stacked(signs, copy.deepcopy(self.networks[0]).to("meta"), state)
            except Exception as error:
                known = self._give_up(_Stacked(signs, None, {}), error)
            _stacks[self] = known
        return known

    def _give_up(self, stacked: _Stacked, error: Exception) -> _Stacked:
        """Run the members one by one from here on, and say why."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        problem = f"{type(error).__name__}: {error}"
        kind = type(self.networks[0]).__name__
        logger.warning("the members of the ensemble (%s) run one after another: %s", kind, problem)
        _stacks[self] = stacked._replace(base=None, state={}, problem=problem)
        return _stacks[self]


class _Stacked(NamedTuple):
    """The stacked members.

    Attributes:
        signs: of what they were made.
        base: a member without numbers.
        state: the stacked parameters and buffers.
        is_checked: whether their outputs were compared with those of the members one by one.
        problem: why they cannot run together.
    """

    signs: tuple[Any, ...]
    base: torch.nn.Module | None
    state: dict[str, torch.Tensor]
    is_checked: bool = False
    problem: str = ""


#: no attributes, which would count as a part of the network
_stacks: WeakKeyDictionary[Members, _Stacked] = WeakKeyDictionary()


def _run(stacked: _Stacked, inputs: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
    """The outputs of all members, by one call."""

    def one(state: dict[str, torch.Tensor]) -> Any:
        assert stacked.base is not None
        return functional_call(stacked.base, state, tuple(inputs), named)

    # The members' axis beside the channels', so that they are joined without a copy where memory allows it.
    return vmap(one, out_dims=1)(stacked.state).flatten(1, 2)


def _different(first: torch.nn.Module, other: torch.nn.Module) -> str:
    """What of a network differs from the first one, in words; empty for nothing."""
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

    Example::

        >>> import torch
        >>> len(ensemble_of(torch.nn.Linear(2, 1), ["fold0.pt", "fold1.pt"]).members.networks)
        2
    """
    if checkpoint is None or isinstance(checkpoint, (str, Path)):
        return network
    return Ensemble([copy.deepcopy(network) for _ in checkpoint])
