"""What stops a run, and what does not."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import rows_of, voxels
from helpers.handler import handler_of
from helpers.own_bundle import launch, settings
from helpers.scans import write_scans
from helpers.tolerances import assert_same_bits
from monai.data import MetaTensor, list_data_collate
from monai.engines import IterationEvents
from monai.transforms import Compose, Flipd

import monai_saliency as ms
from monai_saliency.distributed import RankEngine
from monai_saliency.engines.evaluator import CohortEvaluator
from monai_saliency.engines.run import run as run_cohort
from monai_saliency.engines.run import stoppable
from monai_saliency.errors import OutputError, root_cause
from monai_saliency.inferers.cohort_explainer import Assignment
from monai_saliency.storage.score_store import ScoreStore


def run(tmp_path: Path, **overrides: Any) -> None:
    monai.bundle.run(**settings(tmp_path, "out", **overrides))


class Batches:
    """An evaluator over two batches of three, and what comes of it."""

    NAMES = ("a", "b", "c", "d", "e", "f")

    def __init__(
        self,
        folder: Path,
        network: Callable[..., torch.Tensor],
        strict: bool = False,
        kept: dict[str, Any] | None = None,
        mask_batch_size: int = 16,
        **how: Any,
    ) -> None:
        self.maps: dict[str, torch.Tensor] = {}
        self.outputs: list[Any] = []
        target = ms.ClassScore([0], activation="none")
        inferer = ms.sliding_window(3, 3, target=target, mask_batch_size=mask_batch_size)
        self.handler = handler_of(folder, inferer, network, self._save, strict=strict, **kept or {})
        self.failures = self.handler.failures
        cases = [
            FLIP({"image": MetaTensor(torch.full((1, 6, 6), float(number))), "case": name})
            for number, name in enumerate(self.NAMES)
        ]
        batches = [list_data_collate(cases[:3]), list_data_collate(cases[3:])]
        self.evaluator = CohortEvaluator(
            torch.device("cpu"),
            batches,
            network,
            failures=self.failures,
            val_handlers=[self.handler],
            prepare_batch=lambda batch, *args, **kwargs: (batch["image"], None),
            epoch_length=2,
            **how,
        )
        self.evaluator.add_event_handler(
            IterationEvents.MODEL_COMPLETED, lambda engine: self.outputs.append(engine.state.output)
        )

    def _save(self, case: dict[str, Any]) -> dict[str, Any]:
        assert case["case"] not in self.maps
        self.maps[case["case"]] = case["saliency"]
        assert len(case["image"].applied_operations) == 1
        return case

    def rows(self) -> list[tuple[str, str, str]]:
        return [(row["case"], row["stage"], row["error"]) for row in self.failures.read()]


FLIP = Flipd("image", 0)


def brightness(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1)[:, :1] + x.flatten(1).mean(1, keepdim=True)


@pytest.mark.parametrize("stage", ["predict", "explain"])
def test_a_bad_case_does_not_take_its_batch_with_it(stage: str, tmp_path: Path) -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        if (x == 1).any() and (len(x) > 3) == (stage == "explain"):  # batches of three, or of perturbed images
            raise RuntimeError("out of\npaper")
        return brightness(x)

    whole = Batches(tmp_path / "whole", brightness)
    whole.evaluator.run()
    spoilt = Batches(tmp_path / "spoilt", network)
    spoilt.evaluator.run()
    assert spoilt.rows() == [("b", stage, "RuntimeError: out of paper")]
    assert sorted(whole.maps) == list(Batches.NAMES)
    assert sorted(spoilt.maps) == ["a", "c", "d", "e", "f"]
    for name, saliency in spoilt.maps.items():
        assert_same_bits(saliency, whole.maps[name])
    # What metrics and writers see after an iteration.
    assert [len(output) for output in spoilt.outputs] == ([1, 1, 3] if stage == "predict" else [3, 3])


def test_a_case_whose_prediction_cannot_be_postprocessed_is_listed_and_has_no_map(tmp_path: Path) -> None:
    def postprocessing(case: dict[str, Any]) -> dict[str, Any]:
        if bool((torch.as_tensor(case["image"]) == 4).any()):
            raise ValueError("no\nink")
        return case

    batches = Batches(tmp_path, brightness, postprocessing=Compose([postprocessing, FLIP.inverse]))
    batches.evaluator.run()
    assert batches.rows() == [("e", "predict", "ValueError: no ink")]
    assert sorted(batches.maps) == ["a", "b", "c", "d", "f"]


@pytest.mark.parametrize(("split", "written"), [("cases", [3, 3]), ("masks", [2, 6])])
def test_processes_share_a_cohort_without_a_config(split: str, written: list[int], tmp_path: Path, capsys: Any) -> None:
    """From Python: only engines that make the cohort anew in other processes need more than this."""
    plain = Batches(tmp_path / "plain", brightness)
    plain.evaluator.run()
    maps: dict[str, torch.Tensor] = {}
    for number, count in enumerate(written):
        kept = {"store": ScoreStore(tmp_path / "shared" / "scores"), "network_id": "brightness"}
        share = Batches(tmp_path / "shared", brightness, kept=kept, mask_batch_size=1)
        engine = RankEngine(number, 2, split)
        run_cohort(share.evaluator, share.handler, engine=engine)
        assert len(share.maps) == count
        assert share.handler.explainer.assignment == Assignment()
        maps |= share.maps
    assert maps.keys() == plain.maps.keys()
    assert all(torch.equal(saliency, plain.maps[name]) for name, saliency in maps.items())
    # Of each batch the first process scored all masks of one case, and half of those of another.
    assert ("4 cases without a map yet, the first is b: " in capsys.readouterr().out) == (split == "masks")


def test_a_full_disk_stops_the_run_and_spoils_nothing(cohort: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = nib.save, []

    def full(image: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(image, path)

    monkeypatch.setattr(nib, "save", full)
    with pytest.raises(RuntimeError) as caught:
        run(cohort)
    cause = root_cause(caught.value)
    assert isinstance(cause, OutputError)
    assert "s1_saliency.nii.gz: No space left on device. What was written before is whole" in str(cause)
    saved = {path.name: nib.load(path) for path in (cohort / "out").glob("*saliency*")}
    # Files are written beside the run: the third case's may be on its way when the second's fails.
    assert {"s0_saliency.nii.gz"} <= saved.keys() <= {"s0_saliency.nii.gz", "s2_saliency.nii.gz"}
    assert all(np.isfinite(saliency.get_fdata()).all() for saliency in saved.values())
    assert not list((cohort / "out").rglob(".tmp*"))
    assert not (cohort / "out" / "failures.csv").exists()
    monkeypatch.undo()
    run(cohort)
    assert len(list((cohort / "out").glob("*saliency*"))) == 3


def test_an_output_folder_that_cannot_be_made(cohort: Path) -> None:
    (cohort / "file").write_text("in the way")
    with pytest.raises(RuntimeError) as caught, pytest.warns(UserWarning, match="cache"):
        run(cohort, output_dir=str(cohort / "file" / "out"))
    assert isinstance(root_cause(caught.value), OutputError)
    assert "cannot write" in str(root_cause(caught.value))


# How each case of a cohort ends: with a map and its row, or in the list of failures, and never in both or neither.
def found(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The cases that have a map, a row, and a failure."""
    maps = [path.relative_to(folder).as_posix().removesuffix("_saliency.nii.gz") for path in folder.rglob("*.nii.gz")]
    rows = rows_of(folder / "summary.csv") if (folder / "summary.csv").exists() else []
    failures = rows_of(folder / "failures.csv") if (folder / "failures.csv").exists() else []
    return sorted(maps), [row["case"] for row in rows], [row["case"] for row in failures]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_map_of_a_scan_that_fails_now_goes(strict: bool, cohort: Path) -> None:
    """An earlier run has made it of another scan, and nobody could tell it from a result."""
    run(cohort, picture=True)
    assert found(cohort / "out") == (["s0", "s1", "s2"], ["s0", "s1", "s2"], [])
    (cohort / "cohort" / "s1.nii.gz").write_bytes(b"no scan")
    with pytest.raises((SystemExit, RuntimeError)):
        run(cohort, picture=True, strict=strict)
    assert found(cohort / "out") == (["s0", "s2"], ["s0", "s2"], [] if strict else ["s1"])
    assert not (cohort / "out" / "s1_saliency.png").exists()


# Ctrl-C and SIGTERM in the middle of a run.
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
@pytest.mark.slow
@pytest.mark.parametrize(("moment", "workers", "sign"), STOPS)
def test_a_stopped_run_leaves_nothing_and_goes_on(moment: str, workers: str, sign: str, tmp_path: Path) -> None:
    cohort = write_scans(tmp_path, NUM_SCANS)
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
