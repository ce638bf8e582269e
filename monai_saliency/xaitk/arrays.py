"""The border: arrays with the channel last, tensors with the channel first, and detections in both forms."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from smqtk_image_io.bbox import AxisAlignedBoundingBox

__all__ = ["as_detections", "image_of", "real_tensor", "rows_of", "tensor_of"]


def tensor_of(image: np.ndarray, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """An image ``(H, W)`` or ``(H, W, C)`` as a tensor ``(C, H, W)``."""
    image = np.asarray(image)
    if image.ndim not in (2, 3):
        raise ValueError(f"an image has the axes (H, W) or (H, W, C), got shape {image.shape}")
    if image.dtype.kind not in "buif":
        raise ValueError(f"an image holds real numbers, got type {image.dtype}")
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


def rows_of(found: Any, count: int, rows_first: bool = True) -> torch.Tensor:
    """Detections of B images as rows of corners (column, row), objectness and class scores."""
    boxes, objectness, vectors = found.boxes, found.objectness, found.vectors
    if rows_first:
        boxes = boxes[..., [1, 0, 3, 2]]
    if vectors is None:
        if found.classes.numel() and int(found.classes.max()) >= count:
            raise ValueError(
                f"the network gives class {int(found.classes.max())}, and there are {count} `labels`: give the name of "
                "each class by its number, from 0"
            )
        vectors = torch.nn.functional.one_hot(found.classes.clamp_min(0), count).to(objectness)
    elif vectors.shape[2] != count:
        raise ValueError(f"the network gives scores of {vectors.shape[2]} classes, and there are {count} `labels`")
    return torch.cat([boxes.to(vectors), objectness[..., None].to(vectors), vectors], dim=2)


def as_detections(
    rows: torch.Tensor, labels: Sequence[Hashable]
) -> list[tuple[AxisAlignedBoundingBox, dict[Hashable, float]]]:
    """The rows ``(N, 4 + 1 + classes)`` of one image, without its padding, as a ``DetectImageObjects`` yields them."""
    found = []
    for row in rows[rows[:, 4] > 0].double().cpu().numpy():
        scores = dict(zip(labels, (row[4] * row[5:]).tolist(), strict=True))
        found.append((AxisAlignedBoundingBox(row[:2], row[2:4]), scores))
    return found
