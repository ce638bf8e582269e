"""nnU-Net's model folders: which are read, and which are refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.nnunet import FULL

from monai_saliency.networks.nnunet import MirroredNetwork, NNUNetModel, NNUNetNetwork


@pytest.fixture
def models(nnunet_models: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(nnunet_models, tmp_path / "models"))


def test_finds_model_and_folds(nnunet_models: Path) -> None:
    model = NNUNetModel(nnunet_models / FULL)
    assert (model.folds, model.configuration, model.channels, model.activation) == ([0, 1], "3d_fullres", 1, "softmax")
    network = model.network()
    assert [member.axes for member in network.members] == [(0, 1, 2)] * 2
    assert NNUNetModel(nnunet_models, "1", "2d").network(mirroring=False).members[0].axes == ()


CASCADE = "3d_cascade_fullres"


def cascade(models: Path) -> None:
    """As nnU-Net lays it out: the second stage has its own folder and inherits the settings of ``3d_fullres``."""
    plans = json.loads((models / FULL / "plans.json").read_text())
    stage = {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"}
    plans["configurations"] |= {"3d_lowres": {"next_stage": CASCADE}, CASCADE: stage}
    (models / FULL / "plans.json").write_text(json.dumps(plans))
    for path in (models / FULL).glob("fold_*/*.pth"):
        content = torch.load(path, weights_only=False)
        content["init_args"]["configuration"] = CASCADE
        torch.save(content, path)
    (models / FULL).rename(models / FULL.replace("3d_fullres", CASCADE))


def read_by(name: str) -> Callable[[Path], None]:
    def change(models: Path) -> None:
        plans = json.loads((models / FULL / "plans.json").read_text())
        (models / FULL / "plans.json").write_text(json.dumps(plans | {"image_reader_writer": name}))

    return change


class Evil:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


def with_code(models: Path) -> None:
    (models / FULL / "fold_0" / "checkpoint_final.pth").write_bytes(pickle.dumps(Evil()))


def with_numpy(models: Path) -> None:
    """Beside the float32 that nnU-Net has logged in the training of these models."""
    for fold in (0, 1):
        path = models / FULL / f"fold_{fold}" / "checkpoint_final.pth"
        content = torch.load(path, weights_only=False)
        assert isinstance(content["logging"]["train_losses"][0], np.float32)
        torch.save(content | {"_best_ema": np.float64(0.5)}, path)


@pytest.mark.parametrize(
    ("change", "arguments", "error"),
    [
        (
            cascade,
            ("", None, CASCADE),
            "second stage of a cascade: its network also reads the segmentation of 3d_lowres",
        ),
        (with_code, (FULL,), "cannot be read without running code in it"),
        (with_numpy, (FULL,), None),
        (None, ("",), "holds several models"),
        (None, ("", None, "3d_lowres"), "no model of the configuration 3d_lowres, and .*nnUNetPlans__2d, nnUNetT"),
        (None, ("..",), "holds no plans.json: pass --nnunet_model_folder"),
        (None, (FULL, [0, 3]), "has no checkpoint_final.pth of fold 3, but .* in fold_0, fold_1"),
        (
            None,
            (FULL, [0], None, "checkpoint_latest.pth"),
            "but checkpoint_best.pth, checkpoint_final.pth in fold_0",
        ),
        (read_by("MyReader"), (FULL,), "are read by MyReader, and only scans of SimpleITKIO, .* are explained"),
        (lambda models: (models / FULL / "dataset.json").unlink(), (FULL,), "No such file .*dataset.json"),
    ],
)
def test_refuses_with_the_reason(
    models: Path,
    change: Callable[[Path], Any] | None,
    arguments: tuple[Any, ...],
    error: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if change is not None:
        change(models)
    if error is None:
        NNUNetModel(models / arguments[0], *arguments[1:])
    else:
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            NNUNetModel(models / arguments[0], *arguments[1:])
    assert "it ran" not in capsys.readouterr().out


def test_mirrors_along_all_combinations_of_axes() -> None:
    """Written slowly: each flip of the patch is flipped back, and all are averaged."""
    network = torch.nn.Conv3d(1, 2, 3, padding=1)
    patches = torch.randn(2, 1, 4, 5, 6)
    with torch.no_grad():
        flipped = [network(patches.flip(axes)).flip(axes) for axes in [(), (2,), (4,), (2, 4)]]
        found = MirroredNetwork(network, (0, 2))(patches)
    torch.testing.assert_close(found, torch.stack(flipped).mean(0))


def test_slices_of_a_volume_go_through_a_network_of_slices() -> None:
    network = torch.nn.Conv2d(1, 2, 3, padding=1)
    patches = torch.randn(2, 1, 1, 5, 6)
    with torch.no_grad():
        found = NNUNetNetwork([MirroredNetwork(network, spatial_dims=2)])(patches)
        assert torch.equal(found[:, :, 0], network(patches[:, :, 0]))
