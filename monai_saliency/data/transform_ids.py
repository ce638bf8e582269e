"""The ids under which items note their transforms: memory addresses, which differ in each process."""

from __future__ import annotations

from typing import Any

from monai.data import MetaTensor
from monai.utils import TraceKeys

__all__ = ["forget_ids"]


def forget_ids(value: Any, traced: bool = False) -> None:
    """Replace the ids of transforms by "none", in place.

    Args:
        value: an item, or a value inside it.
        traced: whether it is what a transform has noted.
    """
    # Not monai's reset_ops_id, which converts tuples to lists.
    if isinstance(value, MetaTensor):
        forget_ids(value.applied_operations, traced=True)
    elif isinstance(value, dict):
        if traced and TraceKeys.ID in value:
            value[TraceKeys.ID] = TraceKeys.NONE
        for key, content in value.items():
            forget_ids(content, traced or str(key).endswith(TraceKeys.KEY_SUFFIX))
    elif isinstance(value, list | tuple):
        for content in value:
            forget_ids(content, traced)
