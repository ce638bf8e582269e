"""A cohort shared between processes: the maps of the plain run, each made once."""

import copy
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
import torch
from helpers import commands
from helpers.files import contents, maps, rows_of
from helpers.layouts import Bundle
from helpers.marker import auto, check_auto, write_cohort
from helpers.own_bundle import (
    BATCHES,
    bundle_command,
    environment_of,
    forwards,
    rank,
    run_broken_cohort,
    settings,
)
from helpers.scans import LPS, write_scan, write_scans
from monai.data import DataLoader, Dataset, ThreadDataLoader
from torch.utils.data import DistributedSampler

from monai_saliency.bundle.configs import overlay_path
from monai_saliency.distributed import RankEngine, SlurmEngine, local_device
from monai_saliency.distributed.base import in_order, take


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five scans, and their maps in ``plain``; one scan in ``one``."""
    folder = tmp_path_factory.mktemp("engines")
    write_scans(folder, 5)
    write_scan(folder / "one" / "s0.nii.gz", (13, 12, 14), LPS, seed=0)
    monai.bundle.run(**settings(folder, "plain"))
    assert len(maps(folder / "plain")) == 5
    return folder


@pytest.mark.parametrize("split", ["cases", "masks"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_maps_whatever_is_shared(cohort: Path, world_size: int, split: str) -> None:
    """To the bit; the ranks one after the other, the last one first."""
    out = f"{split}{world_size}"
    for number in reversed(range(world_size)):
        monai.bundle.run(**settings(cohort, out, **rank(number, world_size, split)))
    assert maps(cohort / out) == maps(cohort / "plain")
    assert [row["case"] for row in rows_of(cohort / out / "summary.csv")] == [f"s{i}" for i in range(5)]
    assert not (cohort / out / "failures.csv").exists()
    # Of a part, the batch with the unperturbed image is what others do as well.
    repeated = 5 * (world_size - 1) if split == "masks" else 0
    assert forwards(cohort, out) == 5 * BATCHES + repeated


def test_the_plain_run_finishes_what_parts_have_left(cohort: Path) -> None:
    """As the gathering run where a task of an array is lost: only the lost task's batches are run, and one a case."""
    for number in (0, 2):
        monai.bundle.run(**settings(cohort, "left", **rank(number, 3, "masks")))
    assert not maps(cohort / "left")
    done = forwards(cohort, "left")
    monai.bundle.run(**settings(cohort, "left"))
    assert maps(cohort / "left") == maps(cohort / "plain")
    assert forwards(cohort, "left") - done == 5 * (BATCHES + 1) - (done - 5)


