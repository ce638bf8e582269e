"""Submitting runs from Python, to SLURM or to this machine: ``bundle/slurm/explain.sbatch`` by way of submitit.

submitit reads pickles from its own folder: keep that where nobody else can write.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monai_saliency.bundle.command import BundleRun, scratch
from monai_saliency.utils.arguments import require, whole_numbers

if TYPE_CHECKING:
    from submitit import Job
    from submitit.helpers import DelayedSubmission

__all__ = ["submit_sweep"]

# SLURM gives a task so many seconds to end, and may take its time to say what comes after that.
_GRACE = 600


def submit_sweep(
    settings: Sequence[Mapping[str, Any]],
    bundle_root: str | Path,
    sweep_dir: str | Path | None = None,
    config_file: str | Path | Sequence[str | Path] | None = None,
    run_id: str = "run",
    common: Mapping[str, Any] | None = None,
    shards: int = 1,
    split: str = "auto",
    cluster: str | None = None,
    log_dir: str | Path | None = None,
    **parameters: Any,
) -> dict[Path, list[Job[str]]]:
    """Submit a bundle's run with each of some settings.

    Each is what ``bundle/slurm/explain.sbatch`` would run with these settings. A job that is preempted or runs out of
    time is submitted again, as submitit does it, and goes on where it was; so does one that is submitted a second time.
    ``python -m monai_saliency gather SWEEP_DIR`` makes a table of the sweep.

    Example::

        settings = [{"method": "rise", "num_masks": n} for n in (1000, 4000)]
        jobs = submit_sweep(settings, "bundle", shards=10, timeout_min=240, gpus_per_node=1, slurm_partition="gpu")
        for job in itertools.chain.from_iterable(jobs.values()):
            job.result()  # waits for it, and raises what went wrong

    Args:
        settings: of each run, ids of the config with their values; ``[{}]`` for the bundle as its config says.
        bundle_root: the bundle's folder.
        sweep_dir: below which each run's output folder is named by its settings
            (:func:`~monai_saliency.bundle.command.folder_name`); ``sweep`` in the bundle's folder by default.
        config_file: the bundle's, one or several; ``configs/inference.yaml`` in the bundle's folder by default. The
            overlays go behind them.
        run_id: ``"run"``, or ``"explain"`` for somebody else's bundle, with the overlay of that name, whose ids
            (``saliency_method``) are then those to set.
        common: ids with values that all runs have, and that name no folder.
        shards: how many jobs share each run's cohort, on SLURM the tasks of an array.
        split: what they share, see :func:`monai_saliency.sharding.units`.
        cluster: ``"slurm"``; ``"local"`` for processes on this machine, all at once, and ``"debug"`` for this process,
            to try without a cluster; by default the first that is there.
        log_dir: submitit's folder for logs and pickles; ``submitit`` below ``sweep_dir`` by default. On a cluster every
            node must see it.
        parameters: of submitit's ``AutoExecutor.update_parameters``: ``timeout_min`` (12 hours by default),
            ``cpus_per_task``, ``gpus_per_node``, ``mem_gb``, ``tasks_per_node``, ``slurm_partition``,
            ``slurm_array_parallelism`` and so on.

    Returns:
        each run's output folder, with its jobs. The result of a job is that folder.

    Raises:
        OptionalImportError: when submitit is not installed.
        ValueError: when the settings are none, name one folder twice, or set what is set here.
        FileNotFoundError: when there is no such config file.
    """
    submitit = require("submitit", extra="slurm")
    whole_numbers("shards", shards, 1)
    if not settings:
        raise ValueError(
            "`settings` must hold the settings of at least one run: [{}] runs the bundle as its config says"
        )
    common = dict(common or {})
    given = [config_file] if isinstance(config_file, str | Path) else config_file or []
    sweep = Path(sweep_dir if sweep_dir is not None else Path(bundle_root) / "sweep").absolute()
    bundle = BundleRun(Path(bundle_root), [Path(file) for file in given], run_id, sweep)
    executor = submitit.AutoExecutor(folder=log_dir if log_dir is not None else sweep / "submitit", cluster=cluster)
    executor.update_parameters(**{"name": "explain", "timeout_min": 720} | parameters)
    threads = parameters.get("cpus_per_task")
    runs: dict[Path, list[_Run]] = {}
    for each in settings:
        twice = {bundle.output_id, "saliency_split", "saliency_engine"} & {*each, *common} or set(each) & set(common)
        if twice:
            raise ValueError(
                f"{', '.join(sorted(twice))} cannot be set twice: see `sweep_dir`, `split`, `shards` and `common`"
            )
        output = bundle.folder(each)
        if output in runs:
            raise ValueError(f"`settings` has {output.name} twice: each run needs settings of its own")
        command = bundle.command(each, common, split=split, python=sys.executable)
        values = {**each, **common}
        lmdb = values.get("cache") == "lmdb" and "cache_dir" not in values
        runs[output] = [
            _Run(command, str(output), executor.cluster, shard, shards, threads, lmdb) for shard in range(shards)
        ]
    return {output: executor.submit_array(run) for output, run in runs.items()}


@dataclass(frozen=True)
class _Run:
    """One job: a bundle's run, or one of several shards of it. The database of ``lmdb`` must lie on the node itself."""

    command: list[str]
    output: str
    cluster: str
    shard: int
    shards: int
    threads: int | None
    lmdb: bool

    def __call__(self) -> str:
        """Run it."""
        submitit = require("submitit", extra="slurm")
        command, environment = list(self.command), dict(os.environ)
        if self.cluster == "slurm":
            # The overlay finds the array's task by itself.
            environment["OMP_NUM_THREADS"] = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        else:
            tasks, task = 1, 0
            if self.cluster != "debug":
                here = submitit.JobEnvironment()
                tasks, task = here.num_tasks, here.global_rank
                environment["LOCAL_RANK"] = str(here.local_rank)
            engine = {"_target_": "monai_saliency.distributed.RankEngine", "rank": self.shard * tasks + task}
            engine |= {"world_size": self.shards * tasks, "split": "@saliency_split"}
            command.append(f"--saliency_engine={engine}")
            if self.threads is not None:
                environment["OMP_NUM_THREADS"] = str(self.threads)
        if self.lmdb:
            command.append(f"--cache_dir={scratch(os.environ)}")
        print("runs:", *command, flush=True)
        status = _run(command, environment)
        if self.cluster == "slurm" and status in (128 + signal.SIGTERM, -signal.SIGTERM):
            # SLURM ended it. What it does next, such as starting this job again, ends this process too.
            time.sleep(_GRACE)
        if status:
            raise RuntimeError(f"the run to {self.output} ended with status {status}: its log says why")
        return self.output

    def checkpoint(self) -> DelayedSubmission:
        """What submitit submits where this is preempted or out of time: the same, since all that is done is kept."""
        return require("submitit.helpers", extra="slurm").DelayedSubmission(self)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The status with which a process ends. It ends by itself, within a batch, where this one is to end."""
    # SLURM sends to all of a job what submitit's own process waits for, and what would kill any other.
    number = getattr(signal, f"SIG{require('submitit', extra='slurm').JobEnvironment.USR_SIG}")
    with subprocess.Popen(
        command, env=environment, preexec_fn=partial(signal.signal, number, signal.SIG_IGN)
    ) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise
