"""Loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

__all__ = ["load_checkpoint"]

_WRAPPERS = ("state_dict", "model", "network", "net", "model_state_dict")


def load_checkpoint(network: torch.nn.Module, path: str | Path | None) -> torch.nn.Module:
    """Load weights into a network, all of them or none.

    Args:
        network: the module, on any device.
        path: a file of ``torch.save``: a state dictionary, alone or under one of the usual keys (``"state_dict"``,
            ``"model"``, ...), with or without the ``module.`` prefix of data-parallel
            training. None or ``""`` loads nothing.

    Returns:
        the network.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is not a state dictionary (pickled code is never run), or does not fit the network.
    """
    if not path:
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
            "torch.save(network.state_dict(), path); for a TorchScript file set network_def to "
            "$torch.jit.load(path) and checkpoint to "
            " (empty)"
        ) from error
    weights = _state_dict(content)
    if weights is None:
        raise ValueError(f"checkpoint {path} holds no state dictionary, but a {type(content).__name__}")
    expected = network.state_dict()
    missing = [name for name in expected if name not in weights]
    surplus = [name for name in weights if name not in expected]
    other = [
        f"{name} {tuple(weights[name].shape)} for {tuple(expected[name].shape)}"
        for name in expected
        if name in weights and weights[name].shape != expected[name].shape
    ]
    if missing or surplus or other:
        parts = [("missing", missing), ("not in the network", surplus), ("of another shape", other)]
        raise ValueError(
            f"checkpoint {path} does not fit the network {type(network).__name__}: "
            + "; ".join(
                f"{len(names)} {what} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
                for what, names in parts
                if names
            )
            + ". Set network_def to the network that the checkpoint was trained with"
        )
    network.load_state_dict(dict(weights))
    return network


def _state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    """The state dictionary in what a checkpoint file holds."""
    if not isinstance(content, Mapping):
        return None
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _state_dict(content[key])
    if not content or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()):
        return None
    prefixed = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if prefixed else name: value for name, value in content.items()}
