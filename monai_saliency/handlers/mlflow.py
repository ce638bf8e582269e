"""The records of a run with MONAI's ``--tracking mlflow``."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from monai.handlers import MLFlowHandler

from monai_saliency.handlers.summary import Summary, figures
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import set_experiment
from monai_saliency.visualize.pictures import PICTURE_FORMATS

__all__ = ["Tracker", "check"]

logger = logging.getLogger(__name__)

_CASE_METRICS = ("probability", "score", "peak_saliency", "peak_in_label", "forwards", "seconds")
_BATCH = 1000  # metrics that MLflow takes at once


def check(save_execute_config: str | bool | None, output_dir: str | Path) -> None:
    """Before any work, check that MLflow is there where the run is tracked. MLflow's telemetry is switched off.

    Args:
        save_execute_config: the config's id of that name, which MONAI replaces by the executed config's path where
            ``--tracking`` is given.
        output_dir: the run's.

    Raises:
        OptionalImportError: when MLflow is not installed.
    """
    if isinstance(save_execute_config, bool):
        return
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    path = _executed_config(save_execute_config or "", output_dir)
    if path.is_file() and MLFlowHandler.__name__ in path.read_text(encoding="utf-8"):
        require("mlflow", extra="mlflow")


def _executed_config(path: str | Path, output_dir: str | Path) -> Path:
    """The executed config's file: MONAI 1.6.1 names it ``/maps + '/config_<time>.json'``, which nothing evaluates."""
    name = re.search(r" \+ '/(config_\w+\.json)'$", str(path))
    return Path(output_dir) / name[1] if name else Path(path)


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
        failures: the cases without a map.
        network: its class and its weights' fingerprint are recorded.
        network_id: names the network where it is not a module.
        output_dir: the folder that the pictures are in.
        picture: whether the run draws them.
        saliency_key: the end of their names.
    """

    def __init__(
        self,
        handlers: Sequence[Any],
        settings: Mapping[str, Any],
        summary: Summary,
        failures: Failures,
        network: Callable[..., Any],
        network_id: str | None = None,
        output_dir: str | Path = ".",
        picture: bool = True,
        saliency_key: str = "saliency",
    ) -> None:
        self.handlers: list[Any] = [handler for handler in handlers if isinstance(handler, MLFlowHandler)]
        self.settings = dict(settings)
        self.summary = summary
        self.failures = failures
        self.network = network
        self.network_id = network_id
        self.output_dir = Path(output_dir)
        self.picture = picture
        self.saliency_key = saliency_key
        self._runs: list[Any] = []

    def __enter__(self) -> Tracker:
        self._runs = [self._start(handler) for handler in self.handlers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"
        for handler, run in zip(self.handlers, self._runs, strict=True):
            try:
                self._finish(handler, run, status)
            except Exception:
                if error is None:
                    raise
                logger.exception("the run's end is not recorded in MLflow")

    def _start(self, handler: Any) -> Any:
        network = {
            "network": type(self.network).__name__,
            "network_fingerprint": network_fingerprint(self.network, self.network_id),
        }
        handler.experiment_param = self.settings | network | (handler.experiment_param or {})
        handler.artifacts = tuple(_executed_config(path, self.output_dir) for path in handler.artifacts if path)
        if (handler.artifact_location or "").startswith("file:"):
            # MONAI 1.6.1 quotes the folder twice: "my maps" becomes another folder, "my%20maps".
            handler.artifact_location = handler.artifact_location.replace("%25", "%")
        # Left to itself the handler goes on in any unfinished run of the experiment, such as another program's.
        set_experiment(handler)
        name = handler.run_name or f"run_{time.strftime('%Y%m%d_%H%M%S')}"
        handler.cur_run = handler.client.create_run(handler.experiment.experiment_id, run_name=name)
        return handler.cur_run

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
        entities = require("mlflow.entities", extra="mlflow")
        now = int(time.time() * 1000)
        found = figures(rows, len(self.failures.rows))
        metrics = [entities.Metric(name, value, now, 0) for name, value in found.items()]
        for step, row in enumerate(rows, start=1):
            for name in _CASE_METRICS:
                if row[name]:
                    value = float({"True": 1, "False": 0}.get(row[name], row[name]))
                    metrics.append(entities.Metric(f"case/{name}", value, now, step))
        for start in range(0, len(metrics), _BATCH):
            client.log_batch(run_id, metrics=metrics[start : start + _BATCH])

    def _log_artifacts(self, client: Any, run_id: str, rows: Sequence[dict[str, str]]) -> None:
        for path in (self.summary.path, self.failures.path):
            if path.is_file():
                client.log_artifact(run_id, str(path))
        for case in dict.fromkeys(row["case"] for row in rows if self.picture):
            for kind in PICTURE_FORMATS:
                picture = self.output_dir / f"{case}_{self.saliency_key}.{kind}"
                if picture.is_file():
                    client.log_artifact(run_id, str(picture), (Path("pictures") / case).parent.as_posix())
