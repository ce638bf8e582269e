"""The job script on a real SLURM: whatever it shares out, kills and starts again, the maps are the plain run's."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
from helpers.files import cases, voxels
from helpers.marker import auto, check_auto, write_cohort
from helpers.own_bundle import BATCH, BATCHES, forwards, settings
from helpers.paths import BUNDLE, TESTS
from helpers.scans import write_scans

SCRIPT = BUNDLE / "slurm" / "explain.sbatch"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def ask(*command: str) -> str:
    """What one of SLURM's commands prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


# The script without SLURM; what it runs is tested in tests/bundle/test_command.py.
@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script as SLURM would, between commands that only note what they are given.

    Python prints ``COMMAND``, as ``monai_saliency command`` would, and ``srun`` ends with ``status``.
    """
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in {
        "python": f'printf \'%s\\0\' "$BUNDLE_ROOT" "$@" >\'{tmp_path}/python\'; echo "$PRINTED"; exit $FAILED',
        "srun": f"printf '%s\\0' \"$OMP_NUM_THREADS\" \"$@\" >'{tmp_path}/srun'; exit $STATUS",
        "scontrol": f'echo "$*" >>\'{tmp_path}/scontrol\'; echo "   Command=$COMMAND"; echo "   $PREEMPTED"',
        "sleep": "exit 0",
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)

    def run(*arguments: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node", "SLURMD_NODENAME": "node", "FAILED": "0"}
        job |= {"COMMAND": shlex.join([str(SCRIPT)]) + "".join(f" {each}" for each in arguments), "PREEMPTED": ""}
        job |= {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": "/home/user", "STATUS": str(status)}
        job |= {"PRINTED": "python -m monai.bundle run"}
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments], env=job | environment, capture_output=True, text=True, check=False
        )

    return run


def words(path: Path) -> list[str]:
    """What one of the commands was given."""
    return path.read_text().split("\0")[:-1]


def test_asks_for_the_command_and_runs_it(start: Callable, tmp_path: Path) -> None:
    """SLURM says where the script, and so the bundle, lies; words stay whole, whatever is in them."""
    printed = ["python", "-m", "monai.bundle", "run", "--classes=[1, 2]", "--dataset_dir=/data/it's $HOME"]
    done = start("--pixdim", "[1, 1, 1]", SLURM_CPUS_PER_TASK="3", PRINTED=shlex.join(printed))
    assert done.returncode == 0, done.stderr
    assert words(tmp_path / "python") == [str(BUNDLE), "-m", "monai_saliency", "command", "--", "--pixdim", "[1, 1, 1]"]
    assert words(tmp_path / "srun") == [*("3", "--export=ALL", "--cpus-per-task=3", "--kill-on-bad-exit=0"), *printed]
    assert done.stdout == f"job 12 on node, start 1: {shlex.join(printed)}\n"
    start(BUNDLE_ROOT="/elsewhere")
    assert words(tmp_path / "python")[0] == "/elsewhere"
    assert words(tmp_path / "srun")[0] == "1"


def test_says_what_is_missing(start: Callable, tmp_path: Path) -> None:
    done = start(FAILED="1")
    assert done.returncode == 2
    assert "python cannot run monai_saliency on node" in done.stderr
    done = start(FAILED="2")  # python has said why
    assert (done.returncode, done.stderr) == (2, "")
    assert not (tmp_path / "srun").exists()


@pytest.mark.parametrize("status", [0, 1, 143])
def test_ends_as_its_processes_do(start: Callable, status: int, tmp_path: Path) -> None:
    """Preempted and ended in time, it asks to go on later: by its own name, not by that of the array."""
    assert start(status=status, PREEMPTED="PreemptTime=None").returncode == status
    assert "requeue" not in (tmp_path / "scontrol").read_text()
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert start(status=status, PREEMPTED="PreemptTime=2031-05-04T03:02:01", **array).returncode == status
    assert ("requeue 12_3" in (tmp_path / "scontrol").read_text().splitlines()) == (status == 143)


# On a real SLURM.
class Slurm:
    """Submits, watches and kills jobs of the script, with a cohort below a folder as test_store makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[str] = []

    def submit(self, *options: str, script: Path = SCRIPT, **given: object) -> str:
        """Submit a job with these variables; its number."""
        environment = os.environ | {"PYTHON": sys.executable, "MPLCONFIGDIR": str(self.folder / "matplotlib")}
        environment |= {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        export = ",".join(["ALL", *(f"{name}={value}" for name, value in given.items())])
        command = ["sbatch", "--parsable", f"--chdir={self.folder}", f"--export={export}", *options, str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.jobs.append(done.stdout.strip().split(";")[0])
        return self.jobs[-1]

    def states(self, job: str) -> list[str]:
        """Of the job, or of each task of an array."""
        shown = ask("scontrol", "show", "job", "--oneliner", job).splitlines()
        return [found[1] for line in shown if (found := re.search(r" JobState=(\w+)", line))]

    def restarts(self, job: str) -> int:
        """How often SLURM started the job again, or is about to."""
        return int(ask("scontrol", "show", "job", "--oneliner", job).partition(" Restarts=")[2].split()[0])

    def until(self, condition: Callable[[], bool], job: str, seconds: float = 300) -> None:
        """Wait, and tell what a job said when that is in vain."""
        end = time.monotonic() + seconds
        while True:
            states = self.states(job)
            if condition():
                return
            assert time.monotonic() < end and not {*states} <= ENDED, f"{states}\n{self.said(job)}"  # noqa: PT018
            time.sleep(0.2)

    def wait(self, *jobs: str) -> None:
        """Until all have ended, and well."""
        for job in jobs:
            self.until(lambda job=job: {*self.states(job)} <= ENDED, job)  # type: ignore[misc]
            assert {*self.states(job)} == {"COMPLETED"}, self.said(job)

    def said(self, job: str) -> str:
        files = sorted([*self.folder.glob(f"slurm-{job}.out"), *self.folder.glob(f"slurm-{job}_*.out")])
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def cancel(self) -> None:
        """End all of them, and wait until they have."""
        if self.jobs:
            subprocess.run(["scancel", "--quiet", *self.jobs], check=False, timeout=60)
        for job in self.jobs:
            self.until(lambda job=job: {*self.states(job)} <= ENDED, job, 60)  # type: ignore[misc]


@pytest.fixture(scope="session")
def partitions() -> list[str]:
    """Of the SLURM that runs here."""
    if shutil.which("sinfo") is None:
        pytest.skip("SLURM is not installed: .ci/slurm does so and starts it, as root on Debian")
    try:
        found = ask("sinfo", "--noheader", "--responding", "--format=%R %a").split("\n")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()[-1]
        pytest.skip(f"no SLURM answers ({said}): .ci/slurm starts one, as root on Debian")
    up = [line.split()[0] for line in found if line.endswith(" up")]
    if not up:
        pytest.skip("SLURM has no node that works")
    return up


@pytest.fixture
def slurm(partitions: list[str], tmp_path: Path) -> Iterator[Slurm]:
    jobs = Slurm(tmp_path)
    yield jobs
    jobs.cancel()


@pytest.fixture
def cohort(tmp_path: Path) -> Callable[[int], Path]:
    """Makes a cohort of so many scans."""
    return lambda num_scans: write_scans(tmp_path, num_scans)


def job(
    cohort: Path, out: str, seconds: float = 0.0, *but: str, chosen: dict[str, Any] | None = None
) -> dict[str, object]:
    """The variables of a job with test_store's settings, in a config file behind the bundle's, but for some of them."""
    chosen = chosen or settings(cohort, out, seconds)
    root, config = chosen.pop("bundle_root"), chosen.pop("config_file")
    chosen = {name: value for name, value in chosen.items() if name not in ("output_dir", *but)}
    path = cohort / f"{out}.json"
    path.write_text(json.dumps(chosen))
    return {"BUNDLE_ROOT": root, "CONFIG_FILES": f"{config}:{path}"}


def plain(cohort: Path, out: str = "whole", **chosen: Any) -> dict[str, bytes]:
    """The maps of the plain run."""
    monai.bundle.run(**settings(cohort, out, **chosen))
    return voxels(cohort / out)


@pytest.mark.slow
def test_shared_cohort(slurm: Slurm, cohort: Callable[[int], Path]) -> None:
    """5 cases over 2 tasks of an array, each of 2 processes: each case once."""
    root = cohort(5)
    slurm.wait(slurm.submit("--array=0-1", "--ntasks=2", **job(root, "out"), OUTPUT_DIR=root / "out", FILL=0.0))
    assert voxels(root / "out") == plain(root, fill=0.0)
    assert cases(root / "out") == [f"s{i}" for i in range(5)]
    assert forwards(root, "out") == 5 * BATCHES
    # The predictions, and the three images alone by which each of one to four processes looks at the network.
    assert (root / "out.log").read_text().split().count("1") - 5 in {3, 6, 9, 12}


@pytest.mark.slow
@pytest.mark.timing
def test_stopped_and_resumed(slurm: Slurm, cohort: Callable[[int], Path], partitions: list[str]) -> None:
    """In the middle of a case, in one way after another (preempted where a partition `urgent` does so, as that of
    .ci/slurm): in the end the maps of a run that was left alone, and hardly any work lost.
    """
    ways = ["killed", "cancelled", "requeued", *(["preempted"] if "urgent" in partitions else [])]
    root, count = cohort(5), 5
    given = job(root, "out", 0.2) | {"OUTPUT_DIR": root / "out", "FILL": 0.0}
    number = slurm.submit("--ntasks=2", **given)
    for kill, way in enumerate(ways):
        before = forwards(root, "out")
        slurm.until(lambda before=before: forwards(root, "out") >= before + 5, number)  # type: ignore[misc]
        if way == "preempted":
            script = root / "urgent"
            script.write_text("#!/bin/bash\nsleep 1\n")
            slurm.wait(slurm.submit("--partition=urgent", "--exclusive", script=script))
        else:
            if way != "requeued":
                # A signal to the whole job would let it end on its own before.
                ask("scancel", *(["--signal=KILL", f"{number}.0"] if way == "killed" else [number]))
                slurm.until(lambda: {*slurm.states(number)} <= ENDED, number)
            ask("scontrol", "requeue", number)
        slurm.until(lambda kill=kill: slurm.restarts(number) == kill + 1, number)  # type: ignore[misc]
    slurm.wait(number)
    said = slurm.said(number)
    assert f"start {len(ways) + 1}: " in said
    assert said.count("was preempted, and goes on later") == ways.count("preempted")
    assert voxels(root / "out") == plain(root, fill=0.0)
    assert cases(root / "out") == [f"s{i}" for i in range(count)]
    # Two processes are stopped at once: each loses two batches, and its next visit has one that vouches for its scores.
    sizes = (root / "out.log").read_text().split()
    assert sizes.count(str(BATCH)) - count * BATCHES <= 2 * (2 + 1) * len(ways)


@pytest.mark.slow
def test_somebody_elses_bundle_in_an_array(slurm: Slurm, make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    bundle = make("spleen_ct_segmentation")
    bundle.explain(saliency_dir=str(tmp_path / "whole"), output_dir=str(tmp_path / "plain"), device="cpu")
    given = {"BUNDLE_ROOT": bundle.root, "CONFIG_FILES": bundle.config, "RUN_ID": "explain", "DEVICE": "cpu"}
    given |= {"METHOD": "rise", "NUM_MASKS": 12, "GRID_SIZE": 4, "DATASET_DIR": bundle.settings["dataset_dir"]}
    slurm.wait(slurm.submit("--array=0-1", **given, OUTPUT_DIR=tmp_path / "out"))
    assert len(voxels(tmp_path / "whole")) == 4  # two maps, each with its standard error
    assert voxels(tmp_path / "out") == voxels(tmp_path / "whole")


@pytest.mark.slow
def test_method_auto(slurm: Slurm, tmp_path: Path) -> None:
    """Two tasks of an array, each of two processes."""
    root = write_cohort(tmp_path)
    given = job(root, "out", chosen=auto(root, "out"))
    number = slurm.submit("--array=0-1", "--ntasks=2", **given, OUTPUT_DIR=root / "out")
    slurm.wait(number)
    check_auto(root, "out")
    assert slurm.said(number).count("The truth: ") == 1
