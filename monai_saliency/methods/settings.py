"""Methods by their names, and their settings by the signatures of their functions."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
from collections.abc import Callable
from typing import Any

from monai_saliency import methods
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.utils.arguments import check_option

__all__ = ["SHARED", "Method", "all_settings", "describe", "find_method", "own_settings"]

#: a function as in :mod:`monai_saliency.methods`
Method = Callable[..., PerturbationInferer]
#: what every method is given by whoever calls it, and so is not a setting of one
SHARED = {"target", "estimator", *inspect.signature(PerturbationInferer).parameters}
#: what other tools call a method, for the advice of an error
_ELSEWHERE = {
    "occlusion": "sliding_window",
    "occlusion_sensitivity": "sliding_window",
    "feature_ablation": "region_occlusion",
    "kernel_shap": "shapley",
}


def find_method(name: str | Method, id: str = "method") -> Method:
    """A method: by its name, by the dotted path of a user's own function or of a class of xaitk-saliency, or as it is.
    ``id`` names it in errors.
    """
    function: Any = pydoc.locate(name) if isinstance(name, str) and "." in name else name
    if not callable(function):
        ours = {method: getattr(methods, method) for method in methods.__all__}
        return check_option(id, name, ours, ", or the dotted path of your own function", _ELSEWHERE)
    if not inspect.isfunction(function) and "xaitk_saliency" in sys.modules:
        from monai_saliency.xaitk.black_box import as_method

        function = as_method(function) or function
    signature = inspect.signature(function)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    takes_shared = "fill" in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds
    if "target" not in signature.parameters or not takes_shared:
        raise ValueError(
            f"`{id}` {name} must be a function as in monai_saliency.methods, with the parameters "
            f"`(own settings, *, target, estimator=None, **settings)`, got {signature}"
        )
    return function


def own_settings(method: Method) -> dict[str, inspect.Parameter]:
    """The settings that only this method has, by their ids, in the order of its signature."""
    parameters = inspect.signature(method).parameters
    return {
        id: parameter
        for id, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and id not in SHARED
    }


def all_settings() -> list[str]:
    """The ids of the settings of all methods of :mod:`monai_saliency.methods`."""
    ids: dict[str, None] = {}
    for name in methods.__all__:
        ids |= dict.fromkeys(own_settings(getattr(methods, name)))
    return list(ids)


def describe(name: str | Method) -> str:
    """The help of a method, from its docstring: the first sentence, then a line for each of its settings, with its
    default.
    """
    method = find_method(name)
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", inspect.getdoc(method) or "").replace("``", "")
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z])", " ".join(text.partition("\n\n")[0].split()))[0]
    lines = [f"{method.__name__}: {sentence}"]
    for id, parameter in own_settings(method).items():
        described = re.search(rf"^    {id}: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE)
        words = " ".join(described[1].split()) if described else ""
        default = "null" if parameter.default is None else parameter.default
        if parameter.default is parameter.empty:
            default = "(needed)"
        lines.append(f"  --{id} {default}: {words}".rstrip(": "))
    return "\n".join(lines)
