"""Explaining somebody else's bundle: its own run is carried out, and just before the step that first names its
evaluator a handler is attached to that.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from monai_saliency.bundle.attach import attach_to
from monai_saliency.bundle.attach_settings import AttachSettings
from monai_saliency.bundle.chosen_method import given_settings
from monai_saliency.bundle.config import BundleConfig, calling_parser, run_cohort
from monai_saliency.bundle.method_choice import MethodChoice
from monai_saliency.engines.run import show_cause_only
from monai_saliency.transforms.writers import writer_settings
from monai_saliency.utils.arguments import a_path, flag
from monai_saliency.utils.tensors import keep_freed_memory


class Overlay:
    """Explains the bundle whose config contains it. Its settings are the ids of ``configs/explain.yaml``."""

    def __init__(
        self,
        dir: str | Path | None = None,
        evaluator: str | None = None,
        keep_memory: bool = True,
        debug: bool = False,
        compare_cases: int = 8,
        compared_methods: Any = None,
        **settings: Any,
    ) -> None:
        self.keep_memory = flag("saliency_keep_memory", keep_memory)
        self.settings = AttachSettings.of(**settings, prefix="saliency_")
        self.dir = None if dir is None else a_path("saliency_dir", dir)
        self.evaluator = evaluator
        self.comparison = MethodChoice("", compare_cases, compared_methods, prefix="saliency_")

    @staticmethod
    def ids() -> list[str]:
        """The names of all settings but the methods' own, as ids without the prefix."""
        own = [*inspect.signature(Overlay).parameters, *inspect.signature(AttachSettings).parameters]
        names = dict.fromkeys([*own, *writer_settings()])
        return [name for name in names if name not in ("settings", "prefix", "others")]

    @classmethod
    def from_config(cls) -> Overlay:
        """The overlay with the settings of the config that calls this, by ids that begin with ``saliency_``."""
        bundle = BundleConfig(calling_parser())
        show_cause_only(bundle.get("saliency_debug") or False)
        own = bundle.given(cls.ids(), "saliency_")
        own |= bundle.class_names(own.get("class_names"))
        return cls(**own | given_settings(own.get("method"), "saliency_", cls.ids()))

    def explain(self, parser: ConfigParser | None = None, compare: bool = False) -> None:
        """Run the bundle and explain what it predicts; with ``compare``, compare methods on its first cases instead."""
        bundle = BundleConfig(parser if parser is not None else calling_parser())
        evaluator_id = bundle.evaluator_id(self.evaluator)
        steps = bundle.run_steps(evaluator_id)
        first = next((i for i, step in enumerate(steps) if bundle.names(step, evaluator_id)), 0)
        for step in steps[:first]:
            bundle.evaluate(step)
        evaluator = bundle.get(evaluator_id)
        folder = self.dir if self.dir is not None else bundle.output_dir() / "saliency"
        postprocessing = bundle.get(f"{evaluator_id}::postprocessing")
        handler = attach_to(evaluator, folder, self.settings, evaluator_id, postprocessing)
        self.comparison.folder = folder
        handler.compare = self.comparison if compare else None
        engine = None if compare else self.settings.engine
        if self.keep_memory:
            keep_freed_memory(evaluator.state.device)

        def start() -> None:
            for step in steps[first:]:
                bundle.evaluate(step)
            if not steps:
                evaluator.run()
            if engine is None and not compare:
                handler.report_unmet()
            if not handler.is_started and engine is None:
                raise ValueError(
                    f"{evaluator_id} met no case, so nothing was explained: check the bundle's data settings, such as "
                    "--dataset_dir"
                )

        report = folder if self.settings.report and not compare else None
        run_cohort(
            evaluator, handler, engine=engine, run_id="explain", parser=bundle.parser, start=start, report=report
        )
