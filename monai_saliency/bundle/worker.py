"""A process that explains whichever units it is given, for engines that hand them out one call after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from monai_saliency.bundle.config import BundleConfig
from monai_saliency.distributed.base import Cohort, Engine, local_device
from monai_saliency.sharding import Unit

__all__ = ["Worker"]


class Worker(Engine):
    """Explains units of a bundle's cohort in a process of its own, and holds the network once.

    It makes the bundle anew from the driver's config, as MONAI does, with itself as the engine: the run comes as far as
    its engine, and goes on whenever there are units.

    Args:
        config: the bundle's, see :attr:`~monai_saliency.distributed.base.Cohort.config`.
        run_id: the id by which the driver runs it.
        path: the driver's ``sys.path``, for the bundle's own modules.
        folder: the driver's working directory, from which relative paths count.

    Attributes:
        device: where its network is, if the overlay leaves that to the engine.

    Raises:
        RuntimeError: when the config's run ends without asking its engine for anything.
        Exception: what the bundle raises while it is made.
    """

    speaks = False

    def __init__(self, config: dict[str, Any], run_id: str, path: Sequence[str] = (), folder: str | Path = ".") -> None:
        self.device = local_device()
        self._cohort: Cohort | None = None
        os.chdir(folder)
        # An empty entry means the folder that the driver was started in.
        entries = [entry or str(folder) for entry in path]
        sys.path[:] = list(dict.fromkeys([*entries, *sys.path]))
        parser = ConfigParser(_without_trackers(config) | {"saliency_engine": self})
        bundle = BundleConfig(parser)
        try:
            for id in ("initialize", run_id):
                content = parser.get(id, [])
                for step in [f"{id}::{i}" for i in range(len(content))] if isinstance(content, list) else [id]:
                    bundle.evaluate(step)
        except SystemExit as error:
            raise RuntimeError(f"the bundle ended its run before anything could be explained: {error}") from None
        if self._cohort is None:
            raise RuntimeError(f"{run_id!r} never called `saliency_engine`: it must be an id that explains the cohort")

    def run(self, cohort: Cohort) -> None:
        """Keep the cohort for :meth:`explain`."""
        # The driver shows how far all are.
        cohort.handler.inferer = cohort.handler.inferer.replace(progress=False)
        self._cohort = cohort

    def explain(self, units: Sequence[Unit]) -> list[dict[str, str]]:
        """As :meth:`Cohort.explain <monai_saliency.distributed.base.Cohort.explain>`."""
        assert self._cohort is not None
        return self._cohort.explain(units)

    def waiting(self) -> list[str]:
        """The cases that somebody else is to finish, of those explained here since this was last asked."""
        assert self._cohort is not None
        handler = self._cohort.handler
        found, handler.waiting = handler.waiting, []
        return found


def _without_trackers(config: Any) -> Any:
    """A config without the handlers of ``--tracking``: the driver records the run, once."""
    if isinstance(config, dict):
        return {key: _without_trackers(content) for key, content in config.items()}
    if isinstance(config, list):
        return [_without_trackers(content) for content in config if not _is_tracker(content)]
    return config


def _is_tracker(content: Any) -> bool:
    return isinstance(content, dict) and str(content.get("_target_", "")).endswith("MLFlowHandler")
