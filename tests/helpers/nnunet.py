"""A small nnU-Net model, made by nnU-Net's own planner, with weights saved by its own trainer."""

from __future__ import annotations

import copy
import json
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

NAME = "Dataset001_Made"
#: of the scans that are planned for; the axis with the largest is turned to the front
SPACING = (3.0, 1.0, 1.0)
#: smaller than a planner makes them, so that a small scan has several
PATCHES = {"3d_fullres": [8, 16, 16], "2d": [16, 16]}


class Bright(torch.nn.Module):
    """A network that looks at one voxel: the logit of label 1 is how bright it is."""

    def __init__(self, input_channels: int, num_classes: int, deep_supervision: bool = False, **_: Any) -> None:
        super().__init__()
        self.pick = torch.nn.Conv3d(input_channels, num_classes, 1)
        with torch.no_grad():
            self.pick.weight.zero_()[1, 0] = 2.0
            self.pick.bias.zero_()[1] = -4.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.pick(images)


def make_model(folder: Path) -> Path:
    """Plan for a made dataset, and save weights of two folds of two configurations.

    Returns:
        the folder of the dataset's models.
    """
    with pytest.MonkeyPatch.context() as patch:
        _set_up(folder, patch)
        plans, dataset_json = _plan(folder, patch)
        for configuration in PATCHES:
            for fold in range(2):
                _save(folder, patch, plans, dataset_json, configuration, fold)
    return folder / "results" / NAME


def make_bright(folder: Path, made: Path) -> Path:
    """The same model with the network :class:`Bright`; its model folder."""
    plans = json.loads((next(made.glob("*__3d_fullres")) / "plans.json").read_text())
    dataset_json = json.loads((next(made.glob("*__3d_fullres")) / "dataset.json").read_text())
    plans["configurations"]["3d_fullres"]["architecture"]["network_class_name"] = "helpers.nnunet.Bright"
    with pytest.MonkeyPatch.context() as patch:
        _set_up(folder, patch)
        return _save(folder, patch, plans, dataset_json, "3d_fullres", 0)


def scan(path: Path, affine: np.ndarray, shape: tuple[int, ...] = (14, 31, 27), seed: int = 0) -> Path:
    """A scan with an empty margin, which nnU-Net crops."""
    values = np.random.default_rng(seed).normal(100, 20, shape)
    values[:, :3] = values[:, :, -2:] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values.astype(np.float32), affine), path)
    return path


def _set_up(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("raw", "preprocessed", "results"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        patch.setenv(f"nnUNet_{name}", str(folder / name))
    patch.setenv("nnUNet_compile", "f")


def _plan(folder: Path, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    from nnunetv2.experiment_planning.dataset_fingerprint import fingerprint_extractor
    from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner

    raw = folder / "raw" / NAME
    labels = np.zeros((14, 26, 30), np.uint8)
    labels[3:8, 5:15, 8:16] = 1
    affine = np.diag([*SPACING, 1.0])
    for i in range(2):
        scan(raw / "imagesTr" / f"case{i}_0000.nii.gz", affine, labels.shape, i)
        (raw / "labelsTr").mkdir(exist_ok=True)
        nib.save(nib.Nifti1Image(labels, affine), raw / "labelsTr" / f"case{i}.nii.gz")
    dataset_json = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "blob": 1}}
    dataset_json |= {"numTraining": 2, "file_ending": ".nii.gz"}
    (raw / "dataset.json").write_text(json.dumps(dataset_json))
    # Its processes take longer to start than all the rest.
    threads = SimpleNamespace(get_context=lambda method: SimpleNamespace(Pool=ThreadPool))
    patch.setattr(fingerprint_extractor, "multiprocessing", threads)
    fingerprint_extractor.DatasetFingerprintExtractor(NAME, 1).run()
    planner = ExperimentPlanner(NAME)
    planner.UNet_base_num_features = 4
    planner.UNet_max_features_3d = planner.UNet_max_features_2d = 8
    planner.UNet_blocks_per_stage_encoder, planner.UNet_blocks_per_stage_decoder = (1,) * 14, (1,) * 13
    planner.plan_experiment()
    plans = json.loads((folder / "preprocessed" / NAME / "nnUNetPlans.json").read_text())
    assert plans["transpose_forward"] != [0, 1, 2]
    for configuration, size in PATCHES.items():
        plans["configurations"][configuration]["patch_size"] = size
    return plans, dataset_json


def _save(
    folder: Path,
    patch: pytest.MonkeyPatch,
    plans: dict[str, Any],
    dataset_json: dict[str, Any],
    configuration: str,
    fold: int,
) -> Path:
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as module

    # There is nothing preprocessed to train with.
    patch.setattr(module, "infer_dataset_class", lambda folder: None)
    torch.manual_seed(fold)
    given = copy.deepcopy(plans) | {"continue_training": False}
    trainer = module.nnUNetTrainer(given, configuration, fold, dataset_json, torch.device("cpu"))
    trainer.initialize()
    trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size()
    trainer.save_checkpoint(str(Path(trainer.output_folder) / "checkpoint_final.pth"))
    base = Path(trainer.output_folder_base)
    (base / "plans.json").write_text(json.dumps(plans))
    (base / "dataset.json").write_text(json.dumps(dataset_json))
    return base
