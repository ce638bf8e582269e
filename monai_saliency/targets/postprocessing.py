"""The activation and the labels that a bundle's postprocessing makes from the network's output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from monai.apps.pathology.transforms import HoVerNetInstanceMapPostProcessingd
from monai.apps.vista3d.transforms import VistaPostTransformd
from monai.transforms import (
    Activations,
    Activationsd,
    AsDiscrete,
    AsDiscreted,
    Compose,
    Lambda,
    Lambdad,
    SaveImage,
    SaveImaged,
)
from monai.utils import CommonKeys

from monai_saliency.targets.base import ACTIVATIONS, to_float
from monai_saliency.targets.regions import Labels

# Modules of MONAI whose transforms only lead to others, and of those that change an image's numbers.
_BASES = ("monai.transforms.transform", "monai.transforms.inverse", "monai.transforms.traits")
_CHANGING = ("monai.transforms.intensity.", "monai.apps.vista3d.")
# VISTA3D's labels: of the prompted classes with a logit above 0 the highest, and none where there is no such class.
_PROMPTED = "highest above 0"


@dataclass(frozen=True)
class Reading:
    """How a bundle's postprocessing reads a prediction."""

    activation: str | None = None  # "softmax" or "sigmoid"
    #: how it makes labels: "argmax", "threshold" (all channels that reach it), or "highest above 0"
    discrete: str | None = None
    unread: str | None = None  # what else it makes of the numbers, in words
    threshold: float = 0.5  # in the unit of the activation's values, or of the network's numbers
    is_saved: bool = field(default=False, compare=False)  # as an image

    def then(self, step: Reading) -> Reading:
        """This and a further step together; steps after the labels change nothing."""
        if self.discrete:
            return self
        unread = self.unread or step.unread
        if self.activation and step.activation:
            unread = unread or f"applies a {step.activation} to its {self.activation}"
        known = self.activation or (None if self.unread else step.activation)
        if step.discrete and unread:
            known = None
        return Reading(known, step.discrete, unread, step.threshold, self.is_saved or step.is_saved)

    def labels(self, values: torch.Tensor, activation: str) -> Labels:
        """The labels that the bundle makes of an output ``(1, C, *spatial)``. The score's activation is used if the
        bundle makes no labels, or if a function of the bundle cannot be read.
        """
        numbers, several = values[0], values.shape[1] > 1
        if self.discrete == _PROMPTED:
            highest, label = numbers.max(dim=0)
            return Labels(label.masked_fill(highest <= 0, len(numbers)), background=False)
        own = self.activation or (activation if self.unread else "none")
        if self.discrete == "threshold":
            reached = ACTIVATIONS[own](to_float(values))[0] >= self.threshold
            # Classes that exclude each other have a background.
            return Labels(reached, background=several and "softmax" in (own, activation))
        if activation == "sigmoid" and not (self.discrete and several):
            return Labels(numbers > 0, background=False)
        # Different logits may have one sigmoid: then the first is the highest.
        made = ACTIVATIONS[own](to_float(values))[0] if own == "sigmoid" else numbers
        return Labels(made.argmax(dim=0), background=several)


def read_postprocessing(transform: Any) -> dict[Any, Reading]:
    """Find the activations and the label-making transforms in a bundle's postprocessing.

    Args:
        transform: the postprocessing: any transform, ``Compose`` or function, or None. Array transforms and functions
            count for the key ``"pred"``.

    Returns:
        what the postprocessing does, by the key of the prediction.
    """
    readings: dict[Any, Reading] = {}
    transforms = transform.flatten().transforms if isinstance(transform, Compose) else [transform]
    for part in transforms:
        own = getattr(part, "nuclear_prediction_key", CommonKeys.PRED)  # of HoVerNet's, which has no keys
        for index, key in enumerate(getattr(part, "keys", None) or [own]):
            for step in _steps(part, index):
                readings[key] = readings.get(key, Reading()).then(step)
    for key, reading in readings.items():
        if reading.activation:  # changed probabilities leave the score as it is, unless labels are made from them
            readings[key] = replace(reading, unread=None)
    return readings


def _steps(transform: Any, index: int) -> Iterator[Reading]:
    """What one transform does for its key at ``index``, one thing after another."""

    def setting(name: str) -> Any:
        value = getattr(transform, name, None)
        return value[index] if isinstance(value, (tuple, list)) else value

    if isinstance(transform, (Activationsd, Activations)):
        yield Reading()
        yield from (Reading(name) for name in ("sigmoid", "softmax") if setting(name))
        if setting("other") is not None:
            yield _unread(setting("other"))
    elif isinstance(transform, (AsDiscreted, AsDiscrete)):
        threshold = setting("threshold")
        if setting("argmax"):
            yield Reading(discrete="argmax")
        elif threshold is not None:
            is_one = isinstance(threshold, (int, float))
            words = None if is_one else f"compares it with a {type(threshold).__name__}"
            yield Reading(None, "threshold", words, threshold if is_one else 0.5)
        else:
            yield Reading(unread="rounds it" if setting("rounding") is not None else None)
    elif isinstance(transform, VistaPostTransformd):
        yield Reading("sigmoid")
        yield Reading(discrete=_PROMPTED)
    elif isinstance(transform, HoVerNetInstanceMapPostProcessingd):
        mask = transform.instance_map_post_process.generate_watershed_mask
        yield from (*_steps(mask.activation, 0), *_steps(mask.as_discrete, 0))
    elif isinstance(transform, (SaveImaged, SaveImage)):
        yield Reading(is_saved=True)
    elif isinstance(transform, (Lambdad, Lambda)):
        if setting("overwrite") is not False and setting("func") is not None:
            yield _unread(setting("func"))
    elif transform is not None:
        known = [cls.__module__ for cls in type(transform).__mro__ if cls.__module__.startswith("monai")]
        if callable(transform) and (not known or known[0] in _BASES or known[0].startswith(_CHANGING)):
            yield _unread(transform)


def _unread(function: Any) -> Reading:
    """A function is not tried out, since a call may change it: the user gives `activation` instead."""
    return Reading(unread=f"applies {getattr(function, '__name__', type(function).__name__)} to it")
