"""Saliency maps for MONAI models: which part of this scan made the network say that?

What you type is here: :func:`explain`, the methods, targets, fills, inputs, transforms and :func:`attach`. The rooms
are modules: ``monai_saliency.masks``, ``monai_saliency.metrics``, ... All of it is imported at the first use, so that
the command line answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monai_saliency.version import __version__ as __version__

if TYPE_CHECKING:
    from monai_saliency.bundle.attach import attach as attach
    from monai_saliency.names import *  # noqa: F403

_ROOMS = (
    *("bundle", "cases", "data", "deploy", "distributed", "engines", "errors", "estimators", "fills", "gradients"),
    *("handlers", "inferers", "masks", "methods", "metrics", "networks", "sharding", "storage", "targets"),
    *("transforms", "utils", "visualize", "xaitk"),
)


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = import_module(f"{__name__}.names")
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name == "attach":
        return import_module(f"{__name__}.bundle.attach").attach
    if name == "__all__" or name in names.__all__:
        return getattr(names, name)
    meant = import_module(f"{__name__}.utils.arguments").did_you_mean(name, __dir__())
    # With its name given, Python adds no suggestion of its own.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}", name=name)


def __dir__() -> list[str]:
    return sorted([*_ROOMS, "attach", "__version__", *import_module(f"{__name__}.names").__all__])
