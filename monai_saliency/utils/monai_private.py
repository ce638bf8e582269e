"""Every private name of another package that we lean on, so that a new release of it is checked in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from monai.inferers.utils import _get_scan_interval as scan_interval

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["event_handlers", "scan_interval", "tensor_version"]


def event_handlers(engine: Engine) -> list[tuple[Any, Any]]:
    """Each event of an ignite engine with a function that is registered for it, in the order of calling."""
    return [(event, entry[0]) for event, entries in engine._event_handlers.items() for entry in entries]


def tensor_version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, as far as autograd saw it."""
    return tensor._version
