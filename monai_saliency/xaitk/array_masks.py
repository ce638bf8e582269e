"""Masks that somebody else made: arrays, xaitk-saliency's perturbers, and windows of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.storage.fingerprint import fingerprint

__all__ = ["AnyWindows", "ArrayMasks"]


class AnyWindows(SlidingWindowMasks):
    """Sliding windows that may be larger than the image, as xaitk-saliency allows them."""

    must_fit = False


class ArrayMasks(Masks):
    """Masks that are there already.

    All are in memory at once, as long as their owner keeps them.

    Args:
        array: ``(masks, *spatial)``, numbers in [0, 1]: 1 keeps the image, 0 hides it.

    Raises:
        ValueError: for an array without masks (and from ``bind`` when the image has another shape).
    """

    def __init__(self, array: np.ndarray) -> None:
        array = np.asarray(array)
        if array.ndim < 3 or not len(array):
            raise ValueError(f"masks have the axes (masks, H, W), at least one mask, got shape {array.shape}")
        self.array = array

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        if tuple(image.shape[1:]) != self.array.shape[1:]:
            raise ValueError(f"masks of {self.array.shape[1:]} do not fit an image of {tuple(image.shape[1:])}")
        return BoundArrayMasks(image, self.array)


class BoundArrayMasks(BoundMasks):
    """The masks of an array ``(masks, *spatial)``, for one image."""

    def __init__(self, image: torch.Tensor, array: np.ndarray, drawn: bool = False) -> None:
        super().__init__(image)
        self.array = array
        self.num_masks = len(array) if drawn else None

    @property
    def key(self) -> tuple[Any, ...]:  # type: ignore[override]
        return ("ArrayMasks", fingerprint(torch.from_numpy(_readable(self.array))))

    def __len__(self) -> int:
        return len(self.array)

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The masks themselves."""
        chosen = slice(indices.start, indices.stop) if isinstance(indices, range) else np.asarray(indices, dtype=int)
        return {"mask": self.array[chosen]}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(_readable(codes["mask"])).to(device, self.dtype)[:, None]


def _readable(array: np.ndarray) -> np.ndarray:
    """An array of a type and layout that torch reads."""
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.int64)
    return np.ascontiguousarray(array)
