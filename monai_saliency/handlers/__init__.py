"""Explaining inside a MONAI evaluator, and the tables of a cohort.

====================  ==================================================================================
module                what it has
====================  ==================================================================================
``saliency_handler``  :class:`SaliencyHandler`, the event hooks; needs the extra ``bundle``
``summary``           the rows of ``summary.csv``, and the cohort's figures
``run_settings``      which settings, network and scan made a row
``trust``             :class:`Trust`, how far to trust the map of a case: the figures of ``--trust true``
``trust_page``        :func:`trust_page`, the page ``trust.md`` of a cohort
``mlflow``            :class:`Tracker`, what ``--tracking mlflow`` records
====================  ==================================================================================
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {"SaliencyHandler": "saliency_handler", "Tracker": "mlflow", "Trust": "trust"}

__all__ = ["SaliencyHandler", "Tracker", "Trust"]


def __getattr__(name: str) -> Any:
    # Tables work without ignite, so handlers, which need it, are imported on first use.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
