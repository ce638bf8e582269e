"""What stops a run, and what does not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from test_bundle import LPS, write_scan
from test_store import settings

from monai_saliency.errors import OutputError, root_cause


class Picky(torch.nn.Module):
    """Two logits of an image, but for images whose first voxel says that it fails on them."""

    def __init__(self, fail_on_predict: bool = True) -> None:
        super().__init__()
        self.fail_on_predict = fail_on_predict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        predicting = len(x) == 1
        if float(x[0, 0].max()) > 1000 and predicting == self.fail_on_predict:
            raise RuntimeError("out of\npaper")
        return x.flatten(1)[:, :2]


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    for seed in range(3):
        write_scan(tmp_path / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    return tmp_path


def run(tmp_path: Path, **overrides: Any) -> None:
    monai.bundle.run(**settings(tmp_path, "out", **overrides))


@pytest.mark.parametrize("stage", ["predict", "explain"])
def test_a_case_the_network_fails_on_is_listed_and_the_others_go_on(stage: str, cohort: Path) -> None:
    path = cohort / "cohort" / "s1.nii.gz"
    data = nib.load(path).get_fdata(dtype=np.float32)
    data[6, 6, 6] = 1e9
    nib.save(nib.Nifti1Image(data, LPS), path)
    network = {"_target_": "test_cohort.Picky", "fail_on_predict": stage == "predict"}
    preprocessing = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "ResizeWithPadOrCropd", "keys": "image", "spatial_size": [12, 12, 12]},
    ]
    with pytest.raises(SystemExit, match=r"error: 1 case without a map.*case s1: RuntimeError: out of paper"):
        run(cohort, network_def=network, **{"preprocessing::transforms": preprocessing})
    assert (cohort / "out" / "failures.csv").read_text().splitlines()[1] == f"s1,{stage},RuntimeError: out of paper"
    assert sorted(p.name for p in (cohort / "out").glob("*.nii.gz")) == ["s0_saliency.nii.gz", "s2_saliency.nii.gz"]


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
    assert [p.name for p in (cohort / "out").glob("*saliency*")] == ["s0_saliency.nii.gz"]
    assert np.isfinite(nib.load(cohort / "out" / "s0_saliency.nii.gz").get_fdata()).all()
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
