"""Lightning: the plain maps from ``Trainer.predict``, whatever devices share."""

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import commands
from helpers.own_bundle import check_cohorts, environment_of, run_broken_cohort
from helpers.own_pipeline import Network, inferer, loader, plain_maps, run_page, scans
from helpers.paths import TESTS
from helpers.scans import LPS, write_scan, write_scans
from helpers.tolerances import assert_same_bits
from lightning.pytorch import Trainer

from monai_saliency.distributed.lightning import LightningEngine, SaliencyModule


def trainer(**more: Any) -> Trainer:
    fixed: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    fixed |= {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**(fixed | more))


def environment(tmp_path: Path) -> dict[str, str]:
    # Below the ports that the system hands out by itself, which may be another process's by the time one is used.
    return environment_of(tmp_path) | {"MASTER_PORT": str(random.SystemRandom().randrange(20000, 32000))}


def by_case(predictions: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = [pair for batch in predictions for pair in zip(batch["case"], batch["saliency"], strict=True)]
    assert len(dict(found)) == len(found)
    return {case: saliency.as_tensor() for case, saliency in found}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[case], expected[case]) for case in expected)


class TestOneDevice:
    @pytest.mark.parametrize(("split", "inference_mode"), [("cases", True), ("masks", False)])
    def test_plain_maps(self, split: str, inference_mode: bool) -> None:
        module = SaliencyModule(Network().train(), inferer(), split)
        found = trainer(inference_mode=inference_mode).predict(module, loader(5, batch_size=2))
        assert same(by_case(found), plain_maps(5, batch_size=2))
        first = found[0]
        assert [saliency.affine[0, 0] for saliency in first["saliency"]] == [1, 2]
        (expected, _) = inferer().explain(torch.stack([scan["image"].as_tensor() for scan in scans(2)]), Network())
        assert first["explained"][0] == expected.explained
        assert not any(parameter.grad is not None for parameter in module.parameters())
        assert not first["saliency"][0].requires_grad


def launch(tmp_path: Path, devices: int) -> list[dict[str, Any]]:
    write_scans(tmp_path, 5)
    write_scan(tmp_path / "one" / "s0.nii.gz", (13, 12, 14), LPS, seed=0)
    command = [TESTS / "helpers" / "lightning_ranks.py", tmp_path, devices]
    done = commands.run(command, env=environment(tmp_path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(devices)]


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    """Real processes that Lightning starts: the plain maps to the bit, each case once, and nothing written besides."""
    devices = 3  # which five cases do not divide
    ranks = launch(tmp_path, devices)
    assert [(found["rank"], found["world_size"]) for found in ranks] == [(i, devices) for i in range(devices)]
    five, one = plain_maps(5), plain_maps(1)
    # Images over devices: each has its own, and together they have all of them once.
    assert same(by_case([batch for found in ranks for batch in found["cases"]]), five)
    assert [len(found["cases"]) for found in ranks] == [len(range(i, 5, devices)) for i in range(devices)]
    for found in ranks:
        assert same(by_case(found["masks"]), five)
        assert same(by_case(found["masks of one"]), one)
        assert same(by_case(found["masks of batches"]), plain_maps(5, batch_size=3))
        assert "Trainer(use_distributed_sampler=False)" in found["masks shared"]
    check_cohorts(tmp_path, devices)
    assert not [path for path in tmp_path.rglob("*") if "lightning" in path.name or path.suffix == ".hparams"]


@pytest.mark.slow
def test_overlay(tmp_path: Path) -> None:
    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return commands.run(command, env=environment(tmp_path), cwd=tmp_path, timeout=300)

    run_broken_cohort(tmp_path, "lightning", run, saliency_devices=2, saliency_accelerator="cpu")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["cohort", "matplotlib", "out"]


class TestEngine:
    def test_a_list_of_devices_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"must be a number, got \[2, 3\]: choose GPUs by CUDA_VISIBLE_DEVICES"):
            LightningEngine(devices=[2, 3])


@pytest.mark.slow
def test_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_page("lightning")
    assert_same_bits(torch.load("c.pt"), found["saliency"].as_tensor())
