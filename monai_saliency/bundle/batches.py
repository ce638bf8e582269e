"""The cases of a batch of somebody else's loader, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.utils import CommonKeys, ImageMetaKey

from monai_saliency.utils.tensors import plain

__all__ = ["goes_through_all", "input_key", "is_input", "items_of", "keys_of"]


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


def input_key(
    items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor], other_keys: Iterable[Any] = ()
) -> Any:
    """The key of the entry that is the network's input in each of some cases, or else its first channels, as where an
    evaluator puts a pair together; None where there is none.

    Equal values do not show which entry the network got: an empty scan equals its empty mask. Then it is the entry
    whose memory is the input's, or else ``"image"``, which MONAI's evaluators read.

    Args:
        items: the cases.
        images: ``(C, *spatial)`` each, the network's inputs.
        other_keys: keys that are known to hold something else, such as label maps.

    Raises:
        ValueError: when several entries are equal to the input in all cases, and a map would lie elsewhere, or have
            another name, by one than by another.
    """
    for channels in range(len(images[0]), 0, -1):
        parts = [image[:channels] for image in images]
        keys = [key for key in items[0] if key not in {*other_keys} and _holds(key, items, parts)]
        if keys:
            return _chosen(keys, items, parts)
    return None


def _holds(key: Any, items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor]) -> bool:
    return all(is_input(item.get(key), image) for item, image in zip(items, images, strict=True))


def _chosen(keys: list[Any], items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor]) -> Any:
    given = [
        key for key in keys if all(_same_memory(item[key], each) for item, each in zip(items, images, strict=True))
    ]
    keys = given or keys
    if len(keys) == 1 or CommonKeys.IMAGE in keys:
        return keys[0] if len(keys) == 1 else CommonKeys.IMAGE
    if len({repr([_place(item[key]) for item in items]) for key in keys}) > 1:
        raise ValueError(
            f"the batch's entries {', '.join(map(repr, keys))} are all equal to the network's input, as an empty scan "
            "and its mask are, and come from other files, so which of them it got is unknown: name it by "
            "--saliency_image_key"
        )
    return keys[0]


def _same_memory(value: torch.Tensor, image: torch.Tensor) -> bool:
    return value.device == image.device and value.data_ptr() == image.data_ptr() and value.stride() == image.stride()


def _place(value: torch.Tensor) -> list[Any]:
    """What decides where a map of an entry lies, and what it is called."""
    if not isinstance(value, MetaTensor):
        return []
    name = value.meta.get(ImageMetaKey.FILENAME_OR_OBJ)
    return [str(name), value.affine.tolist(), [each.get("class") for each in value.applied_operations]]


def is_input(value: Any, image: torch.Tensor) -> bool:
    """Whether an entry of a case holds the voxels ``(C, *spatial)`` that its network got."""
    if not isinstance(value, torch.Tensor) or value.shape != image.shape:
        return False
    if _same_memory(value, image):
        return True
    given = plain(value).to(image)
    return bool(((given == image) | (given.isnan() & image.isnan())).all())
