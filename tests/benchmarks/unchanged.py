"""Does this checkout make the same maps and tables as another revision, to the byte?

    python tests/benchmarks/unchanged.py BEFORE_REV [--only demo,overlay,engines] [--before-dir DIR] [--ignore error]

Runs the demo cohort, every bundle of ``tests/bundles`` with the overlay, and every engine with two workers; first with
the code of BEFORE_REV (in a temporary git worktree), then with the code of the checkout that this file lies in,
uncommitted changes included. It prints a line a run, and ends with status 1 on any difference.

With ``--before-dir`` the first side's files are kept in that folder, and used again by the next call. Everything runs
on the CPU, each process with one thread. ``unchanged_runs.py`` has the runs.

What is compared, file by file:

- unpacked ``*.nii.gz``: header, affine and voxels;
- pictures and all other files, byte by byte;
- stored scores: the arrays of each case, whatever the folder is called that they lie in, since its name is a hash;
- ``*.csv``: all columns but ``seconds``, and ``forwards`` where several processes share the masks of a case at once:
  whoever makes the map enters its own count there, and that is whoever comes last.

``--ignore`` names further columns, such as ``error`` of ``failures.csv`` where error texts were reworded on purpose.
Left out are caches, locks, and the entry ``reference`` of the demo cohort's ``dataset.json``, which names a module.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path(__file__).with_name("unchanged_runs.py")

# Config ids by the name that `unchanged_runs.py` uses, with the names that they have in other revisions.
RENAMES: dict[str, Sequence[str]] = {
    "saliency_image_key": ["saliency_key"],
}

LAUNCHERS: dict[str, Sequence[str]] = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    # --multi_gpu without a GPU too: otherwise Accelerate starts one process on the CPU.
    "accelerate": [
        *["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"],
        *["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"],
    ],
}
# The parts of each group, in their order: each part is one command.
GROUPS: dict[str, Sequence[str]] = {
    "demo": ["demo"],
    "overlay": ["overlay"],
    "engines": ["single", "torchrun-0", "torchrun-1", "torchrun-2", "accelerate", "lightning"],
}
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}
MINUTES = 30  # for one part, on a busy machine
# In runs whose `forwards` depend on which process comes last.
RACE = re.compile("(torchrun|accelerate|lightning|ray)-masks")
SHOWN = 5  # lines of differences in a run


@dataclass(frozen=True)
class Side:
    """One side's runs.

    Attributes:
        commit: the revision; "" for the checkout as it is.
        code: the checkout that made them.
        out: the folder they were written to. Errors and lists in the files name both.
    """

    commit: str
    code: str
    out: str


def make(side: Side, group: str) -> None:
    """Make the runs of a group, and a record that they are complete.

    Raises:
        SystemExit: when a command fails.
    """
    out = Path(side.out)
    inputs = out / "inputs" / group
    for folder in (out / group, inputs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for part in GROUPS[group]:
        launcher = LAUNCHERS.get(part.split("-")[0], [])
        command = [sys.executable, *launcher, str(RUNS), part, "--renames", json.dumps(RENAMES)]
        command += ["--code", side.code, "--out", side.out, "--inputs", str(inputs)]
        _call(command, out / f"{part}.log", ENVIRONMENT | {"PYTHONPATH": side.code})
    (out / f"{group}.json").write_text(json.dumps(asdict(side)))


def _call(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Run a command, and end all that it started when it takes too long."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | environment, start_new_session=True
        )
        try:
            status = process.wait(60 * MINUTES)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if status:
        end = log.read_text(errors="replace")[-4000:]
        sys.exit(f"{end}\nerror: {' '.join(command)} ended with status {status}, see {log}")


def made(out: Path, group: str) -> Side | None:
    """Who made a group's runs below a folder; None where they are not complete."""
    record = out / f"{group}.json"
    return Side(**json.loads(record.read_text())) if record.exists() else None


