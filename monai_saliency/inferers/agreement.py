"""Whether scores that come together are of the same thing: the same masks, settings and network."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch

from monai_saliency.networks.identity import NetworkParts, network_fingerprint
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint
from monai_saliency.utils.precision import chosen_arithmetic

__all__ = ["Origin", "differences"]

logger = logging.getLogger(__name__)

#: the origins that were made in this process and are still used
_living: WeakValueDictionary[str, Origin] = WeakValueDictionary()

# Scores of one image and network on two machines differ by less, relative to the largest of them. A reference in half
# precision has its own limit.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2


class Origin:
    """What decides the scores that a process computes. It is hashed when scores come together, or are sent.

    It is made before the network runs: what the network changes then, such as a counter of its calls, is not compared.
    What cannot be identified, such as an engine of an
    extension module, is the same where both hold one object; else one warning says that it was not compared.

    Args:
        deciding: the settings that decide scores, by name.
        network: the network.
        is_shared: whether scores come together at all, so that the network's code and attributes are to be noted.
        by_code: compare lambdas, and what is defined in a function, by what they do. Those of ranks may hold their
            rank or device, and so differ where nothing is wrong.
    """

    # Those of older versions have neither.
    _unknown: Sequence[str] = ()
    _token = ""

    def __init__(
        self, deciding: Mapping[str, Any], network: Any, is_shared: bool = True, by_code: bool = False
    ) -> None:
        self._deciding: Mapping[str, Any] | None = deciding
        self._network = network
        self._parts = NetworkParts(network, by_code=by_code) if is_shared else None
        self._arithmetic = [*chosen_arithmetic(), *sorted(map(str, runtime_settings(network).items()))]
        self._prints: dict[str, str | None] = {}
        self._by_code = by_code
        self._token = uuid4().hex
        _living[self._token] = self

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_token": self._token,
            "_deciding": None,
            "_network": None,
            "_parts": None,
            "_arithmetic": self._arithmetic,
            "_prints": self.prints(),
            "_unknown": self._unknown,
        }

    def prints(self) -> dict[str, str | None]:
        """A hash of each thing that decides scores, by its name; None where it cannot be identified."""
        if self._deciding is not None and not self._prints:
            self._prints = {name: _print(_anywhere(value), self._by_code) for name, value in self._deciding.items()}
            self._prints["network"] = _network_print(self._network)
            parts = {} if self._parts is None else self._parts.steady()
            self._prints |= {f"the network's {name}": known for name, known in parts.items()}
            self._prints["autocast or TF32"] = fingerprint(self._arithmetic)
            held = [] if self._parts is None else [f"the network's {name}" for name in self._parts.unknown()]
            # The code of what is not a module stands for all of it.
            nothing = self._prints["network"] is None and self._prints.get("the network's code") is None
            unknown = [name for name in self._deciding if self._prints[name] is None]
            self._unknown = [*unknown, *(["the network"] if nothing else held)]
        return self._prints

    def unknown(self, other: Origin) -> list[str]:
        """What could not be identified in this one or the other, and is not one object that both hold."""
        names = dict.fromkeys([*_unknown_of(self), *_unknown_of(other)])
        # What was sent to this process, or back to it, finds what it was made of where that is still there.
        ours, theirs = (_living.get(each._token, each) for each in (self, other))
        return [name for name in names if not ours._holds_what(theirs, name)]

    def _holds_what(self, other: Origin, name: str) -> bool:
        if self._deciding is None or other._deciding is None:
            return False
        if name.startswith("the network"):
            return self._network is other._network
        return name in self._deciding and self._deciding[name] is other._deciding.get(name)

    @property
    def tolerance(self) -> float:
        """How much reference scores may differ, relative to the largest."""
        autocast = any("float16" in each or "'amp'" in each for each in self._arithmetic)
        return _HALF_TOLERANCE if autocast else _TOLERANCE


def _unknown_of(origin: Origin) -> Sequence[str]:
    origin.prints()
    return origin._unknown


def _anywhere(value: Any) -> Any:
    if not any(name in getattr(value, "__dict__", {}) for name in ("device", "sw_device")):
        return value
    taken = copy.copy(value)
    for name in ("device", "sw_device"):
        if name in vars(taken):
            object.__setattr__(taken, name, None)
    return taken


def _print(value: Any, by_code: bool) -> str | None:
    try:
        return fingerprint(value, by_code)
    except Unfingerprintable:
        return None


def _network_print(network: Any) -> str | None:
    if not isinstance(network, torch.nn.Module):
        return None
    try:
        found = network_fingerprint(network)
    except Unfingerprintable:
        return None
    # Weights on another kind of device have another hash.
    kinds = {tensor.device.type for tensor in network.parameters()}
    return f"{sorted(kinds)} {found}"


def differences(one: Origin | None, other: Origin | None, references: Sequence[torch.Tensor]) -> list[str]:
    """What differs between two processes whose scores come together, in words; empty if nothing does.

    Args:
        one: what decides the scores of one; nothing is compared where nobody noted it.
        other: and of the other. What is unknown in either is not compared, and is said once.
        references: the scores ``(K,)`` of the unperturbed image in both.
    """
    if one is None or other is None:
        return []
    ours, theirs = one.prints(), other.prints()
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    found = [name for name in names if not _incomparable(name, ours, theirs)]
    if not found and (unknown := one.unknown(other)):
        _say_unknown(tuple(unknown))
    first, second = (each.detach().double().cpu() for each in references)
    if first.shape != second.shape:
        found.append(f"the number of scores ({len(first)} and {len(second)})")
    elif not torch.allclose(first, second, rtol=0, atol=_scale(first) * one.tolerance, equal_nan=True):
        found.append(f"the score of the unperturbed image ({first.tolist()[:3]} and {second.tolist()[:3]})")
    return found


@functools.cache
def _say_unknown(names: tuple[str, ...]) -> None:
    logger.warning(
        "scores that come together are not compared in %s, which cannot be identified: they are taken to be of the "
        "same thing, as the score of the unperturbed image is. Make sure that all parts were scored alike",
        " and ".join(names),
    )


def _scale(scores: torch.Tensor) -> float:
    finite = scores[torch.isfinite(scores)].abs()
    return float(finite.max()) if len(finite) else 0.0


def _incomparable(name: str, one: Mapping[str, str | None], other: Mapping[str, str | None]) -> bool:
    is_attribute = name.startswith("the network's")
    # An attribute that only one has is a difference; what is not known is none.
    if any(each.get(name, "" if is_attribute else None) is None for each in (one, other)):
        return True
    # Tensors on another kind of device have another hash, wherever the network holds them.
    kinds = {(each.get("network") or "").partition("]")[0] for each in (one, other)}
    return (name == "network" or is_attribute) and len(kinds) > 1
