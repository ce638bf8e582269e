"""Whether preprocessing draws at random."""

from __future__ import annotations

from typing import Any

from monai.transforms import Compose
from monai.transforms.traits import RandomizableTrait

__all__ = ["is_random", "reads_differ"]


def is_random(step: Any) -> bool:
    """Whether a transform is random, or a ``Compose`` of which a step is."""
    if type(step) is Compose:
        return any(is_random(part) for part in step.transforms)
    return isinstance(step, RandomizableTrait)


def reads_differ(dataset: Any) -> bool:
    """Whether a dataset, or one that it wraps, applies a random transform."""
    while dataset is not None:
        if is_random(getattr(dataset, "transform", None)):
            return True
        dataset = getattr(dataset, "dataset", None)
    return False
