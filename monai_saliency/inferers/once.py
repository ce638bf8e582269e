"""What is done once for each network: what a check has shown of it, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from monai_saliency.inferers.forward import Forward
from monai_saliency.networks.outputs import OutputPath

__all__ = ["Passed", "say_once"]

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))

#: by network: the circumstances under which its rows were seen not to depend on each other
_passed: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()
_noted: WeakSet[Any] = WeakSet()


class Passed:
    """Whether a check was passed by a network, so that it is run once.

    One comparison shows nothing of another part of the output, of another method of the network, or of the network
    after one of its numbers, flags or names was changed.

    Args:
        forward: calls the network.
        output: the part of the network's output that is explained.
        what: what else the check depends on, such as the batch size.
    """

    def __init__(self, forward: Forward, output: OutputPath | None, what: Sequence[Any]) -> None:
        self._network = forward.network
        self._inputs = type(forward.inputs)
        self._output = tuple(output) if isinstance(output, list) else output
        self._what = tuple(what)

    def __bool__(self) -> bool:
        return self._circumstances in self._seen

    def note(self) -> None:
        """Note that the network has passed."""
        self._seen.add(self._circumstances)

    @property
    def _circumstances(self) -> tuple[Any, ...]:
        method = getattr(self._network, "__func__", None)
        return self._what, method, self._inputs, self._output, _plain_attributes(self._network)

    @property
    def _seen(self) -> set[tuple[Any, ...]]:
        owner = getattr(self._network, "__self__", self._network)  # a bound method is made anew each time it is named
        try:
            return _passed.setdefault(owner, set())
        except TypeError:  # it cannot be referred to weakly
            return set()


def _plain_attributes(network: Any) -> int:
    """A hash of the numbers, flags and names that a network and its parts hold, in this process."""
    owner = getattr(network, "__self__", network)
    parts = owner.modules() if isinstance(owner, torch.nn.Module) else [owner]
    held = (sorted(getattr(part, "__dict__", {}).items(), key=lambda item: str(item[0])) for part in parts)
    return hash(tuple((name, value) for each in held for name, value in each if isinstance(value, _PLAIN)))


def say_once(network: Any, message: str) -> None:
    """Warn of a network once, and note further cases as information."""
    try:
        first = network not in _noted
        _noted.add(network)
    except TypeError:  # it cannot be referred to weakly
        first = True
    logger.log(logging.WARNING if first else logging.INFO, message)
