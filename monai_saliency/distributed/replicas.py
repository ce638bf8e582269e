"""Copies of a network on other devices, kept from call to call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from monai_saliency.errors import AdviceError
from monai_saliency.networks.identity import network_structure

__all__ = ["Replicas", "network_tensors"]


class Replicas:
    """Copies of a network, one for each device but the network's own.

    A copy takes over parameters and buffers in each call. What else a module holds is copied once: it is copied anew
    when another network is given, or when anything else changes that can be reached from it: parts, hooks, attributes
    (:func:`monai_saliency.networks.identity.network_structure`). A network that holds something that cannot be
    identified is copied in each call.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}

    def networks(self, network: Callable[..., Any], devices: Sequence[torch.device]) -> list[Callable[..., Any]]:
        """The network for each device.

        Raises:
            ValueError: when it cannot be copied.
        """
        if not isinstance(network, torch.nn.Module):
            if len(devices) == 1:
                return [network]
            kind = getattr(network, "__name__", type(network).__name__)
            raise AdviceError(
                f"the network ({kind}) is no torch module, so {len(devices)} devices cannot have copies of it: "
                "give a module, or let processes share the cohort, each of which makes its own (the overlay `torchrun`)"
            )
        homes = {tensor.device for tensor in network_tensors(network).values()}
        if len(homes) > 1:
            raise ValueError(
                f"the network lies on several devices ({', '.join(sorted(map(str, homes)))}), so it cannot be copied "
                "to one: move it to one, or run without sharing its masks between devices"
            )
        home = next(iter(homes), devices[0])
        own = devices.index(home) if home in devices else None
        # All that can be reached from the network is looked at, so once for all copies.
        structure = network_structure(network) if len(devices) > (own is not None) else None
        networks: list[Callable[..., Any]] = []
        for number, device in enumerate(devices):
            if number == own:
                networks.append(network)
                continue
            if number not in self._replicas or not self._replicas[number].follows(network, structure):
                self._replicas[number] = _Replica(network, structure, device)
            networks.append(self._replicas[number].module)
        return networks


class _Replica:
    """A copy of a network on a device.

    Args:
        network: in evaluation mode.
        structure: its :func:`~monai_saliency.networks.identity.network_structure`.
        device: the device.

    Raises:
        ValueError: when it cannot be copied.
    """

    def __init__(self, network: torch.nn.Module, structure: str | None, device: torch.device) -> None:
        self._network = ref(network)
        self._structure = structure
        try:
            self.module = copy.deepcopy(network).to(device)
        except Exception as error:
            raise ValueError(
                f"the network ({type(network).__name__}) cannot be copied to {device} ({error}): let processes share "
                "the cohort, each of which makes its own (the overlay `torchrun`)"
            ) from error

    def follows(self, network: torch.nn.Module, structure: str | None) -> bool:
        """Take over the network's parameters and buffers; False where another copy has to be made."""
        if self._network() is not network or structure is None or self._structure != structure:
            return False
        with torch.no_grad():
            for own, given in zip(
                network_tensors(self.module).values(), network_tensors(network).values(), strict=True
            ):
                own.copy_(given)
        return True


def network_tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, those that parts share under each of their names."""
    return {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
