"""The border: arrays with the channel last, tensors with the channel first, and black boxes of networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from smqtk_core.configuration import Configurable


def tensor_of(image: np.ndarray, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """An image ``(H, W)`` or ``(H, W, C)`` as a tensor ``(C, H, W)``."""
    image = np.asarray(image)
    return real_tensor(image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)).to(device, dtype, copy=True)


def real_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of an array of any real type and layout."""
    if array.dtype.kind == "u" and array.itemsize > 1:  # torch lacks operations on these types
        array = array.astype(np.int64)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def image_of(image: torch.Tensor) -> np.ndarray:
    """An image ``(C, H, W)`` as an array ``(H, W, C)``, or ``(H, W)`` where it has one channel."""
    if image.ndim != 3:
        raise ValueError(
            f"xaitk-saliency explains 2D images, got one of shape {tuple(image.shape)} (C, *spatial); for volumes use "
            "the methods of monai_saliency"
        )
    array = image.detach().cpu().numpy()
    return array[0] if len(array) == 1 else np.ascontiguousarray(np.moveaxis(array, 0, -1))


class Unconfigured(Configurable):
    """A black box that no configuration makes: discovery leaves it out."""

    @classmethod
    def is_usable(cls) -> bool:
        return False

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(f"a network has no configuration: make the {type(self).__name__} in your program")
