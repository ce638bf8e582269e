"""Ctrl-C and SIGTERM in the middle of a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import monai.bundle
import pytest
from helpers.files import voxels
from helpers.own_bundle import launch, settings
from helpers.scans import write_scans

from monai_saliency.engines.evaluator import stoppable

NUM_SCANS = 4


WORKERS = {"no workers": {"num_workers": 0}, "threads": {"num_workers": 2}}
WORKERS["processes"] = {"num_workers": 2, "processes": True}


@pytest.fixture(autouse=True)
def _nobodys_handlers() -> Iterator[None]:
    """Signals as Python starts with them: Ray, for one, leaves a handler of its own in the process of other tests."""
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    return write_scans(tmp_path, NUM_SCANS)


def slowed(cohort: Path, moment: str, seconds: float) -> dict[str, object]:
    """Settings of a run that takes ``seconds`` more for each scan while ``loading`` or ``saving`` it."""
    moments = {
        name: {
            "_target_": "helpers.moments.Moment",
            "path": str(cohort / "moment"),
            "seconds": seconds * (name == moment),
        }
        for name in ("loading", "saving")
    }
    loading = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        moments["loading"],
        {"_target_": "ResizeWithPadOrCropd", "keys": "image", "spatial_size": [12, 12, 12]},
    ]
    invert = {"_target_": "Invertd", "keys": "saliency", "transform": "@preprocessing", "orig_keys": "image"}
    save = {"_target_": "monai_saliency.transforms.SaveSaliencyd", "keys": "saliency", "output_dir": "@output_dir"}
    saving = [invert | {"nearest_interp": False}, save | {"picture": False}, moments["saving"]]
    return {"preprocessing::transforms": loading, "saliency_postprocessing::transforms": saving}


def alive(group: int) -> list[str]:
    """Processes of a group that are more than an entry in the table."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_group) == group and state != "Z":
            found.append(path.parent.name)
    return found


#: each moment, loader of scans and signal at least once; the first as a user's Ctrl-C in a terminal, which all
#: processes of the run get
STOPS = [("forward", "processes", "SIGINT to all"), ("saving", "threads", "SIGTERM"), ("loading", "threads", "SIGINT")]
STOPS += [("loading", "no workers", "SIGTERM to all"), ("forward", "no workers", "SIGTERM")]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
@pytest.mark.parametrize(
    ("moment", "workers", "sign"), [STOPS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in STOPS[1:])]
)
def test_a_stopped_run_leaves_nothing_and_goes_on(moment: str, workers: str, sign: str, cohort: Path) -> None:
    number = signal.SIGTERM if "SIGTERM" in sign else signal.SIGINT
    process = launch(
        cohort,
        "out",
        0.1 if moment == "forward" else 0.0,
        **slowed(cohort, moment, 0.3),
        **WORKERS[workers],  # type: ignore[arg-type]
    )
    sign_of_life = cohort / ("out.log" if moment == "forward" else "moment")
    while not sign_of_life.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    time.sleep(0.15)
    start = time.monotonic()
    os.killpg(process.pid, number) if "to all" in sign else process.send_signal(number)
    errors = process.communicate(timeout=30)[1]
    # Promptly, on a busy machine too. Where worker processes are ended by the signal as well, PyTorch looks only every
    # 5 s whether they live.
    poll = 5 if (workers, sign) == ("processes", "SIGTERM to all") else 0
    assert time.monotonic() - start < 10 + poll
    # A shell stops its loop over runs for one that died of Ctrl-C, not for one that ended with 130.
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 143), errors
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"stopped by {name}. What was written is whole; run the same command again"), errors
    assert "Traceback" not in errors
    assert not alive(process.pid)
    assert not list(cohort.rglob(".tmp*"))
    assert not (cohort / "out" / "failures.csv").exists()
    before = voxels(cohort / "out")
    assert len(before) < NUM_SCANS

    for out in ("out", "whole"):
        monai.bundle.run(**settings(cohort, out, **slowed(cohort, moment, 0.0)))
    whole = voxels(cohort / "whole")
    assert len(whole) == NUM_SCANS
    assert voxels(cohort / "out") == whole
    assert before.items() <= whole.items()


def test_a_second_term_does_not_disturb_the_end(capsys: pytest.CaptureFixture) -> None:
    def end() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught, stoppable():
        end()
    assert caught.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("stopped by SIGTERM. What was written is whole")
