"""Running the cohort of a bundle from an expression of its config, here or in processes that an engine starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from monai.bundle import ConfigParser
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose

from monai_saliency.bundle.config import BundleConfig, calling_parser
from monai_saliency.distributed.base import Cohort, Engine, local_device
from monai_saliency.engines.run import run as run_cohort
from monai_saliency.storage.tables import Failures
from monai_saliency.transforms.writers import case_writers, writer_settings

__all__ = ["Recipe", "run", "writers_of_config"]


def run(
    evaluator: SupervisedEvaluator,
    failures: Failures | None = None,
    tracker: AbstractContextManager[Any] | None = None,
    engine: Engine | None = None,
    run_id: str = "run",
    parser: ConfigParser | None = None,
    **settings: Any,
) -> None:
    """Run an evaluator over its cohort, as :func:`monai_saliency.engines.run.run` does."""
    recipe = None if engine is None else Recipe.here((parser or calling_parser()).get(), run_id)
    run_cohort(evaluator, failures, tracker, engine=engine, recipe=recipe, **settings)


def writers_of_config(output_dir: str, cases: Sequence[str] | None = None) -> Compose:
    """What is written of each case, by those ids of the config in which this is called that are settings of
    :func:`~monai_saliency.transforms.case_writers`.
    """
    return case_writers(output_dir, cases=cases, **BundleConfig(calling_parser()).given(writer_settings()))


@dataclass(frozen=True)
class Recipe:
    """Makes the cohort of a bundle's run in the process that calls it, which then explains any units of it."""

    config: dict[str, Any]
    run_id: str
    path: Sequence[str] = ()
    folder: str = "."

    @staticmethod
    def here(config: dict[str, Any], run_id: str) -> Recipe:
        """A recipe with the path and the working directory of this process."""
        return Recipe(config, run_id, list(sys.path), os.getcwd())

    def __call__(self) -> Cohort:
        """The cohort. This process takes over the driver's path and working directory."""
        os.chdir(self.folder)
        # An empty entry means the folder that the driver was started in.
        entries = [entry or self.folder for entry in self.path]
        sys.path[:] = list(dict.fromkeys([*entries, *sys.path]))
        engine = _Taker()
        parser = ConfigParser(_without_trackers(self.config) | {"saliency_engine": engine})
        bundle = BundleConfig(parser)
        try:
            for id in ("initialize", self.run_id):
                content = parser.get(id, [])
                for step in [f"{id}::{i}" for i in range(len(content))] if isinstance(content, list) else [id]:
                    bundle.evaluate(step)
        except SystemExit as error:
            raise RuntimeError(f"the bundle ended its run before anything could be explained: {error}") from None
        if engine.cohort is None:
            raise RuntimeError(
                f"{self.run_id!r} never called `saliency_engine`: it must be an id that explains the cohort"
            )
        return engine.cohort


class _Taker(Engine):
    """Takes the cohort, and has nothing explained."""

    speaks = False

    def __init__(self) -> None:
        self.cohort: Cohort | None = None
        self.device = local_device()

    def run(self, cohort: Cohort) -> None:
        self.cohort = cohort


def _without_trackers(config: Any) -> Any:
    """A config without the handlers of ``--tracking``: the driver records the run, once."""
    if isinstance(config, dict):
        return {key: _without_trackers(content) for key, content in config.items()}
    if isinstance(config, list):
        return [_without_trackers(content) for content in config if not _is_tracker(content)]
    return config


def _is_tracker(content: Any) -> bool:
    return isinstance(content, dict) and str(content.get("_target_", "")).endswith("MLFlowHandler")
