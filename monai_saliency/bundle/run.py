"""Running the cohort of a bundle, from an expression of its config."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from monai.bundle import ConfigParser
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose

from monai_saliency.bundle.config import BundleConfig, calling_parser
from monai_saliency.bundle.worker import Recipe
from monai_saliency.distributed.base import Engine
from monai_saliency.engines.run import run as run_cohort
from monai_saliency.storage.failures import Failures
from monai_saliency.transforms.writers import case_writers, writer_settings

__all__ = ["run", "writers_of_config"]


def run(
    evaluator: SupervisedEvaluator,
    failures: Failures | None = None,
    tracker: AbstractContextManager[Any] | None = None,
    engine: Engine | None = None,
    run_id: str = "run",
    parser: ConfigParser | None = None,
    **settings: Any,
) -> None:
    """Run an evaluator over its cohort, as :func:`monai_saliency.engines.run.run` does.

    An engine that starts processes itself makes the bundle in each of them from the config.

    Example::

        run: [$monai_saliency.bundle.run.run(@evaluator, @failures, handler=@saliency_handler, engine=@saliency_engine)]

    Args:
        evaluator: predicts, with its loader.
        failures: the list of failed cases.
        tracker: a context to run it in.
        engine: shares the cohort with other processes; all is done here by default.
        run_id: the config's id by which this is run; only needed with an engine.
        parser: the config's parser; by default the one in whose expression this is called.
        settings: further arguments of :func:`monai_saliency.engines.run.run`.
    """
    recipe = None if engine is None else Recipe.here((parser or calling_parser()).get(), run_id)
    run_cohort(evaluator, failures, tracker, engine=engine, recipe=recipe, **settings)


def writers_of_config(output_dir: str, cases: Sequence[str] | None = None) -> Compose:
    """What is written of each case, by the settings of the config in which this is called: its ids that are settings of
    :func:`~monai_saliency.transforms.case_writers`.

    Args:
        output_dir: the output folder.
        cases: the names of the cohort's cases.
    """
    return case_writers(output_dir, cases=cases, **BundleConfig(calling_parser()).given(writer_settings()))
