"""Whether scores that come together are of the same thing: the same masks, settings and network."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.utils.precision import chosen_arithmetic

__all__ = ["Origin", "differences"]

logger = logging.getLogger(__name__)

# Scores of one image and network on two machines differ by less, relative to the largest of them. A reference in half
# precision has its own limit.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2


class Origin:
    """The settings and the network that decide the scores of a process."""

    def __init__(self, deciding: Mapping[str, Any], network: Any) -> None:
        arithmetic = [*chosen_arithmetic(), *sorted(map(str, runtime_settings(network).items()))]
        self._keys = {name: _key(value) for name, value in deciding.items()}
        self._keys |= {"the network": network_fingerprint(network), "autocast or TF32": fingerprint(arithmetic)}
        self._network = network
        is_half = any("float16" in each or "'amp'" in each for each in arithmetic)
        self.tolerance = _HALF_TOLERANCE if is_half else _TOLERANCE

    def keys(self) -> Mapping[str, str | None]:
        """A hash of each setting and of the network, by name; None for anything that cannot be identified."""
        if self._network is not None and network_fingerprint(self._network) != self._keys["the network"]:
            self._keys["the network"] = None  # it changes as it runs, such as by counting its calls
        self._network = None
        return self._keys

    def __getstate__(self) -> dict[str, Any]:
        return {"_keys": self.keys(), "_network": None, "tolerance": self.tolerance}


def _key(value: Any) -> str | None:
    try:
        return fingerprint(value)
    except Unfingerprintable:
        return None


def differences(one: Origin | None, other: Origin | None, references: Sequence[torch.Tensor]) -> list[str]:
    """What differs between two processes whose scores come together, in words; empty if nothing does."""
    if one is None or other is None:
        return []
    ours, theirs = one.keys(), other.keys()
    names = {**ours, **theirs}
    unknown = [name for name in names if None in (ours.get(name, ""), theirs.get(name, ""))]
    found = [name for name in names if name not in unknown and ours.get(name) != theirs.get(name)]
    if unknown and not found:
        _warn_unknown(" and ".join(unknown))
    first, second = (each.detach().double().cpu() for each in references)
    if first.shape != second.shape:
        found.append(f"the number of scores ({len(first)} and {len(second)})")
    elif not torch.allclose(first, second, rtol=0, atol=_scale(first) * one.tolerance, equal_nan=True):
        found.append(f"the score of the unperturbed image ({first.tolist()[:3]} and {second.tolist()[:3]})")
    return found


@functools.cache
def _warn_unknown(names: str) -> None:
    logger.warning(
        "scores that come together are not compared in %s, which cannot be identified: they are taken to be of the "
        "same thing, as the score of the unperturbed image is. Make sure that all parts were scored alike",
        names,
    )


def _scale(scores: torch.Tensor) -> float:
    finite = scores[torch.isfinite(scores)].abs()
    return float(finite.max()) if len(finite) else 0.0
