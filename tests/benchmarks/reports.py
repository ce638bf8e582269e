"""How large reports are, and how long they take: of finished runs, and of a cohort of 50 head CTs with failures.

    python tests/benchmarks/reports.py [FOLDER ...] [--cases 50] [--failures 3] [--shape 180 210 150]

Each FOLDER is the output folder of a run; its report is built anew, in that folder. The cohort is made: scans of one
shape with the noise of a CT, which packs badly, each with a map and a map of its standard error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.reports import blobs, head, write_case, write_failure

from monai_saliency.visualize.report import write_report
from monai_saliency.visualize.report.cases import read_cohort


def size(folder: Path) -> float:
    """Of all files below a folder, in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def build(name: str, folder: Path) -> str:
    """Build a folder's report from nothing; a line of the table."""
    shutil.rmtree(folder / "report", ignore_errors=True)
    start = time.perf_counter()
    report = write_report(folder).parent
    seconds = time.perf_counter() - start
    cases = read_cohort(folder).cases
    failed = len([case for case in cases if case.failure is not None])
    pages = [path.stat().st_size / 1e6 for path in (report / "cases").glob("*.html")]
    largest = max(pages, default=0)
    return f"| {name} | {len(cases)} | {failed} | {size(report):.1f} | {largest:.2f} | {seconds:.1f} |"


def make(folder: Path, cases: int, failures: int, shape: tuple[int, ...]) -> None:
    """A cohort as a run leaves it."""
    rng = np.random.default_rng(0)
    ball = head(shape, -1000, 900)
    for number in range(cases - failures):
        scan = np.rint(ball + rng.normal(0, 20, shape))
        place = rng.uniform(0.35, 0.65, 3)
        maps = blobs(shape, (place, 0.5), ((0.6, 0.4, 0.5), -0.3))[None]
        errors = (0.02 * blobs(shape, ((0.5, 0.5, 0.5), 1.0)) + 0.01)[None]
        write_case(folder, f"ct_{number:02}", scan, maps, np.diag([-1.0, -1, 1.2, 1]), errors=errors)
    for number in range(cases - failures, cases):
        write_failure(folder, f"ct_{number:02}", "the file is empty: copy it again, or remove it")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--failures", type=int, default=3)
    parser.add_argument("--shape", type=int, nargs=3, default=[180, 210, 150])
    args = parser.parse_args()
    print("| run | cases | failed | report, MB | largest page, MB | seconds |\n|---|---|---|---|---|---|")
    for folder in args.folders:
        print(build(folder.name, folder), flush=True)
    if args.cases:
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch), args.cases, args.failures, tuple(args.shape))
            print(build(f"made, {'x'.join(map(str, args.shape))}", Path(scratch)))


if __name__ == "__main__":
    main()
