"""What is done once for each network: what a check has shown of it, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from monai_saliency.inferers.forward import Forward
from monai_saliency.networks.outputs import OutputPath
from monai_saliency.utils.monai_private import tensor_version
from monai_saliency.utils.precision import chosen_arithmetic

__all__ = ["Passed", "say_once"]

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))

#: by network: the circumstances under which its rows were seen not to depend on each other
_passed: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()
_noted: WeakSet[Any] = WeakSet()


class Passed:
    """Whether a check was passed by a network, so that it is run once.

    One comparison shows nothing of another part of the output, of another method of the network, or of the network
    after something that it holds was changed: a number, a flag, a tensor, a hook.

    Args:
        forward: calls the network.
        output: the part of the network's output that is explained.
        what: what else the check depends on, such as the batch size.
        image: the image with which the check is run.
        fill: what hides it. Whether that makes an image darker or brighter in places counts.
    """

    def __init__(
        self, forward: Forward, output: OutputPath | None, what: Sequence[Any], image: torch.Tensor, fill: torch.Tensor
    ) -> None:
        self._network = forward.network
        self._inputs = type(forward.inputs)
        self._output = tuple(output) if isinstance(output, list) else output
        self._what = *what, image.dtype, bool((fill < image).any()), bool((fill > image).any())

    def __bool__(self) -> bool:
        return self._circumstances in self._seen

    def note(self) -> None:
        """Note that the network has passed."""
        self._seen.add(self._circumstances)

    @property
    def _circumstances(self) -> tuple[Any, ...]:
        method = getattr(self._network, "__func__", None)
        return self._what, method, self._inputs, self._output, _looks(self._network), tuple(chosen_arithmetic())

    @property
    def _seen(self) -> set[tuple[Any, ...]]:
        owner = getattr(self._network, "__self__", self._network)  # a bound method is made anew each time it is named
        try:
            return _passed.setdefault(owner, set())
        except TypeError:  # it cannot be referred to weakly
            return set()


def _looks(network: Any) -> int:
    """A hash, in this process, of what a network and its parts hold: numbers, flags and names; which tensors and how
    often these were changed in place; which hooks, functions and other objects.
    """
    owner = getattr(network, "__self__", network)
    parts = list(owner.modules()) if isinstance(owner, torch.nn.Module) else [owner]
    return hash(tuple(part for module in parts for part in _held(getattr(module, "__dict__", {}))))


def _held(attributes: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in attributes.items():
        if isinstance(value, _PLAIN):
            yield name, value
        elif isinstance(value, torch.Tensor):
            yield name, id(value), tensor_version(value), value.dtype
        elif isinstance(value, (dict, Mapping)):  # parameters, buffers, hooks and parts among them, most of them empty
            if value:  # a dict is asked for first, since an abstract class takes longer to say
                yield from ((name, *each) for each in _held({str(key): entry for key, entry in value.items()}))
        elif not isinstance(value, (set, list, tuple)):
            yield name, id(value)


def say_once(network: Any, message: str) -> None:
    """Warn of a network once, and note further cases as information."""
    try:
        first = network not in _noted
        _noted.add(network)
    except TypeError:  # it cannot be referred to weakly
        first = True
    logger.log(logging.WARNING if first else logging.INFO, message)
