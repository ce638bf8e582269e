"""The cases of a batch of somebody else's loader, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from monai.data import decollate_batch

from monai_saliency.utils.tensors import plain

__all__ = ["goes_through_all", "input_key", "items_of", "keys_of"]


def keys_of(item: dict[Any, Any]) -> list[str]:
    """The keys of a case in words, for messages."""
    return sorted(map(str, item))


def items_of(batch: Any, count: int) -> list[dict[Any, Any]]:
    """A batch's cases as dictionaries of their own; of batches that are no dictionaries by position.

    Args:
        batch: what the loader gave.
        count: how many images the network got of it.

    Raises:
        ValueError: when there is not one case for each image.
    """
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
    """The cases of a batch with entries of another length, such as lists of clicks, which each case gets whole.

    Empty where no tensor of the batch has one entry for each image.
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


def input_key(item: dict[Any, Any], image: torch.Tensor) -> Any:
    """The key of a case's entry that is the network's input, or else its first channels, as where an evaluator puts a
    pair together; None where there is none.

    Args:
        item: the case.
        image: ``(C, *spatial)``, the network's input.
    """
    for channels in range(len(image), 0, -1):
        for key, value in item.items():
            if _is_image(value, image[:channels]):
                return key
    return None


def _is_image(value: Any, image: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != image.shape:
        return False
    given = plain(value).to(image)
    return bool(((given == image) | (given.isnan() & image.isnan())).all())