def contents(folder: Path, side: Side, ignored: Collection[str] = ()) -> dict[str, bytes]:
    """What is compared of a run's folder, by the file's path below it. Tables are JSON lists of rows.

    Args:
        folder: the run's.
        side: who made it.
        ignored: columns of tables to leave out, beside those that differ from run to run.
    """
    # Marks stand for all attributes of what made a row, and so for the code.
    ignored = {"seconds", "settings", *ignored, *(["forwards"] if RACE.match(folder.name) else [])}
    found = {}
    scores: dict[Path, dict[str, dict[str, bytes]]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.name.endswith(".settings.json"):
            continue
        if not path.is_file() or any(part.startswith((".", "lock")) or part == "cache" for part in name.parts):
            continue
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if "scores" in name.parts:  # scores/CASE/KEY/RANGE.npy
            scores.setdefault(name.parent.parent, {}).setdefault(name.parent.name, {})[name.name] = content
        elif path.suffix in (".csv", ".json", ".txt"):
            found[str(name)] = _text(path.name, content, side, ignored)
        else:
            found[str(name)] = content
    for case, keys in scores.items():
        # Keys are hashes: their folders are numbered in the order of what they hold.
        for number, arrays in enumerate(sorted(keys.values(), key=lambda arrays: sorted(arrays.items()))):
            found |= {str(case / f"key{number}" / name): content for name, content in arrays.items()}
    return found


def _text(name: str, content: bytes, side: Side, ignored: Collection[str]) -> bytes:
    for place, word in ((side.out, b"<out>"), (side.code, b"<code>")):
        content = content.replace(os.fsencode(place), word)
    if name.endswith(".csv"):
        rows = list(csv.reader(io.StringIO(content.decode(errors="surrogateescape"), newline="")))
        left_out = [i for i, column in enumerate(rows[0]) if column in ignored]
        # Left empty, so that the columns stay what they are.
        return json.dumps(
            [rows[0], *(["" if i in left_out else x for i, x in enumerate(row)] for row in rows[1:])]
        ).encode()
    if name == "dataset.json":
        return json.dumps(json.loads(content) | {"reference": ""}).encode()
    return content


def differences(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """A line for each file that is not the same on both sides."""
    lines = [f"{name}: only before" for name in sorted(before.keys() - after.keys())]
    lines += [f"{name}: only after" for name in sorted(after.keys() - before.keys())]
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            lines.append(f"{name}: {_explain(name, before[name], after[name])}")
    return lines


def _explain(name: str, before: bytes, after: bytes) -> str:
    """How two versions of a file differ."""
    if name.endswith(".csv"):
        (columns, *ours), (others, *theirs) = json.loads(before), json.loads(after)
        if columns != others or len(ours) != len(theirs):
            return f"columns {columns}, {len(ours)} rows; then {others}, {len(theirs)} rows"
        pairs = [
            (column, x, y)
            for a, b in zip(ours, theirs, strict=True)
            for column, x, y in zip(columns, a, b, strict=True)
            if x != y
        ]
        column, x, y = pairs[0]
        return f"{len(pairs)} cells, the first in column {column}: {x!r}, then {y!r}"
    if name.endswith((".nii.gz", ".npy")):
        ours, theirs = _voxels(name, before), _voxels(name, after)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{ours.dtype} {ours.shape}, then {theirs.dtype} {theirs.shape}"
        if ours.tobytes() == theirs.tobytes():
            return "the same values, another header"
        apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        return f"{np.count_nonzero(apart)} of {apart.size} values, by up to {apart.max():.3g}"
    return f"{len(before)} bytes, then {len(after)}"


def _voxels(name: str, content: bytes) -> np.ndarray:
    if name.endswith(".npy"):
        return np.load(io.BytesIO(content), allow_pickle=False)
    return np.asanyarray(nib.Nifti1Image.from_bytes(content).dataobj)


def compare(group: str, folders: Sequence[Path], ignored: Collection[str] = ()) -> tuple[int, int]:
    """Compare the runs of a group, and print a line for each.

    Args:
        group: its name.
        folders: where each side's files lie now.
        ignored: columns of tables to leave out.

    Returns:
        how many files were compared, and how many differ.
    """
    sides = [made(folder, group) for folder in folders]
    names = sorted({path.name for folder in folders for path in (folder / group).iterdir()})
    compared = different = 0
    for name in names:
        before, after = (
            contents(folder / group / name, side, ignored) for folder, side in zip(folders, sides, strict=True) if side
        )
        lines = differences(before, after)
        count = len(before.keys() | after.keys())
        print(f"{group}/{name}: {count} files, {len(lines)} differ")
        for line in lines[:SHOWN]:
            print(f"    {line}")
        if len(lines) > SHOWN:
            print(f"    and {len(lines) - SHOWN} more")
        compared, different = compared + count, different + len(lines)
    return compared, different


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[str]:
    """A git worktree of a revision, removed afterwards."""
    _git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield str(folder)
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    """Compare two revisions, and end with status 1 where any file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE_REV", help="a git revision")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of runs, with commas between them")
    parser.add_argument("--before-dir", type=Path, help="keeps the files of BEFORE_REV for further calls")
    parser.add_argument("--ignore", default="", help="columns of tables to leave out, with commas between them")
    args = parser.parse_args()
    groups = args.only.split(",")
    if unknown := set(groups) - GROUPS.keys():
        parser.error(f"--only must be some of {','.join(GROUPS)}, got {','.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    commit = _git("rev-parse", "--verify", f"{args.before}^{{commit}}")
    work = Path(tempfile.mkdtemp(prefix="unchanged-")).resolve()
    folders = ((args.before_dir or work / "before").resolve(), work / "after")
    found = {group: made(folders[0], group) for group in groups}
    for group, side in found.items():
        if side and side.commit != commit:
            parser.error(f"{folders[0]} has the {group} runs of {side.commit}, not of {commit}: give another folder")

    with ExitStack() as stack:
        code = ""
        if not all(found.values()):
            code = stack.enter_context(checkout(commit, work / "code"))
        compared = different = 0
        for group in groups:
            start = time.perf_counter()
            if not found[group]:
                make(Side(commit, code, str(folders[0])), group)
            middle = time.perf_counter()
            make(Side("", str(ROOT), str(folders[1])), group)
            print(f"{group}: {middle - start:.0f} s before, {time.perf_counter() - middle:.0f} s after", flush=True)
            count, unequal = compare(group, folders, args.ignore.split(","))
            compared, different = compared + count, different + unequal
    if different:
        print(f"{different} of {compared} files differ from {args.before}: see {folders[0]} and {folders[1]}")
        sys.exit(1)
    shutil.rmtree(work)
    print(f"all {compared} files are those of {args.before}, to the byte")


if __name__ == "__main__":
    main()
