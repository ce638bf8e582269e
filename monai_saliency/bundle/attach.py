"""Explaining what an evaluator predicts, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monai_saliency.bundle.attach_settings import AttachSettings
from monai_saliency.bundle.attached_handler import AttachedHandler
from monai_saliency.bundle.config import refuse_generative
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.utils.monai_private import event_handlers, postprocessing_of

__all__ = ["attach", "attach_to"]


def attach(evaluator: Any, output_dir: str | Path, **settings: Any) -> AttachedHandler:
    """Explain each case that a MONAI evaluator predicts, right after its forward. Its predictions stay what they are.

    This is what ``configs/explain.yaml`` does to the evaluator of a bundle, for one that is made in Python.

    Example::

        evaluator = SupervisedEvaluator(device, loader, network, inferer=SlidingWindowInferer((96, 96, 96)))
        ms.attach(evaluator, output_dir="maps")
        evaluator.run()  # maps/<case>_saliency.nii.gz, on the scan's own grid, and maps/summary.csv

    Args:
        evaluator: an evaluator with a network and an inferer, such as MONAI's ``SupervisedEvaluator``. Its inferer is
            replaced by one that also records its calls.
        output_dir: the folder for maps, pictures, ``summary.csv``, ``failures.csv`` and scores.
        settings: what is explained, and how: those of
            :class:`~monai_saliency.bundle.attach_settings.AttachSettings`, such as ``method="rise"``, ``classes=[1]``
            or ``picture=False``, and the method's own.

    Returns:
        the handler: ``explained`` lists the cases with maps, and ``failures`` those without.

    Raises:
        ValueError: when a setting is wrong, or the evaluator cannot be explained, with the reason.
    """
    explaining = AttachSettings(**settings)
    handler = attach_to(evaluator, Path(output_dir), explaining, "the evaluator", postprocessing_of(evaluator))
    handler.report_at_end(evaluator)
    return handler


def attach_to(
    evaluator: Any, folder: Path, settings: AttachSettings, words: str, postprocessing: Any
) -> AttachedHandler:
    """Attach the handler that explains to an evaluator, and detach those that explain already.

    Args:
        evaluator: the evaluator.
        folder: for maps and tables.
        settings: what is explained, and how.
        words: what the evaluator is called in messages.
        postprocessing: what is done with its predictions.

    Raises:
        ValueError: when the evaluator makes images rather than a statement about one.
    """
    refuse_generative(evaluator)
    for event, function in event_handlers(evaluator):
        if isinstance(getattr(function, "__self__", function), SaliencyHandler):  # as our own bundle has one
            evaluator.remove_event_handler(function, event)
    handler = AttachedHandler(settings, words, evaluator, postprocessing, folder)
    handler.attach(evaluator)
    return handler
