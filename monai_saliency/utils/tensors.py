"""Tensors with and without meta data, on the device and on the host."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from monai.data import MetaTensor

__all__ = ["plain", "to_host", "with_meta_of"]


def plain(value: Any) -> Any:
    """The plain tensor of a MetaTensor, on the same memory; anything else as it is."""
    return value.as_tensor() if isinstance(value, MetaTensor) else value


def with_meta_of(image: torch.Tensor, values: torch.Tensor) -> MetaTensor:
    """A MetaTensor of other values with meta data like an image's, where that has any, but of its own."""
    taken = MetaTensor(plain(values)).copy_meta_from(image)
    # MONAI copies the outermost level alone, so that an edit of one affine would move the other.
    taken.__dict__ = deepcopy(taken.__dict__)
    return taken


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the host's memory. From CUDA it is on its way: wait for a moment noted after this call, as
    :class:`monai_saliency.utils.timing.Moment` does, before reading it.
    """
    # Other devices promise nothing of a copy that does not wait.
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)
