"""Are the maps of every engine those of the plain run? On the demo's scans, with the demo's network.

    python tests/benchmarks/agreement.py [--only torchrun ray] [--workers 1 2 3] [--num_masks 150]

Five scans, and one, shared by cases and by masks between 1, 2 and 3 workers, so that the shares are uneven. Differences
are relative to the largest absolute value of a map. SLURM is among them where one runs (``.ci/slurm``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from launches import ENGINES, available, run

from monai_saliency.data.demo import make_cohort
from monai_saliency.metrics.agreement import compare


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
