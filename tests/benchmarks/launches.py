"""How each engine's run of our bundle is started, for the benchmarks of engines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monai_saliency.bundle.configs import overlay_path

BUNDLE = Path(__file__).parents[2] / "bundle"
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Launch:
    """How a run of some workers is started.

    Attributes:
        command: what comes before ``-m monai.bundle run``, with ``{workers}``, ``{devices}`` or ``{cpus}``.
        settings: what comes behind it, likewise.
        splits: what its workers can share.
    """

    command: Sequence[str] = (sys.executable,)
    settings: Sequence[str] = ()
    splits: Sequence[str] = ("cases", "masks")


ENGINES = {
    "torchrun": Launch([str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node={workers}"]),
    # Without a GPU too, as Accelerate starts one process on the CPU; for one process it refuses the option.
    "accelerate": Launch([str(SCRIPTS / "accelerate"), "launch", "--multi_gpu", "--num_processes={workers}"]),
    "lightning": Launch(settings=["--saliency_devices={workers}", "--saliency_accelerator=cpu"]),
    "devices": Launch(settings=["--saliency_devices={devices}"], splits=["masks"]),
    "ray": Launch(settings=["--saliency_max_workers={workers}", "--saliency_num_cpus={cpus}"]),
    "slurm": Launch(["srun", "--ntasks={workers}", "--cpus-per-task=1", "--overcommit", sys.executable]),
}


def available() -> list[str]:
    """The engines that can be started here."""
    return [name for name in ENGINES if name != "slurm" or shutil.which("srun")]


def run(engine: str, workers: int, split: str, settings: Mapping[str, object]) -> float:
    """Seconds of a whole command, from the start of Python to its end; one thread a worker.

    Args:
        engine: its name, or "" for the plain run.
        workers: how many.
        split: what they share.
        settings: ids of the bundle's config.

    Raises:
        RuntimeError: when it fails.
    """
    launch = ENGINES[engine] if engine else Launch()
    # Ray waits until there are as many CPUs as its actors take.
    places = {"workers": workers, "devices": ["cpu"] * workers, "cpus": min(1, (os.cpu_count() or 1) / workers)}
    files = [str(BUNDLE / "configs" / "inference.yaml"), *([str(overlay_path(engine))] if engine else [])]
    asked = {"bundle_root": BUNDLE, "config_file": files} | dict(settings)
    if engine and len(launch.splits) > 1:
        asked["saliency_split"] = split
    command = [part.format(**places) for part in launch.command if workers > 1 or part != "--multi_gpu"]
    command += ["-m", "monai.bundle", "run"]
    command += [f"--{name}={value}" for name, value in asked.items()]
    command += [part.format(**places) for part in launch.settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{engine or 'the plain run'} failed:\n{done.stdout}\n{done.stderr}")
    return seconds
