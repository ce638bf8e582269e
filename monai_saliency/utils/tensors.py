"""Tensors with and without meta data, on the device and in the memory of the host."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from monai.data import MetaTensor

__all__ = ["plain", "to_host", "with_meta_of"]


def plain(value: Any) -> Any:
    """The plain tensor of a MetaTensor, which shares its memory. Anything else is returned unchanged."""
    return value.as_tensor() if isinstance(value, MetaTensor) else value


def with_meta_of(image: torch.Tensor, values: torch.Tensor) -> MetaTensor:
    """A MetaTensor of other values with a copy of an image's meta data.

    Args:
        image: a MetaTensor. A plain tensor has no meta data to copy.
        values: the new values.
    """
    copied = MetaTensor(plain(values)).copy_meta_from(image)
    # MONAI copies only the outermost level: both tensors would share one affine.
    copied.__dict__ = deepcopy(copied.__dict__)
    return copied


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of the host.

    A copy from CUDA may not have arrived yet: make a :class:`monai_saliency.utils.timing.Timestamp` after this call,
    and wait for it before reading the copy.
    """
    # Only CUDA defines when a copy that does not wait can be read.
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)
