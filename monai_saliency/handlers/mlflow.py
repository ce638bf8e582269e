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

from monai_saliency.handlers.summary import figures
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.storage.tables import CaseTable, Failures
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import set_experiment
from monai_saliency.visualize.pictures import PICTURE_FORMATS

_CASE_METRICS = ("probability", "score", "peak_saliency", "peak_in_label", "forwards", "seconds")
_TRUTHS = {"True": 1, "False": 0}
_BATCH = 1000  # metrics that MLflow takes at once


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

    It adds the settings as parameters, the cohort's :func:`~monai_saliency.handlers.summary.figures` as metrics, each
    row of ``summary.csv`` as a step of the metrics ``case/score``, ``case/seconds``, ..., and as artifacts
    ``summary.csv``, ``failures.csv``, the pictures and the executed config.

    Each run of the program is a run of its own in MLflow: ``FINISHED`` when all cases were tried, ``KILLED`` by Ctrl-C
    or SIGTERM, and ``FAILED`` by an error.

    Args:
        handlers: the evaluator's; without an ``MLFlowHandler`` among them nothing is done.
        settings: to record.
        summary: the cohort's table.
        failures: the cohort's failed cases.
        network: its class and its weights' fingerprint are recorded.
        network_id: recorded in place of the fingerprint.
        output_dir: where pictures are.
        picture: whether the run draws them.
    """

    handlers: Sequence[Any]
    settings: Mapping[str, Any]
    summary: CaseTable
    failures: Failures
    network: Callable[..., Any]
    network_id: str | None = None
    output_dir: str | Path = "."
    picture: bool = True
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
            rows = self.summary.read()
            self._log_metrics(handler.client, run.info.run_id, rows)
            self._log_artifacts(handler.client, run.info.run_id, rows)
            if status != "FINISHED":  # or it has done so at the evaluator's end
                handler.complete()
        finally:
            handler.close()

    def _log_metrics(self, client: Any, run_id: str, rows: Sequence[dict[str, str]]) -> None:
        metric = require("mlflow.entities", extra="mlflow").Metric
        now = int(time.time() * 1000)
        metrics = []
        for name, value in figures(rows, len(self.failures.rows), len(self.failures.nothing)).items():
            metrics.append(metric(name, value, now, 0))
        for step, row in enumerate(rows, start=1):
            for name in _CASE_METRICS:
                text = row[name]
                if text:
                    metrics.append(metric(f"case/{name}", float(_TRUTHS.get(text, text)), now, step))
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(run_id, metrics=metrics[start : start + _BATCH])

    def _log_artifacts(self, client: Any, run_id: str, rows: Sequence[dict[str, str]]) -> None:
        for path in (self.summary.path, self.failures.path, self.failures.nothing_table.path):
            if path.is_file():
                client.log_artifact(run_id, str(path))
        if not self.picture:
            return
        for case in dict.fromkeys(row["case"] for row in rows):
            for kind in PICTURE_FORMATS:
                picture = Path(self.output_dir) / f"{case}_saliency.{kind}"
                if picture.is_file():
                    client.log_artifact(run_id, str(picture), (Path("pictures") / case).parent.as_posix())
