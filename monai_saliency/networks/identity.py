"""Identifies all that decides the scores: the network, and for stored scores also settings, image and file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from monai_saliency.cases import Case
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.storage.key import Unfingerprintable, fingerprint, input_files, library_versions
from monai_saliency.utils.monai_private import is_compiled
from monai_saliency.utils.precision import chosen_arithmetic
from monai_saliency.utils.tensors import plain

__all__ = ["network_fingerprint", "network_key", "scores_key"]


def network_fingerprint(network: Any, network_id: str | None = None) -> str | None:
    """A hash of a network: its classes, the versions of their packages, its parameters, buffers and other attributes.

    Args:
        network: a module, or any other callable.
        network_id: a name chosen by the caller, which must change whenever the network does. Needed for everything but
            a module that consists of importable classes and of plain values: TorchScript, hooks, lambdas, open files.

    It is None for a network that cannot be identified, whose results must not be used again.

    Example::

        >>> import torch
        >>> network = torch.nn.Linear(2, 1)
        >>> before = network_fingerprint(network)
        >>> with torch.no_grad():
        ...     _ = network.weight.add_(1)
        >>> before == network_fingerprint(network)
        False
        >>> network_fingerprint(lambda images: images) is None
        True
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


def scores_key(network: str, settings: Sequence[Any], case: Case, reads_file: bool = False) -> str:
    """The key under which the scores of a case are stored: a hash of all that decides them."""
    given = case.image, plain(case.labels), case.spacing
    decides = [library_versions(), network, list(settings), *given, chosen_arithmetic()]
    return fingerprint([*decides, [input_files(case.file), case.affine] if reads_file else []])[:32]
