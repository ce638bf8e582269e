"""Explaining somebody else's bundle: its own run is carried out, and just before the step that first names its
evaluator a handler is attached to that.
"""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from monai_saliency.bundle.attach import attach_to
from monai_saliency.bundle.attach_settings import AttachSettings
from monai_saliency.bundle.chosen_method import AUTO, given_settings
from monai_saliency.bundle.config import BundleConfig, calling_parser
from monai_saliency.bundle.worker import run as run_cohort
from monai_saliency.storage.tables import Failures
from monai_saliency.transforms.writers import writer_settings
from monai_saliency.utils.arguments import flag
from monai_saliency.utils.tensors import keep_freed_memory

__all__ = ["Overlay"]

logger = logging.getLogger(__name__)


class Overlay:
    """Explains the bundle in whose config it stands. Its settings are the ids of ``configs/explain.yaml``."""

    def __init__(
        self, dir: str | Path | None = None, evaluator: str | None = None, keep_memory: bool = True, **settings: Any
    ) -> None:
        self.keep_memory = flag("saliency_keep_memory", keep_memory)
        self.settings = AttachSettings(**settings, prefix="saliency_")
        self.dir = None if dir is None else Path(dir)
        self.evaluator = evaluator

    @staticmethod
    def ids() -> list[str]:
        """The names of all settings but those of methods, as ids without the prefix."""
        own = [*inspect.signature(Overlay).parameters, *inspect.signature(AttachSettings).parameters]
        return [name for name in dict.fromkeys([*own, *writer_settings()]) if name not in ("settings", "prefix")]

    @classmethod
    def from_config(cls) -> Overlay:
        """The overlay with the settings of the config in which this is called, by ids that begin with ``saliency_``."""
        own = BundleConfig(calling_parser()).given(cls.ids(), "saliency_")
        return cls(**given_settings(own.get("method", AUTO), "saliency_") | own)

    def explain(self, parser: ConfigParser | None = None) -> None:
        """Run the bundle and explain what it predicts."""
        bundle = BundleConfig(parser if parser is not None else calling_parser())
        evaluator_id = self.evaluator or bundle.evaluator_id()
        steps = bundle.run_steps(evaluator_id)
        names = [bundle.names(step, evaluator_id) for step in steps]
        first = names.index(True) if steps else 0
        for step in steps[:first]:
            bundle.evaluate(step)
        evaluator = bundle.evaluator(evaluator_id)
        folder = self.dir if self.dir is not None else bundle.output_dir() / "saliency"
        postprocessing = bundle.get(f"{evaluator_id}::postprocessing")
        handler = attach_to(evaluator, folder, self.settings, evaluator_id, postprocessing)
        engine = self.settings.engine
        if self.keep_memory:
            keep_freed_memory(evaluator.state.device)

        def start() -> None:
            try:
                for step in steps[first:]:
                    bundle.evaluate(step)
            except Exception:
                logger.error(
                    "the run ended after %s explained cases, at the one after %r: where the bundle's own loader or "
                    "network fails on a case, it does so without this overlay too",
                    handler.num_cases,
                    handler.last_case,
                )
                raise
            if not steps:
                evaluator.run()
            if engine is None and getattr(evaluator, "failures", None) is None:  # our own bundle loses none
                handler.report_unmet()
            if not handler.num_cases and engine is None:
                raise ValueError(
                    f"{evaluator_id} met no case, so nothing was explained: check the bundle's data settings, such as "
                    "--dataset_dir"
                )

        run_cohort(
            evaluator,
            handler.failures,
            start=start,
            handler=handler,
            engine=engine,
            run_id="explain",
            parser=bundle.parser,
            report=folder if self.settings.report else None,
        )
        # Our own bundle lists cases that fail before they can be explained.
        failures = getattr(evaluator, "failures", None)
        if isinstance(failures, Failures) and failures.rows and engine is None:
            sys.exit(f"error: {failures.summary(failures.rows)}")
