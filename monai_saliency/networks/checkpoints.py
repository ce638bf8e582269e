"""Loading weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.exported import InBatchesOf, is_exported

__all__ = ["load_checkpoint"]

_WRAPPERS = ("state_dict", "model", "network", "net", "model_state_dict")


def load_checkpoint(network: torch.nn.Module, path: str | Path | Sequence[str | Path] | None) -> torch.nn.Module:
    """Load all weights of a checkpoint into a network.

    Args:
        network: the module, on any device. It holds a part of the weights if loading fails.
        path: a file made by ``torch.save`` with a state dictionary, or with a dictionary that holds one under a usual
            key (``"state_dict"``, ``"model"``, ...). The prefix ``module.`` of data-parallel training is removed from
            the names. None, ``""``, and an exported network (``.pt2``), which has its weights, load nothing. A list of
            files for an :class:`~monai_saliency.networks.Ensemble`, one for each member.

    Returns:
        the network.

    Raises:
        FileNotFoundError: when the file does not exist.
        ValueError: when the file does not hold a state dictionary, or one of another network. Pickled code is never
            run.
    """
    if not path:
        return network
    if is_exported(path):
        if isinstance(network, (InBatchesOf, torch.fx.GraphModule)):
            return network
        raise ValueError(
            f"checkpoint {path} is an exported network, whose weights fit no {type(network).__name__}: take the "
            "network from it too, by monai_saliency.networks.network_of(network, checkpoint)"
        )
    if isinstance(path, Sequence) and not isinstance(path, str):
        members = network.members.networks if isinstance(network, Ensemble) else [network]
        if len(members) != len(path):
            raise ValueError(f"checkpoint lists {len(path)} files, and the network is of {len(members)}: give one each")
        for member, each in zip(members, path, strict=True):
            load_checkpoint(member, each)
        return network
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: pass --checkpoint with the path of the weights")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} is not a file of weights that can be read without running code in it "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): save it again with "
            "torch.save(network.state_dict(), path), or export it by torch.export to a file that ends in .pt2; for a "
            "TorchScript file set network_def to $torch.jit.load(path), and checkpoint to '' (empty)"
        ) from error
    weights = _state_dict(content)
    if weights is None:
        raise ValueError(f"checkpoint {path} holds no state dictionary, but a {type(content).__name__}")
    try:
        network.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"checkpoint {path} does not fit the network {type(network).__name__}. Set network_def to the network that "
            f"the checkpoint was trained with. {error}"
        ) from None  # the cause is in the message, and whoever shows the cause alone shows the hint too
    return network


def _state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    """The state dictionary inside the content of a checkpoint; None if there is none."""
    if not isinstance(content, Mapping):
        return None
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _state_dict(content[key])
    if not content or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()):
        return None
    prefixed = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if prefixed else name: value for name, value in content.items()}
