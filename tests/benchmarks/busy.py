"""How busy a whole run keeps its network: the bundle explains a cohort with a warm cache, maps and pictures written.

    python tests/benchmarks/busy.py [--cases 4] [--num_masks 200] [--network densenet]

The share that is printed is the run's own: of the time from the start of its first forward to the end of its last, how
much was forwards. Loading, checking for stored scores, perturbing, reading scores, storing them, making maps, taking
them back to the scans' grids, compressing and drawing are the rest, as far as they are not done meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scans import write_scans

ROOT = Path(__file__).parents[2]
NETWORKS = {
    "demo": {},
    "densenet": {
        "network_def": {"_target_": "DenseNet121", "spatial_dims": 3, "in_channels": 1, "out_channels": 2},
        "checkpoint": "",
        "pixdim": [2.5, 2.5, 2.5],
        "spatial_size": [64, 64, 64],
        "mask_batch_size": 8,
    },
}


def run(**settings: object) -> str:
    """Run the bundle in a process of its own; the line about its network."""
    command = [sys.executable, "-m", "monai.bundle", "run", "--bundle_root", str(ROOT / "bundle")]
    command += ["--config_file", str(ROOT / "bundle" / "configs" / "inference.yaml")]
    for name, value in settings.items():
        command += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("network busy"))


def main() -> None:
    """Fill the cache with two masks a case, then print what the run with all masks says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--num_masks", type=int, default=200)
    parser.add_argument("--shape", type=int, nargs=3, default=[160, 160, 128], help="of a scan, in voxels")
    parser.add_argument("--network", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--profile", default="", help="a folder for traces")
    args = parser.parse_args()
    for name in args.network:
        with tempfile.TemporaryDirectory() as folder:
            write_scans(Path(folder) / "scans", args.cases, tuple(args.shape))
            settings = {"dataset_dir": f"{folder}/scans", "output_dir": f"{folder}/maps", "method": "rise"}
            settings |= NETWORKS[name]
            run(num_masks=2, picture=False, **settings)
            profile = str(Path(args.profile) / name) if args.profile else ""
            found = run(num_masks=args.num_masks, profile=profile, **settings)
        print(f"{name}, {args.cases} cases of {args.num_masks} masks: {found}", flush=True)


if __name__ == "__main__":
    main()
