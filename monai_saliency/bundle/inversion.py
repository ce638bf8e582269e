"""The way back through a preprocessing step by step, where MONAI's ``Invertd`` does not know it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, ConcatItemsd, CopyItemsd, InvertibleTransform, MapTransform
from monai.transforms.utils import convert_applied_interp_mode
from monai.utils import TraceKeys

from monai_saliency.bundle.unrecorded import moves_unrecorded

__all__ = ["inverted_by_steps", "source_key", "unrecorded_steps"]

logger = logging.getLogger(__name__)


def source_key(transform: Any, key: str) -> str:
    """The key of the file that an image was made of: of an image put together from several files, the first one's.

    Args:
        transform: the preprocessing.
        key: the key of the image.
    """
    for step in reversed([*_steps(transform)]):
        key = _before(step, key)
    return key


def unrecorded_steps(transform: Any, key: str, image: torch.Tensor) -> list[str]:
    """The names of the steps that move voxels of an image and do not record it.

    Args:
        transform: the preprocessing.
        key: the key of the image.
        image: ``(C, *spatial)``, as the preprocessing gave it.
    """
    found = []
    for step in reversed([*_steps(transform)]):
        before = _before(step, key)
        if before == key and key in getattr(step, "keys", ()) and moves_unrecorded(step, key, image):
            found.append(type(step).__name__)
        key = before
    return found[::-1]


def inverted_by_steps(saliency: torch.Tensor, image: MetaTensor, transform: Any, key: str, nearest: bool) -> MetaTensor:
    """Take a map back through those steps of a preprocessing that can be inverted.

    A step that lacks ``allow_missing_keys``, or that cannot be inverted, is passed by, and an image that was put
    together from several is followed to the first of them. Whether the map ends where it should is for the caller to
    check: by its shape and its affine, which the inverted steps keep up.

    Args:
        saliency: ``(K, *spatial)`` on the grid of the image.
        image: ``(C, *spatial)``, as the preprocessing gave it, with its ``applied_operations``.
        transform: the preprocessing.
        key: the key of the image.
        nearest: whether to resample by nearest neighbour rather than linearly.
    """
    back = MetaTensor(saliency.detach().clone()).copy_meta_from(image)
    operations = copy.deepcopy(image.applied_operations)
    back.applied_operations = [
        {**operation, TraceKeys.ID: TraceKeys.NONE} if isinstance(operation, dict) else operation
        for operation in (convert_applied_interp_mode(operations, "nearest") if nearest else operations)
    ]
    for step in reversed([*_steps(transform)]):
        before = _before(step, key)
        if before != key:
            key = before
        elif isinstance(step, InvertibleTransform) and key in getattr(step, "keys", ()):
            back = _inverted(step, key, back)
    return back


def _inverted(step: Any, key: str, image: MetaTensor) -> MetaTensor:
    """An image before a step; as it is where the step cannot be inverted."""
    alone = copy.copy(step)
    if isinstance(alone, MapTransform):
        alone.allow_missing_keys = True
    given = image.clone()
    try:
        found = alone.inverse({key: given})[key]
        return found if isinstance(found, MetaTensor) else given  # as of ToTensord, whose inverse is an array
    except Exception:
        logger.debug("%s cannot be inverted", type(step).__name__, exc_info=True)
        return image


def _before(step: Any, key: str) -> str:
    """The key of an image before a step, which may have made it of others."""
    if isinstance(step, ConcatItemsd) and step.name == key:
        return str(step.keys[0])
    if isinstance(step, CopyItemsd) and key in step.names:
        return str(step.keys[step.names.index(key) % len(step.keys)])
    return key


def _steps(transform: Any) -> Iterator[Any]:
    """The steps of nested ``Compose`` one by one. (``Compose.flatten`` makes new ones of some kinds.)"""
    if isinstance(transform, Compose):
        for step in transform.transforms:
            yield from _steps(step)
    elif transform is not None:
        yield transform
