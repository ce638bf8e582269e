"""What a bundle's postprocessing makes of the network's output: its activation, and its labels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from monai.transforms import (
    Activations,
    Activationsd,
    AsDiscrete,
    AsDiscreted,
    Compose,
    CopyItemsd,
    Lambda,
    Lambdad,
)
from monai.utils import CommonKeys

from monai_saliency.targets.base import ACTIVATIONS, to_float
from monai_saliency.targets.regions import Labels

__all__ = ["Reading", "read_postprocessing"]

# Modules of MONAI whose transforms only lead to others, and of those that change an image's numbers.
_BASES = ("monai.transforms.transform", "monai.transforms.inverse", "monai.transforms.traits")
_CHANGING = ("monai.transforms.intensity.", "monai.apps.vista3d.")


@dataclass(frozen=True)
class Reading:
    """How a bundle's postprocessing reads a prediction."""

    activation: str | None = None  # "softmax" or "sigmoid"
    #: how it makes labels: "argmax", or "threshold" (all channels that reach it)
    discrete: str | None = None
    unread: str | None = None  # what else it makes of the numbers, in words
    threshold: float = 0.5  # in the unit of the activation's values, or of the network's numbers

    def labels(self, values: torch.Tensor, activation: str) -> Labels:
        """The labels that the bundle makes of an output ``(1, C, *spatial)``. The score's activation counts where the
        bundle makes no labels, and stands for a function that cannot be read.
        """
        found, several = values[0], values.shape[1] > 1
        own = self.activation or (activation if self.unread else "none")
        if self.discrete == "threshold":
            reached = ACTIVATIONS[own](to_float(values))[0] >= self.threshold
            # Classes that exclude each other have a background.
            return Labels(reached, background=several and "softmax" in (own, activation))
        if activation == "sigmoid" and not (self.discrete and several):
            return Labels(found > 0, background=False)
        # Different logits may have one sigmoid: then the first is the highest.
        made = ACTIVATIONS[own](to_float(values))[0] if own == "sigmoid" else found
        return Labels(made.argmax(dim=0), background=several)


def read_postprocessing(transform: Any) -> dict[Any, Reading]:
    """Find the activations and the label-making transforms in a bundle's postprocessing.

    Args:
        transform: the postprocessing: any transform, ``Compose`` or function, or None. Array transforms and functions
            count for the key ``"pred"``.

    Returns:
        what the postprocessing does, by the key of the prediction.

    Example::

        >>> from monai.transforms import Activationsd, AsDiscreted, Compose
        >>> read_postprocessing(Compose([Activationsd("pred", softmax=True), AsDiscreted("pred", argmax=True)]))
        {'pred': Reading(activation='softmax', discrete='argmax', unread=None, threshold=0.5)}
    """
    readings: dict[Any, Reading] = {}
    # What is made of the probabilities of a known activation, in words.
    changed: dict[Any, str] = {}
    copies: dict[Any, Any] = {}
    for each in transform.flatten().transforms if isinstance(transform, Compose) else [transform]:
        for copy, key in zip(each.names, itertools.cycle(each.keys)) if isinstance(each, CopyItemsd) else ():
            copies[copy], readings[copy] = key, readings.get(key, Reading())
        for key, step in _steps(each):
            old = readings.setdefault(key, Reading())
            if old.discrete:  # what follows changes labels
                continue
            if old.activation or old.unread:
                # Probabilities that are changed leave the score what its name says, but not the labels.
                if old.activation and (step.unread or step.activation):
                    changed.setdefault(key, step.unread or f"applies a {step.activation} to its {old.activation}")
                step = replace(step, activation=old.activation, unread=old.unread)
            if step.discrete and key in changed:
                step = replace(step, unread=step.unread or changed[key])
            readings[key] = step
    for copy, key in reversed(copies.items()):
        if readings.get(key, Reading()) == Reading():  # labels are made of the copy
            readings[key] = readings[copy]
    return readings


def _steps(transform: Any) -> Iterator[tuple[Any, Reading]]:
    """What one transform does, one thing after another, each with the key of the prediction."""
    keys = [(key, i) for i, key in enumerate(getattr(transform, "keys", None) or [CommonKeys.PRED])]
    if isinstance(transform, (Activationsd, Activations)):
        yield from ((key, step) for key, i in keys for step in _activations(transform, i))
    elif isinstance(transform, (AsDiscreted, AsDiscrete)):
        yield from ((key, _labels(transform, i)) for key, i in keys)
    elif isinstance(transform, (Lambdad, Lambda)):
        for key, i in keys:
            if _setting(transform, "overwrite", i) is not False and _setting(transform, "func", i) is not None:
                yield key, _function(_setting(transform, "func", i))
    elif transform is not None and (unread := _of_unknown(transform)) is not None:
        yield from ((key, unread) for key, _ in keys)


def _activations(transform: Any, index: int) -> Iterator[Reading]:
    """What an ``Activations(d)`` does for its key at ``index``."""
    yield Reading()
    if _setting(transform, "sigmoid", index):
        yield Reading("sigmoid")
    if _setting(transform, "softmax", index):
        axis = getattr(transform, "converter", transform).kwargs.get("dim", 0)
        yield Reading("softmax") if axis == 0 else Reading(unread=f"applies a softmax over axis {axis} to it")
    if (other := _setting(transform, "other", index)) is not None:
        yield _function(other, " (other=)")


def _labels(transform: Any, index: int) -> Reading:
    """What an ``AsDiscrete(d)`` does for its key at ``index``."""
    if _setting(transform, "argmax", index):
        return Reading(discrete="argmax")
    threshold = _setting(transform, "threshold", index)
    if threshold is not None:
        try:
            return Reading(discrete="threshold", threshold=float(threshold))
        except (TypeError, ValueError, RuntimeError):  # such as one for each channel
            return Reading(discrete="threshold", unread=f"compares it with a {type(threshold).__name__}")
    return Reading(unread="rounds it" if _setting(transform, "rounding", index) is not None else None)


def _function(function: Any, how: str = "") -> Reading:
    """A function is not tried, since it may note what it is given: `activation` says what its numbers are."""
    return Reading(unread=f"applies {_name(function)} to it{how}")


def _of_unknown(transform: Any) -> Reading | None:
    """What a step does that is none of MONAI's transforms for activations and labels; None where that is nothing to a
    prediction's numbers.
    """
    ours = [cls for cls in type(transform).__mro__ if cls.__module__.startswith(("monai.", "monai_saliency."))]
    if not ours:
        return _function(transform) if callable(transform) else None
    if ours[0].__module__ in _BASES or ours[0].__module__.startswith(_CHANGING):
        return Reading(unread=f"applies {type(transform).__name__} to it")
    return None


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _setting(transform: Any, name: str, index: int) -> Any:
    """A setting of a transform for its key at ``index``."""
    value = getattr(transform, name, None)
    return value[index] if isinstance(value, (tuple, list)) else value
