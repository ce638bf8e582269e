"""Making the cohort of a bundle's run in another process, for engines that start processes themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monai.bundle import ConfigParser

from monai_saliency.bundle.config import BundleConfig
from monai_saliency.distributed.base import Cohort, Engine, local_device

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Makes the cohort of a bundle's run in the process that calls it, which then explains any units of it.

    The bundle is made from the driver's config, as MONAI does, with an engine that takes the cohort: the run comes as
    far as its engine. The network is made once.

    Example::

        recipe = Recipe.here(parser.get(), "run")  # in the driver
        cohort = recipe()  # in another process
        cohort.explain([Unit(2), Unit(5)], quiet=True)

    Args:
        config: the bundle's config, as the plain run reads it.
        run_id: the id by which the driver runs it.
        path: the driver's ``sys.path``, for the bundle's own modules.
        folder: the driver's working directory, which relative paths start from.
    """

    config: dict[str, Any]
    run_id: str
    path: Sequence[str] = ()
    folder: str = "."

    @staticmethod
    def here(config: dict[str, Any], run_id: str) -> Recipe:
        """A recipe with the path and the working directory of this process.

        Args:
            config: the bundle's config.
            run_id: the id by which it is run.
        """
        return Recipe(config, run_id, list(sys.path), os.getcwd())

    def __call__(self) -> Cohort:
        """The cohort. This process takes over the driver's path and working directory.

        Raises:
            RuntimeError: when the config's run ends before it reaches its engine.
            Exception: what the bundle raises while it is made.
        """
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
    """Takes the cohort, and has nothing explained.

    Attributes:
        cohort: what was taken.
        device: the device of the network, if the overlay leaves that to the engine.
    """

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
