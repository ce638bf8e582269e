"""The records of a run with MONAI's ``--tracking mlflow``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monai.handlers import MLFlowHandler

from monai_saliency.handlers.summary import Summary, figures
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import set_experiment

__all__ = ["Tracker", "check"]


def check() -> None:
    """Before any work, check that MLflow is installed, and switch its telemetry off.

    Raises:
        OptionalImportError: when it is not installed.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    require("mlflow", extra="mlflow")


@dataclass
class Tracker:
    """Completes the records of MONAI's ``MLFlowHandler``, as a context around the evaluator's run.

    It adds the settings as parameters, the cohort's :func:`~monai_saliency.handlers.summary.figures` as metrics, and as
    artifacts ``summary.csv``, ``failures.csv`` and the executed config.

    Each run of the program is a run of its own in MLflow: ``FINISHED`` when all cases were tried, ``KILLED`` by Ctrl-C
    or SIGTERM, and ``FAILED`` by an error.

    Args:
        handlers: the evaluator's; without an ``MLFlowHandler`` among them nothing is done.
        settings: to record.
        summary: the cohort's table.
        failures: the cohort's failed cases.
        network: its class and its weights' fingerprint are recorded.
        network_id: recorded in place of the fingerprint.
        output_dir: where the executed config is.
    """

    handlers: Sequence[Any]
    settings: Mapping[str, Any]
    summary: Summary
    failures: Failures
    network: Callable[..., Any]
    network_id: str | None = None
    output_dir: str | Path = "."
    _runs: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.handlers = [handler for handler in self.handlers if isinstance(handler, MLFlowHandler)]

    def __enter__(self) -> Tracker:
        self._runs = [self._start(handler) for handler in self.handlers]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        status = "KILLED"
        if error is None:
            status = "FINISHED"
        elif isinstance(error, Exception):
            status = "FAILED"
        for handler, run in zip(self.handlers, self._runs, strict=True):
            self._finish(handler, run, status)

    def _start(self, handler: Any) -> Any:
        network = {
            "network": type(self.network).__name__,
            "network_fingerprint": network_fingerprint(self.network, self.network_id),
        }
        handler.experiment_param = {**self.settings, **network, **(handler.experiment_param or {})}
        handler.artifacts = tuple(self._executed_config(path) for path in handler.artifacts if path)
        # Left to itself the handler goes on in any unfinished run of the experiment, such as another program's.
        set_experiment(handler)
        name = handler.run_name or f"run_{time.strftime('%Y%m%d_%H%M%S')}"
        handler.cur_run = handler.client.create_run(handler.experiment.experiment_id, run_name=name)
        return handler.cur_run

    def _executed_config(self, path: str | Path) -> Path:
        """The executed config's file: MONAI 1.6.1 names it ``/maps + '/config_<time>.json'``, which nothing
        evaluates.
        """
        name = re.search(r" \+ '/(config_\w+\.json)'$", str(path))
        return Path(self.output_dir) / name[1] if name else Path(path)

    def _finish(self, handler: Any, run: Any, status: str) -> None:
        handler.cur_run, handler.run_finish_status = run, status
        try:
            for name, value in figures(self.summary.read(), len(self.failures.rows)).items():
                handler.client.log_metric(run.info.run_id, name, value)
            for path in (self.summary.path, self.failures.path):
                if path.is_file():
                    handler.client.log_artifact(run.info.run_id, str(path))
            if status != "FINISHED":  # or it has done so at the evaluator's end
                handler.complete()
        finally:
            handler.close()
