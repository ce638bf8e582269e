"""Are the maps of every engine those of the plain run? On the demo's scans, with the demo's network.

    python tests/benchmarks/agreement.py [--only torchrun ray] [--workers 1 2 3] [--num_masks 150]

Five scans, and one, shared by cases and by masks between 1, 2 and 3 workers, so that the shares are uneven. Differences
are relative to the largest absolute value of a map. SLURM is among them where one runs (``.ci/slurm``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monai_saliency.bundle.configs import overlay_path
from monai_saliency.data.demo import make_cohort
from monai_saliency.metrics.agreement import compare

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


def run(engine: str, workers: int, split: str, settings: Mapping[str, object]) -> None:
    """Run the bundle by an engine, or plainly by "", with ids of its config; one thread a worker."""
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine or 'the plain run'} failed:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    """Print a row for each run, and end with status 1 where maps differ by more than 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=available(), choices=list(ENGINES), help="these engines")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num_masks", type=int, default=150)
    args = parser.parse_args()
    differ = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, object] = {"method": "rise", "num_masks": args.num_masks, "mask_batch_size": 8}
        settings |= {"picture": "false", "cache_dir": folder / "cache"}
        print("| engine | scans | workers | shared by | maps | largest difference | bytes equal |\n|---|" + "---|" * 6)
        for count in (5, 1):
            data, plain = folder / f"scans{count}", folder / f"plain{count}"
            make_cohort(data, count)
            run("", 1, "", settings | {"dataset_dir": data, "output_dir": plain})
            for engine in args.only:
                for split in ENGINES[engine].splits:
                    for workers in args.workers:
                        out = folder / f"{engine}-{count}-{split}-{workers}"
                        run(engine, workers, split, settings | {"dataset_dir": data, "output_dir": out})
                        found = compare(plain, out)
                        equal = all(case.same_voxels and case.same_affine for case in found.both)
                        differ |= not found.agrees(1e-6)
                        cells = [engine, count, workers, split, len(found.both), found.worst.difference, equal]
                        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    sys.exit(int(differ))


if __name__ == "__main__":
    main()
