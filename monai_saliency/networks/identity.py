"""Which network it is, whatever runs it: the key under which its scores are stored and used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.utils.monai_private import is_compiled, tensor_version

_PLAIN = (type(None), bool, int, float, str)

# The parts of a network with what tells that they have changed, and its hash.
_Kept: TypeAlias = tuple[list[tuple[ref, Any]], str]
#: by network; nothing of it is held alive
_hashes: WeakKeyDictionary[torch.nn.Module, _Kept] = WeakKeyDictionary()


def same_network(one: Any, other: Any) -> bool:
    """Whether two networks are one, however fast each runs."""
    return [*map(id, _plain_members(one))] == [*map(id, _plain_members(other))]


def _plain_members(network: Any) -> list[Any]:
    """The networks of an ensemble, or a network alone, without what makes them faster."""
    members = network.networks if isinstance(network, Ensemble) else [network]
    return [plain_network(member) for member in members]


def network_fingerprint(network: Any, network_id: str | None = None, kept: bool = False) -> str | None:
    """A hash of a network: its classes, the versions of their packages, its parameters, buffers and other attributes.

    Args:
        network: a module, or any other callable.
        network_id: a name chosen by the caller, which must change whenever the network does. Needed for everything but
            a module that consists of importable classes and of plain values: TorchScript, hooks, lambdas, open files.
        kept: as for :func:`network_key`.

    It is None for a network that cannot be identified, whose results must not be used again.
    """
    try:
        return network_key(network, network_id, kept)
    except Unfingerprintable:
        return None


def network_key(network: Any, network_id: str | None = None, kept: bool = False) -> str:
    """As :func:`network_fingerprint`, with the reason where a network cannot be identified.

    Args:
        network: as there.
        network_id: as there.
        kept: whether an earlier hash is taken while modules, parameters and buffers are the same, lie where they lay
            and were not changed in place as far as autograd counts. It does not count ``parameter.data.mul_(2)``, nor
            what NumPy writes: only for results that a fresh score of the unperturbed image confirms.
    """
    advice = "give it a network_id, a name that changes when it does"
    if network_id:
        return fingerprint([network_id, runtime_settings(network)])
    if not isinstance(network, torch.nn.Module) or isinstance(network, torch.jit.ScriptModule):
        kind = "TorchScript" if isinstance(network, torch.nn.Module) else "not a module"
        raise Unfingerprintable(f"the network is {kind}: {advice}")
    while isinstance(network, DataParallel | DistributedDataParallel) or is_compiled(network):
        network = next(network.children())
    try:
        return _kept_hash(network) if kept else fingerprint(network)
    except Unfingerprintable as error:
        raise Unfingerprintable(f"the network holds {error}: {advice}") from error


def _kept_hash(network: torch.nn.Module) -> str:
    """The hash of a network, computed again if the network may have changed since."""
    now = list(_made_of(network))
    before, found = _hashes.get(network, ([], ""))
    if not _is_same(before, now):
        found = fingerprint(network)
        _hashes[network] = [(ref(part), mark) for part, mark in now], found
    return found


def _made_of(network: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """The parts of a network, each with what tells that it has changed: its modules with their plain attributes, its
    parameters and buffers with where they lie and how often they were changed in place; None where nobody counts.
    """
    for module in network.modules():
        yield module, [value for value in vars(module).values() if isinstance(value, _PLAIN)]
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_inference() or tensor.layout is not torch.strided:
            yield tensor, None
        else:
            yield tensor, (tensor.device, tensor.data_ptr(), tensor_version(tensor))


def _is_same(before: list[tuple[ref, Any]], now: list[tuple[Any, Any]]) -> bool:
    """Whether a network has the same parts as before, none of which has changed."""
    if len(before) != len(now):
        return False
    for (earlier, earlier_mark), (part, mark) in zip(before, now, strict=True):
        if earlier() is not part or mark is None or earlier_mark != mark:
            return False
    return True
