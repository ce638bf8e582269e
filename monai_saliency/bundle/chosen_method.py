"""A method that a config names, with the settings that the config gives."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from monai_saliency import methods
from monai_saliency.bundle.config import BundleConfig, best_method, calling_parser
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods.settings import Method, all_settings, find_method, own_settings
from monai_saliency.transforms.writers import writer_settings

#: the method that is best on the cohort's first cases (:class:`~monai_saliency.bundle.method_choice.MethodChoice`)
AUTO = "auto"

logger = logging.getLogger(__name__)


def given_settings(name: str | Method | None, prefix: str = "", others: Iterable[str] = ()) -> dict[str, Any]:
    """A ``method`` and its settings in the config that calls this, and the settings of other methods that nothing else
    reads. Misspelt ids are refused: ``others`` are further ids that are read by their names. :data:`AUTO` is measured.
    """
    bundle = BundleConfig(calling_parser())
    ours = all_settings()
    names = list(ours if name in (None, AUTO) else own_settings(find_method(name, f"{prefix}method")))
    bundle.refuse_misspelt([*names, *ours, *writer_settings(), *others], prefix)
    unread = bundle.unread()
    names += [id for id in ours if f"{prefix}{id}" in unread]
    given = bundle.given(names, prefix)
    if name != AUTO:
        return given | {"method": name}
    if given:
        flags = ", ".join(f"--{prefix}{id}" for id in given)
        raise ValueError(
            f"`{prefix}method` auto chooses the settings too: leave out {flags}, or give it to a method among "
            f"`{prefix}compared_methods`"
        )
    return best_method(prefix)


class ChosenMethod:
    """A method with the settings that it is given.

    Args:
        name: as for :func:`find_method`.
        given: values of settings by id. A warning lists those that the method does not have.
        defaults: come after the given values, and before the method's own defaults.
        prefix: what precedes ids in the messages.

    Attributes:
        method: the function.
        name: its name.
        settings: the values of all settings that the method has, by id.
    """

    def __init__(
        self,
        name: str | Method,
        given: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self.method = find_method(name, f"{prefix}method")
        self.name = name if isinstance(name, str) else self.method.__name__
        own = own_settings(self.method)
        values = {**(defaults or {}), **(given or {})}
        self.settings: dict[str, Any] = {}
        missing = []
        for id, parameter in own.items():
            self.settings[id] = values.get(id, parameter.default)
            if self.settings[id] is parameter.empty:
                missing.append(f"--{prefix}{id}")
        if missing:
            raise ValueError(f"`{prefix}method` {self.name} needs {', '.join(missing)}")
        unread = [f"{prefix}{id}" for id in given or () if id not in own]
        if unread:
            has = [f"{prefix}{id}" for id in own] or ["none"]
            logger.warning(
                "nothing reads %s: the settings of the method %s are %s", ", ".join(unread), self.name, ", ".join(has)
            )

    @classmethod
    def from_config(cls, name: str | Method, defaults: Mapping[str, Any] | None = None) -> ChosenMethod:
        """The method with the settings of the config that calls this, see :func:`given_settings`."""
        given = given_settings(name)
        return cls(given.pop("method"), given, defaults)

    def recorded(self) -> dict[str, Any]:
        """The values to record for a run of the config that calls this: all that users change, and the settings."""
        return BundleConfig(calling_parser()).settings() | {"method": self.name} | self.settings

    def __call__(self, **shared: Any) -> PerturbationInferer:
        """The method's inferer, with arguments that all methods have, such as ``target`` and ``fill``."""
        return self.method(**self.settings, **shared)


def choose_method(
    name: str | Method | None, given: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> ChosenMethod:
    """The method of a name, as :class:`ChosenMethod` makes it. Without a name it is ``focused_rise``, or with settings
    the method that has most of them: of several that one, then RISE, then sliding windows, then the others.
    """
    if name == AUTO:
        raise ValueError(
            "`method` auto is for runs of a bundle: let `monai_saliency.metrics.compare_methods` measure which to take"
        )
    if name is None and not given:
        name = "focused_rise"
    elif name is None:
        by_preference = ["focused_rise", "rise", "sliding_window", *methods.__all__]
        name = max(by_preference, key=lambda id: len(given.keys() & own_settings(getattr(methods, id)).keys()))
    return ChosenMethod(name, given, defaults, prefix)
