"""Runs submitted from Python: the command, its folder, and maps with the bytes of the plain run's."""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.own_bundle import forwards, launch, settings
from helpers.paths import BUNDLE, TESTS
from helpers.scans import LPS, write_scan

from monai_saliency.bundle import submit
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.submit import submit_sweep
from monai_saliency.metrics.agreement import compare

pytest.importorskip("submitit", reason="needs submitit")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that would be run, with their environments."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(submit, "_run", lambda command, environment: found.append((command, environment)) or 0)
    return found


def flags(command: list[str]) -> dict[str, str]:
    """What the bundle is given, by its ids."""
    assert command[1:4] == ["-m", "monai.bundle", "run"]
    words, found = command[5:], {"run": command[4]}
    while words:
        name, equals, value = words.pop(0).removeprefix("--").partition("=")
        found[name] = value if equals else words.pop(0)
    return found


def test_what_is_run(tmp_path: Path, started: list[tuple[list[str], dict[str, str]]]) -> None:
    """Two settings, each shared by three jobs."""
    sweep = tmp_path / "sweep"
    jobs = submit_sweep(
        [{"method": "rise", "num_masks": n} for n in (20, 40)],
        BUNDLE,
        sweep,
        common={"dataset_dir": "/data/my scans", "classes": [0, 1]},
        shards=3,
        split="masks",
        cluster="debug",
        cpus_per_task=2,
    )
    assert list(jobs) == [sweep / "method=rise,num_masks=20", sweep / "method=rise,num_masks=40"]
    assert [job.result() for job in jobs[sweep / "method=rise,num_masks=40"]] == [str(list(jobs)[1])] * 3
    for shard, (command, environment) in enumerate(started):
        found = flags(command)
        assert ast.literal_eval(found.pop("config_file")) == [
            str(BUNDLE / "configs" / "inference.yaml"),
            str(overlay_path("slurm")),
        ]
        assert ast.literal_eval(found.pop("saliency_engine")) == {
            "_target_": "monai_saliency.distributed.RankEngine",
            "rank": shard,
            "world_size": 3,
            "split": "@saliency_split",
        }
        assert found == {
            "run": "run",
            "bundle_root": str(BUNDLE),
            "method": "rise",
            "num_masks": "40",
            "dataset_dir": "/data/my scans",
            "classes": "[0, 1]",
            "output_dir": str(sweep / "method=rise,num_masks=40"),
            "saliency_split": "masks",
            "cache_dir": str(sweep / "cache"),
        }
        assert environment["OMP_NUM_THREADS"] == "2"


def test_another_bundle(tmp_path: Path, started: list[tuple[list[str], dict[str, str]]]) -> None:
    config = tmp_path / "inference.json"
    config.write_text("{}")
    ((output, (job,)),) = submit_sweep(
        [{"saliency_method": "rise"}], tmp_path, config_file=config, run_id="explain", cluster="debug"
    ).items()
    assert output == tmp_path / "sweep" / "method=rise"
    job.result()
    found = flags(started[0][0])
    assert found.pop("saliency_engine")
    assert ast.literal_eval(found.pop("config_file")) == [
        str(config),
        str(overlay_path("explain")),
        str(overlay_path("slurm")),
    ]
    assert found == {
        "run": "explain",
        "bundle_root": str(tmp_path),
        "saliency_method": "rise",
        "saliency_dir": str(output),
        "saliency_split": "auto",
    }