def test_parts_that_do_not_fit_are_no_success(cohort: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each process with weights of its own: their scores are never mixed, and no case ends without a word."""

    class Waits(RankEngine):
        waits = True

    for seed, kind in enumerate((RankEngine, Waits)):
        asked = settings(cohort, "random", dataset_dir=str(cohort / "one"), saliency_engine=kind(seed, 2, "masks"))
        asked["network_def"] |= {"seed": seed}  # type: ignore[operator]
        if kind is RankEngine:
            monai.bundle.run(**asked)
            assert "1 case without a map yet, the first is s0: whoever scores the last part" in capsys.readouterr().out
        else:
            with pytest.raises(SystemExit, match="1 case without a map yet, the first is s0: all processes are done"):
                monai.bundle.run(**asked)
    assert not maps(cohort / "random")


@pytest.mark.slow
def test_torchrun(cohort: Path, tmp_path: Path) -> None:
    """Two real processes, one of which has a broken scan: it still waits for the other, and each case ends once."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return commands.run([*start, *command], env=environment_of(tmp_path))

    run_broken_cohort(tmp_path, "torchrun", run)
    assert [row["case"] for row in rows_of(tmp_path / "out" / "failures.csv")] == ["s1"]
    plain = maps(cohort / "plain")
    assert maps(tmp_path / "out") == {name: plain[name] for name in plain if name[:2] in ("s0", "s2")}


@pytest.mark.slow
def test_method_auto_under_torchrun(tmp_path: Path) -> None:
    given = auto(write_cohort(tmp_path), "out")
    del given["device"]
    given["config_file"] = repr([given["config_file"], str(overlay_path("torchrun"))])
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = commands.run([*start, *bundle_command(given)], env=environment_of(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The truth: ") == 1
    assert done.stdout.count("method auto: ") == 2  # one process measures, and each prints what it takes
    check_auto(tmp_path, "out")


@pytest.mark.parametrize(
    ("layout", "split"),
    [("lung_nodule_ct_detection", "cases"), pytest.param("spleen_ct_segmentation", "masks", marks=pytest.mark.slow)],
)
def test_a_bundle_of_somebody_else(make: Callable[[str], Bundle], tmp_path: Path, layout: str, split: str) -> None:
    """Its maps are those of the plain overlay, and so are its own outputs of each case."""
    bundle = make(layout)
    bundle.explain(output_dir=str(tmp_path / "own"), saliency_dir=str(tmp_path / "plain"))
    for number in range(2):
        shared = {"output_dir": str(tmp_path / "own2"), "saliency_dir": str(tmp_path / "shared")}
        bundle.explain(**shared, **rank(number, 2, split))
    assert maps(tmp_path / "shared") == maps(tmp_path / "plain")
    assert len(maps(tmp_path / "shared")) == len(bundle.scans)
    own, own2 = (contents(tmp_path / name) for name in ("own", "own2"))
    # MONAI's table of all cases is left out. A handler of the bundle's own, which nobody knows, writes its share.
    assert own2.keys() == own.keys() - {"predictions.csv"}
    of_all = {"predictions.csv", "result_luna16_fold0.json"}
    assert all(own2[name] == own[name] for name in own.keys() - of_all)
    assert not (tmp_path / "shared" / "failures.csv").exists()


def test_metrics_of_a_bundle_are_left_out_and_that_is_said(make: Any, tmp_path: Path, caplog: Any) -> None:
    """Computing them would wait for the other processes, and a share's figures are not the cohort's."""
    bundle = make("spleen_ct_segmentation")
    metric = {"_target_": "monai.handlers.MeanDice", "output_transform": "$lambda output: 1 / 0"}
    metric = {"evaluator::key_val_metric": {"mean_dice": metric}}
    with pytest.raises(RuntimeError):
        bundle.explain(output_dir=str(tmp_path / "own"), saliency_dir=str(tmp_path / "plain"), **metric)
    bundle.explain(output_dir=str(tmp_path / "own"), saliency_dir=str(tmp_path / "shared"), **metric, **rank(0, 1))
    assert len(maps(tmp_path / "shared")) == len(bundle.scans)
    assert "left out, since each process sees a share of the cohort: MeanDice" in caplog.text


def variables(task: int = 0, tasks: int = 0, process: int = 0, processes: int = 0, **others: int) -> dict[str, str]:
    found: dict[str, int] = {}
    if tasks:
        found |= {"ARRAY_TASK_ID": task, "ARRAY_TASK_COUNT": tasks, "ARRAY_TASK_MIN": 0, "ARRAY_TASK_MAX": tasks - 1}
    if processes:
        found |= {"PROCID": process, "NTASKS": processes, "STEP_NUM_TASKS": processes, "STEP_ID": 0}
    return {f"SLURM_{name}": str(value) for name, value in (found | others).items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        (variables(2, 3), (2, 3)),
        (variables(process=1, processes=2), (1, 2)),
        (variables(1, 3, 1, 2), (3, 6)),
        (variables(9, 3, ARRAY_TASK_MIN=5, ARRAY_TASK_MAX=9, ARRAY_TASK_STEP=2), (2, 3)),
        # A batch script asked for 4 processes and is itself one.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 1)),
    ],
)
def test_share_of_a_slurm_job(
    environment: Mapping[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", environment)
    engine = SlurmEngine()
    assert (engine.rank, engine.world_size) == expected


def test_array_with_gaps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", variables(7, 3, ARRAY_TASK_MAX=7))
    with pytest.raises(ValueError, match="evenly spaced, as in --array=0-2: got 3 tasks from 0 to 7"):
        SlurmEngine()


def test_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_device() == torch.device("cpu") or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for variables, index in (({}, 0), ({"LOCAL_RANK": "1"}, 1), ({"SLURM_LOCALID": "3"}, 1)):
        for name in ("LOCAL_RANK", "SLURM_LOCALID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert local_device() == current[-1] == torch.device("cuda", index)


@pytest.mark.parametrize("kind", [DataLoader, ThreadDataLoader])
def test_batches_of_a_loader(kind: type[DataLoader]) -> None:
    loader = kind(Dataset([{"image": torch.tensor([float(i)])} for i in range(7)]), batch_size=2)
    whole = [batch["image"].flatten().tolist() for batch in loader]
    for indices in ([0, 2], [], [1, 2, 3]):
        taken = take(loader, indices)
        assert type(taken) is kind
        assert len(taken) == len(indices)
        for _ in range(2):
            assert [batch["image"].flatten().tolist() for batch in taken] == [whole[i] for i in indices]
        assert list(take(copy.copy(whole), indices)) == [whole[i] for i in indices]
    assert [batch["image"].flatten().tolist() for batch in loader] == whole


@pytest.mark.parametrize("kind", [DataLoader, ThreadDataLoader])
@pytest.mark.parametrize("sampler", ["shuffle", "distributed"])
def test_every_process_has_the_same_batches(kind: Any, sampler: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a loader made of them for itself: otherwise cases are lost, and others explained twice."""
    dataset = Dataset([{"image": torch.tensor([float(i)])} for i in range(7)])
    plain = kind(dataset, batch_size=2, num_workers=0)
    own = {"shuffle": True} if sampler == "shuffle" else {"sampler": DistributedSampler(dataset, 2, 1)}
    loader = kind(dataset, batch_size=2, num_workers=0, **own)
    taken = [take(in_order(loader), indices) for indices in ([0, 2], [1, 3])]
    found = [[batch["image"].flatten().tolist() for batch in each] for each in taken]
    whole = [batch["image"].flatten().tolist() for batch in plain]
    assert found == [[whole[0], whole[2]], [whole[1], whole[3]]]
    assert "gives each process other cases or another order: the cases are taken in the dataset's" in caplog.text
    assert in_order(plain) is plain


def test_a_method_of_a_users_own_in_two_rounds(cohort: Path) -> None:
    """Later masks are chosen by the scores of all parts, which meet in the store."""
    method = {"method": "helpers.two_rounds.two_rounds", "window": 6}
    monai.bundle.run(**settings(cohort, "one", **method))
    for number in range(2):
        monai.bundle.run(**settings(cohort, "rounds", **method, **rank(number, 2, "masks")))
    assert maps(cohort / "rounds") == maps(cohort / "one") != {}
