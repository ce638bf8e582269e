"""What all methods share: how their arguments are read, and the call that needs none of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.targets import BoundTarget, Target
from monai_saliency.targets.auto import AutoTarget
from monai_saliency.utils.arguments import refuse_unknown

__all__ = ["TargetLike", "as_target", "method"]

#: a target, a class, several classes, or None for what the network predicts; inside of a method it is a target
TargetLike: TypeAlias = Any
#: settings of the automatic target, which a method takes in its place
_OF_TARGET = ("activation", "scale", "against")
F = TypeVar("F", bound=Callable[..., PerturbationInferer])


def as_target(target: TargetLike, **settings: Any) -> Target:
    """A target as it is; of a class, of several, of a tensor or array with a class for each image, or of nothing the
    one that the network's output asks for, with settings of :class:`AutoTarget`.
    """
    if target is None:
        return AutoTarget(**settings)
    if isinstance(target, (torch.Tensor, np.ndarray)):
        target = _classes_of(target)
        if isinstance(target, list):
            return _PerImage([AutoTarget(classes=[index], **settings) for index in target])
    if isinstance(target, (int, np.integer)):
        target = [target]
    if isinstance(target, (list, tuple, str)) and target:
        return AutoTarget(classes=target, **settings)
    if settings:
        raise TypeError(f"give {', '.join(settings)} to the target itself, such as ClassScore(1, 'softmax')")
    return target


class _PerImage(Target):
    """A target for each image of a batch, in their order, as captum takes them."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = list(targets)

    def of_image(self, index: int, count: int) -> Target:
        if count != len(self.targets):
            raise ValueError(
                f"`target` is a tensor with a class for each of {len(self.targets)} images, and there are {count}: "
                "give one class an image, or a list such as target=[0, 2] for these classes of all images"
            )
        return self.targets[index]

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        return self.of_image(0, 1).bind(reference_output, case)


def _classes_of(given: torch.Tensor | np.ndarray) -> int | list[int]:
    """The class in a scalar, such as ``logits[0].argmax()``; the classes ``(B,)`` of B images as a list."""
    values = given.flatten().tolist()
    if given.ndim > 1 or not values or not all(type(value) is int for value in values):
        raise ValueError(
            "`target` as a tensor holds a class for each image, whole numbers (B,) such as logits.argmax(dim=1), "
            f"got shape {tuple(given.shape)} of {given.dtype}; for these classes of all images give target=[0, 2]"
        )
    return given.tolist()


def method(function: F) -> F:
    """Make a function a method: its ``target`` may be left out, or be a class, with the settings of an automatic one;
    its ``fill`` may be a number or a name; a setting that it does not have is refused by the nearest one that it has,
    and its signature shows the arguments that all methods share by name.
    """
    own = inspect.signature(function)
    parameters = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    for name, shared in inspect.signature(PerturbationInferer).parameters.items():
        if name != "masks" and name not in own.parameters:
            parameters.append(shared.replace(kind=shared.KEYWORD_ONLY))
    signature = own.replace(parameters=parameters)

    @functools.wraps(function)
    def call(*args: Any, target: TargetLike = None, **given: Any) -> PerturbationInferer:
        of_target = {name: given.pop(name) for name in _OF_TARGET if name in given}
        refuse_unknown(function.__name__, given, signature.parameters)
        if given.get("fill") is not None:
            given["fill"] = fill_in_unit(given["fill"])
        return function(*args, target=as_target(target, **of_target), **given)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
