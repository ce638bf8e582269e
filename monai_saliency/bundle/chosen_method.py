"""A method that a config names, and its settings: its function's signature holds all that configs, the overlay, the
SLURM job, the command line and the tracker need.
"""

from __future__ import annotations

import inspect
import logging
import pydoc
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from monai_saliency import methods
from monai_saliency.bundle.config import BundleConfig, calling_parser
from monai_saliency.bundle.method_help import help_of
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.transforms.writers import writer_settings
from monai_saliency.utils.arguments import check_option, sliding_inferer

__all__ = [
    "AUTO",
    "ChosenMethod",
    "MethodChoice",
    "all_settings",
    "describe",
    "find_method",
    "given_settings",
    "own_settings",
]

#: the method that fits what the evaluator does, see :class:`MethodChoice`
AUTO = "auto"

Method = Callable[..., PerturbationInferer]
logger = logging.getLogger(__name__)

# What every method is given by whoever calls it, and so is not a setting of one.
_SHARED = {"target", "estimator", *inspect.signature(PerturbationInferer).parameters}


def find_method(name: str | Method, id: str = "method") -> Method:
    """A method by its name."""
    found = pydoc.locate(name) if isinstance(name, str) and "." in name else name
    if not callable(found):
        ours = {each: getattr(methods, each) for each in methods.__all__}
        method: Method = check_option(id, name, ours, ", or the dotted path of your own function")
        return method
    if not inspect.isfunction(found) and "xaitk_saliency" in sys.modules:
        from monai_saliency.xaitk.black_box import as_method

        found = as_method(found) or found
    parameters = inspect.signature(found).parameters
    takes_shared = "fill" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if "target" not in parameters or not takes_shared:
        raise ValueError(
            f"`{id}` {name} must be a function as in monai_saliency.methods, with the parameters "
            f"`(own settings, *, target, estimator=None, **settings)`, got {inspect.signature(found)}"
        )
    return found


def own_settings(method: Method) -> dict[str, inspect.Parameter]:
    """The settings that only this method has, by their ids, in the order of its signature."""
    parameters = inspect.signature(method).parameters.values()
    return {each.name: each for each in parameters if each.kind is not each.VAR_KEYWORD and each.name not in _SHARED}


def all_settings() -> list[str]:
    """The ids of the settings of all methods of :mod:`monai_saliency.methods`."""
    return list(dict.fromkeys(id for name in methods.__all__ for id in own_settings(getattr(methods, name))))


def given_settings(name: str | Method, prefix: str = "", others: Iterable[str] = ()) -> dict[str, Any]:
    """The settings for a method in the config that calls this, and the settings of other methods that nothing else
    reads. Misspelt ids are refused: ``others`` are further ids that are read by their names.
    """
    bundle = BundleConfig(calling_parser())
    own = all_settings() if name == AUTO else list(own_settings(find_method(name, f"{prefix}method")))
    bundle.refuse_misspelt([*own, *all_settings(), *writer_settings(), *others], prefix)
    unread = {*bundle.unread()}
    return bundle.given(dict.fromkeys([*own, *(id for id in all_settings() if f"{prefix}{id}" in unread)]), prefix)


def describe(name: str | Method) -> str:
    """The help of a method: a line of what it is, then a line for each of its settings, with its default."""
    method = find_method(name)
    return help_of(method, own_settings(method))


class ChosenMethod:
    """A method with the settings that it is given."""

    def __init__(
        self,
        name: str | Method,
        given: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        given = given or {}
        self.method = find_method(name, f"{prefix}method")
        self.name = name if isinstance(name, str) else self.method.__name__
        own = own_settings(self.method)
        values = {id: each.default for id, each in own.items() if each.default is not each.empty}
        values |= {id: value for id, value in {**(defaults or {}), **given}.items() if id in own}
        missing = [f"--{prefix}{id}" for id in own if id not in values]
        if missing:
            raise ValueError(f"`{prefix}method` {self.name} needs {', '.join(missing)}")
        self.settings = {id: values[id] for id in own}
        if unread := [f"{prefix}{id}" for id in given if id not in own]:
            has = ", ".join(f"{prefix}{id}" for id in own) or "none"
            logger.warning("nothing reads %s: the settings of the method %s are %s", ", ".join(unread), self.name, has)

    @classmethod
    def from_config(
        cls, name: str | Method, defaults: Mapping[str, Any] | None = None, prefix: str = ""
    ) -> ChosenMethod:
        """The method with the settings of the config that calls this, see :func:`given_settings`."""
        return cls(name, given_settings(name, prefix), defaults, prefix)

    def recorded(self) -> dict[str, Any]:
        """The values to record for a run of the config that calls this: all that users change, and the settings."""
        return BundleConfig(calling_parser()).settings() | self.settings

    def __call__(self, **shared: Any) -> PerturbationInferer:
        """The method's inferer, with arguments that all methods have, such as ``target`` and ``fill``."""
        return self.method(**self.settings, **shared)


class MethodChoice:
    """A method that was chosen, or with the name ``"auto"`` is to be chosen: ``focused_rise``, or one that has most of
    the settings that are given. ``num_masks`` asks for RISE, a window's size for sliding windows; of several, what
    needs fewer forwards.
    """

    def __init__(
        self, name: str | Method, given: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
    ) -> None:
        self._arguments = given, defaults, prefix
        self._chosen = None if name == AUTO else ChosenMethod(name, *self._arguments)

    def choose(self, inferer: Any, image: torch.Tensor | None = None) -> ChosenMethod:
        """The method for an evaluator's inferer, and an image ``(C, *spatial)``."""
        if self._chosen is not None:
            return self._chosen
        given, cuts = self._arguments[0], sliding_inferer(inferer) is not None
        if not given:
            return ChosenMethod("focused_rise", *self._arguments)
        count = {each: len(given.keys() & own_settings(getattr(methods, each)).keys()) for each in methods.__all__}
        by_cost = ["sliding_window", "rise"] if image is not None and image.ndim == 3 else ["rise", "sliding_window"]
        # Patch windows without a grid report what they need.
        wanted = [*["patch_windows"] * cuts, *by_cost, *methods.__all__]
        return ChosenMethod(max(wanted, key=count.__getitem__), *self._arguments)
