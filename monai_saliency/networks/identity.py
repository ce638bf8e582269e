"""Which network it is, whatever runs it: the key under which its scores are stored and used again."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.utils.monai_private import is_compiled

__all__ = ["network_fingerprint", "network_key", "same_network"]


def same_network(one: Any, other: Any) -> bool:
    """Whether two networks are one, however fast each runs."""
    return [*map(id, _plain_members(one))] == [*map(id, _plain_members(other))]


def _plain_members(network: Any) -> list[Any]:
    """The networks of an ensemble, or a network alone, without what makes them faster."""
    members = network.networks if isinstance(network, Ensemble) else [network]
    return [plain_network(member) for member in members]


def network_fingerprint(network: Any, network_id: str | None = None) -> str | None:
    """A hash of a network: its classes, the versions of their packages, its parameters, buffers and other attributes.

    Args:
        network: a module, or any other callable.
        network_id: a name chosen by the caller, which must change whenever the network does. Needed for everything but
            a module that consists of importable classes and of plain values: TorchScript, hooks, lambdas, open files.

    It is None for a network that cannot be identified, whose results must not be used again.
    """
    try:
        return network_key(network, network_id)
    except Unfingerprintable:
        return None


def network_key(network: Any, network_id: str | None = None) -> str:
    """As :func:`network_fingerprint`, with the reason where a network cannot be identified."""
    advice = "give it a network_id, a name that changes when it does"
    if network_id:
        return fingerprint([network_id, runtime_settings(network)])
    if not isinstance(network, torch.nn.Module) or isinstance(network, torch.jit.ScriptModule):
        kind = "TorchScript" if isinstance(network, torch.nn.Module) else "not a module"
        raise Unfingerprintable(f"the network is {kind}: {advice}")
    while isinstance(network, DataParallel | DistributedDataParallel) or is_compiled(network):
        network = next(network.children())
    try:
        return fingerprint(network)
    except Unfingerprintable as error:
        raise Unfingerprintable(f"the network holds {error}: {advice}") from error
