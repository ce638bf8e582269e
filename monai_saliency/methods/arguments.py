"""What all methods share: how their arguments are read, and the call that needs none of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.targets import Target
from monai_saliency.targets.auto import AutoTarget
from monai_saliency.utils.arguments import refuse_unknown

__all__ = ["TargetLike", "as_target", "method"]

#: a target, a class, several classes, or None for what the network predicts; inside of a method it is a target
TargetLike: TypeAlias = Any
F = TypeVar("F", bound=Callable[..., PerturbationInferer])


def as_target(target: TargetLike) -> Target:
    """A target as it is; of a class, of several, or of nothing the one that the network's output asks for."""
    if target is None:
        return AutoTarget()
    if isinstance(target, torch.Tensor) and target.ndim == 0:  # such as logits[0].argmax()
        target = target.item()
    if isinstance(target, (int, np.integer)):
        target = [target]
    if isinstance(target, (list, tuple)) and target:
        return AutoTarget(classes=target)
    return target


def method(function: F) -> F:
    """Make a function a method: its ``target`` may be left out, or be a class; a setting that it does not have is
    refused by the nearest one that it has, and its signature shows the arguments that all methods share by name.
    """
    own = inspect.signature(function)
    parameters = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    for name, shared in inspect.signature(PerturbationInferer).parameters.items():
        if name != "masks" and name not in own.parameters:
            parameters.append(shared.replace(kind=shared.KEYWORD_ONLY))
    signature = own.replace(parameters=parameters)

    @functools.wraps(function)
    def call(*args: Any, target: TargetLike = None, **given: Any) -> PerturbationInferer:
        refuse_unknown(function.__name__, given, signature.parameters)
        return function(*args, target=as_target(target), **given)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
