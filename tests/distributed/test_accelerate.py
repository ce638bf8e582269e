"""Accelerate: the plain maps of a prepared loader, none twice and none left out, and of a bundle's cohort."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from helpers import commands
from helpers.own_bundle import check_cohorts, environment_of, run_broken_cohort
from helpers.own_pipeline import Network, inferer, loader, plain_maps, run_page
from helpers.paths import TESTS
from helpers.scans import LPS, write_scan, write_scans
from helpers.tolerances import assert_same_bits

from monai_saliency.distributed.accelerate import AccelerateEngine, explain_loader


@pytest.fixture
def _as_if_new() -> Iterator[None]:
    """Accelerate keeps its view of the processes for good."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def launch(tmp_path: Path, count: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """As on GPUs: on the CPU alone Accelerate starts one process, or needs MPI to start more."""
    command = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", str(count)]
    command += ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", "0", *arguments]
    return commands.run(command, env=environment_of(tmp_path), cwd=tmp_path, timeout=300)


def check_maps(rows: list[dict[str, Any]], expected: dict[str, torch.Tensor]) -> None:
    """Each case once, in order, with its own map to the bit."""
    assert [row["case"] for row in rows] == list(expected)
    for row in rows:
        assert_same_bits(row["saliency"].as_tensor(), expected[row["case"]])


@pytest.mark.slow
def test_own_pipeline(tmp_path: Path) -> None:
    """Real processes: gathered in the loader's order or written by rank, with more room in a batch than images."""
    count = 3  # which divides neither five cases nor a batch of two or four
    write_scans(tmp_path, 5)
    write_scan(tmp_path / "one" / "s0.nii.gz", (13, 12, 14), LPS, seed=0)
    done = launch(tmp_path, count, [str(TESTS / "helpers" / "accelerate_ranks.py"), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(count)]
    assert [found["rank"] for found in ranks] == list(range(count))
    assert {found["world_size"] for found in ranks} == {count}
    for found in ranks:
        check_gathered(found, "cases")
        check_gathered(found, "masks")
        check_maps(found["split batches"], plain_maps(2 * count + 1))
        refused = found["wrong: dispatched"]
        assert refused.startswith("DataLoaderDispatcher is not shared in a way that repeats no image")
    check_shuffled(ranks)
    check_written(ranks)
    check_cohorts(tmp_path, count)


NAMES = [f"case{i}" for i in range(5)]


def check_gathered(found: dict[str, Any], split: str) -> None:
    """All maps on one rank. A batch of the plain loader is a batch here, whoever has it."""
    by_two = plain_maps(5, 2)
    check_maps(found[f"{split} by 2"], by_two)
    check_maps(found[f"{split} by 2 of one"], plain_maps(1, 2))
    check_maps(found[f"{split} without the last"], {name: by_two[name] for name in NAMES[:4]})
    written = found[f"{split} written"]
    assert [row["case"] for row in written] == NAMES
    assert all(set(row) == {"case", "explained"} for row in written)


def check_shuffled(ranks: list[dict[str, Any]]) -> None:
    """In one order on all ranks."""
    order = [row["case"] for row in ranks[0]["cases shuffled"]]
    maps = plain_maps(5)
    for found in ranks:
        check_maps(found["cases shuffled"], {name: maps[name] for name in order})
    assert sorted(order) == NAMES


def check_written(ranks: list[dict[str, Any]]) -> None:
    """Whole cases are written where they are explained; cases whose masks are shared, by the first rank."""
    maps, names = plain_maps(5), []
    for found in ranks:
        for name, written in found["written"]["cases"]:
            names.append(name)
            assert_same_bits(written, maps[name])
    assert sorted(names) == NAMES
    first, *others = ranks
    assert [name for name, _ in first["written"]["masks"]] == NAMES
    assert not any("masks" in found["written"] for found in others)


@pytest.mark.slow
def test_overlay(tmp_path: Path) -> None:
    run_broken_cohort(tmp_path, "accelerate", lambda command: launch(tmp_path, 2, command))


@pytest.mark.usefixtures("_as_if_new")
class TestOneProcess:
    @pytest.mark.parametrize("split", ["cases", "masks"])
    def test_plain_maps(self, split: str) -> None:
        accelerator = Accelerator(cpu=True)
        network, prepared = accelerator.prepare(Network(), loader(5, batch_size=2))
        rows = explain_loader(accelerator, prepared, network, inferer(), split)
        check_maps(rows, plain_maps(5, 2))
        assert [float(row["saliency"].affine[0, 0]) for row in rows] == [1, 2, 3, 4, 5]
        # A network that is no module, and a loader as it is.
        rows = explain_loader(accelerator, loader(5, batch_size=2), Network().eval().__call__, inferer(), split)
        check_maps(rows, plain_maps(5, 2))

    @pytest.mark.slow
    def test_code_of_the_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        found = run_page("accelerate")
        assert found["row"]["case"] == "c"
        assert_same_bits(torch.load("c.pt"), found["row"]["saliency"].as_tensor().cpu())

    def test_processes_that_do_not_know_of_each_other_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On the CPU, unless it is told, Accelerate takes each for the only one."""
        accelerator = Accelerator(cpu=True)
        monkeypatch.setenv("WORLD_SIZE", "2")
        for start in (AccelerateEngine, lambda: explain_loader(accelerator, loader(1), Network(), inferer())):
            with pytest.raises(
                ValueError, match=r"2 processes were started, .*: on the CPU, set Accelerator\(cpu=True\)"
            ):
                start()
