"""The cases of a batch of somebody else's loader, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from monai.data import decollate_batch
from monai.utils import CommonKeys

from monai_saliency.utils.tensors import plain

__all__ = ["goes_through_all", "input_key", "is_input", "items_of", "keys_of"]


def keys_of(item: Mapping[Any, Any]) -> list[str]:
    """The keys of a case in words, for messages."""
    return sorted(map(str, item))


def items_of(batch: Any, count: int) -> list[dict[Any, Any]]:
    """A batch's cases as dictionaries of their own; of batches that are no dictionaries by position."""
    if isinstance(batch, (list, tuple)) and len(batch) == count and all(isinstance(item, dict) for item in batch):
        return [dict(item) for item in batch]
    items = decollate_batch(batch)
    if len(items) != count and isinstance(batch, Mapping):
        items = _by_key(batch, count) or items
    if len(items) != count:
        raise ValueError(f"a batch of {len(items)} cases gave the network {count} images, so which is whose is unknown")
    return [
        dict(item) if isinstance(item, dict) else dict(enumerate(item if isinstance(item, (list, tuple)) else [item]))
        for item in items
    ]


def _by_key(batch: Mapping[Any, Any], count: int) -> list[dict[Any, Any]]:
    """The cases of a batch with entries of another length, such as lists of clicks, which each case gets whole; empty
    if no tensor of the batch has one entry for each image.
    """
    parts = {key: decollate_batch(value) for key, value in batch.items()}
    fits = {key: isinstance(part, (list, tuple)) and len(part) == count for key, part in parts.items()}
    if not any(fits[key] and isinstance(batch[key], torch.Tensor) for key in batch):
        return []
    return [{key: parts[key][i] if fits[key] else batch[key] for key in batch} for i in range(count)]


def goes_through_all(loader: Any, epoch_length: int | None) -> bool:
    """Whether a run was asked for all that a loader's dataset lists: its sampler takes no part, and it is not cut."""
    try:
        whole = len(loader.sampler) >= len(loader.dataset)
        if getattr(loader, "drop_last", False) and loader.batch_size:
            whole = whole and len(loader.sampler) % loader.batch_size == 0
        return whole and (epoch_length is None or epoch_length >= len(loader))
    except (AttributeError, TypeError):  # no sampler, or nothing that has a length
        return False


def input_key(
    items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor], other_keys: Iterable[Any] = ()
) -> Any:
    """The key under which the cases hold what their network got; None if there is none."""
    for channels in range(len(images[0]), 0, -1):
        parts = [image[:channels] for image in images]
        keys = [key for key in items[0] if key not in {*other_keys} and _holds(key, items, parts)]
        if len(keys) > 1 and CommonKeys.IMAGE not in keys:
            raise ValueError(
                f"the batch's entries {', '.join(map(repr, keys))} are all equal to the network's input, as an empty "
                "scan and its mask are, so which of them it got is unknown: name it by --saliency_image_key"
            )
        if keys:
            return next((key for key in keys if key == CommonKeys.IMAGE), keys[0])
    return None


def _holds(key: Any, items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor]) -> bool:
    return all(is_input(item.get(key), image) for item, image in zip(items, images, strict=True))


def is_input(value: Any, image: torch.Tensor) -> bool:
    """Whether an entry of a case holds the voxels ``(C, *spatial)`` that its network got."""
    if not isinstance(value, torch.Tensor) or value.shape != image.shape:
        return False
    return torch.equal(plain(value).to(image).nan_to_num(), image.nan_to_num())