def test_several_processes_a_job(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 of the 2 of job 2 of 3 is number 5 of 6."""
    for name, value in {"EXECUTOR": "local", "LOCAL_JOB_ID": "1", "LOCAL_NTASKS": "2", "LOCAL_GLOBALID": "1"}.items():
        monkeypatch.setenv(f"SUBMITIT_{name}", value)
    monkeypatch.setenv("SUBMITIT_LOCAL_LOCALID", "1")
    submit._Run(["python"], "out", "local", shard=2, shards=3, threads=None, lmdb=False)()
    ((command, environment),) = started
    engine = ast.literal_eval(command[-1].removeprefix("--saliency_engine="))
    assert (engine["rank"], engine["world_size"]) == (5, 6)
    assert environment["LOCAL_RANK"] == "1"


def test_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_run", lambda command, environment: 1)
    ((_, (job,)),) = submit_sweep([{"seed": 1}], BUNDLE, tmp_path, cluster="debug").items()
    with pytest.raises(RuntimeError, match="seed=1 ended with status 1: its log says why"):
        job.submission().function()


def test_slurm_finds_the_task_and_ends_what_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On SLURM the overlay knows which part is its own, and a job that SLURM stops waits for what comes of it."""
    seen: list[Any] = []
    monkeypatch.setattr(submit, "_run", lambda command, environment: seen.append((command, environment)) or 143)
    monkeypatch.setattr(time, "sleep", seen.append)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    run = submit._Run(["python"], "out", "slurm", shard=1, shards=3, threads=None, lmdb=False)
    with pytest.raises(RuntimeError, match="out ended with status 143"):
        run()
    (command, environment), seconds = seen
    assert command == ["python"]
    assert environment["OMP_NUM_THREADS"] == "4"
    assert seconds == 600
    assert run.checkpoint().function is run


def test_a_process_ends_when_its_job_does(tmp_path: Path) -> None:
    """The signal for submitit is not for it; what ends the job ends it by SIGTERM, and waits for it."""
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "def end(*_):\n"
        f"    time.sleep(0.5); Path({str(tmp_path / 'ended')!r}).write_text(''); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "os.kill(os.getppid(), signal.SIGALRM)\n"
        "time.sleep(60)\n"
    )

    def stop(*_: Any) -> None:
        raise SystemExit(144)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(SystemExit):
            submit._run([sys.executable, "-c", script], dict(os.environ))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "ended").exists()


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`settings` must hold the settings of at least one run: \[\{\}\]"):
        submit_sweep([], BUNDLE, tmp_path, cluster="debug")
    with pytest.raises(ValueError, match="`settings` has seed=1 twice"):
        submit_sweep([{"seed": 1}, {"seed": 1}], BUNDLE, tmp_path, cluster="debug")
    with pytest.raises(ValueError, match="output_dir cannot be set twice: see `sweep_dir`"):
        submit_sweep([{"output_dir": "x"}], BUNDLE, tmp_path, cluster="debug")
    with pytest.raises(ValueError, match="seed cannot be set twice"):
        submit_sweep([{"seed": 1}], BUNDLE, tmp_path, common={"seed": 2}, cluster="debug")
    with pytest.raises(ValueError, match="`shards` must be a whole number of at least 1"):
        submit_sweep([{}], BUNDLE, tmp_path, shards=0, cluster="debug")
    with pytest.raises(FileNotFoundError, match=r"there is no config file .*: set `bundle_root` or `config_file`"):
        submit_sweep([{}], tmp_path, cluster="debug")


# ----------------------------------------------------------------------------------------------------------------------


def cohort(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tiny cohort, and what all runs of it have in common."""
    for seed in range(count):
        write_scan(tmp_path / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    own = {"bundle_root", "config_file", "output_dir", "method", "num_masks"}
    return {name: value for name, value in settings(tmp_path, "shared").items() if name not in own}


def check(plain: Path, found: Path, count: int) -> None:
    comparison = compare(plain, found)
    assert comparison.agrees()
    assert [case.same_voxels for case in comparison.both] == [True] * count


@pytest.mark.slow
def test_two_jobs_on_this_machine_share_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case between two: each does half of its masks, and whoever is later makes the map."""
    common = cohort(tmp_path, 1, monkeypatch)
    ((output, jobs),) = submit_sweep(
        [{"method": "rise", "num_masks": 30}],
        BUNDLE,
        tmp_path / "sweep",
        common=common,
        shards=2,
        cluster="local",
        cpus_per_task=1,
        timeout_min=5,
    ).items()
    assert launch(tmp_path, "plain", 0).wait() == 0
    assert [job.result() for job in jobs] == [str(output)] * 2
    check(tmp_path / "plain", output, 1)
    # The batch with the unperturbed image is run by both.
    assert forwards(tmp_path, "shared") == forwards(tmp_path, "plain") + 1
    assert (tmp_path / "sweep" / "submitit").is_dir()
    assert not list(output.rglob("*.pkl"))
