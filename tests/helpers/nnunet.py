"""Small nnU-Net models that nnU-Net itself has planned and trained, on made scans."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

NAME = "Dataset001_Made"
FULL = "nnUNetTrainer__nnUNetPlans__3d_fullres"
#: of the scans that are planned for; the axis with the largest is turned to the front
SPACING = (3.0, 1.0, 1.0)
#: smaller than a planner makes them, so that a small scan has several
PATCHES = {"3d_fullres": [8, 16, 16], "2d": [16, 16]}


def train_on_scans(folder: Path) -> Path:
    """Train two folds of two configurations on made scans with bright blobs.

    Returns:
        the folder of the dataset's models.
    """
    raw, random = _raw(folder), np.random.default_rng(0)
    affine = np.diag([*SPACING, 1.0])
    for i in range(5):
        path = scan(raw / "imagesTr" / f"case{i}_0000.nii.gz", affine, (14, 26, 30), i)
        values = np.asarray(nib.load(path).dataobj)
        labels = _add_blobs(values, random, 200)
        nib.save(nib.Nifti1Image(values, affine), path)
        nib.save(nib.Nifti1Image(labels, affine), raw / "labelsTr" / f"case{i}.nii.gz")
    return _train(folder, {"channel_names": {"0": "MRI"}, "file_ending": ".nii.gz"}, PATCHES, folds=2, iterations=60)


def own_predictor(model: Path, folds: Sequence[int], mirroring: bool) -> Any:
    """nnU-Net's, on the CPU."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=mirroring, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), folds)
    return predictor


@contextmanager
def counted_patches() -> Iterator[list[int]]:
    """The patches in each batch that any network of nnU-Net's architecture is given meanwhile, mirrored ones too."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    seen: list[int] = []
    plain = PlainConvUNet.forward

    def count(self: torch.nn.Module, patches: torch.Tensor) -> Any:
        seen.append(len(patches))
        return plain(self, patches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainConvUNet, "forward", count)
        yield seen


def scan(path: Path, affine: np.ndarray, shape: tuple[int, ...] = (14, 31, 27), seed: int = 0) -> Path:
    """A scan with an empty margin, which nnU-Net crops."""
    values = np.random.default_rng(seed).normal(100, 20, shape)
    values[:, :3] = values[:, :, -2:] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values.astype(np.float32), affine), path)
    return path


def _add_blobs(values: np.ndarray, random: np.random.Generator, brighter: int) -> np.ndarray:
    """Make some places of an image brighter; where, as a label map."""
    labels = np.zeros(values.shape, np.uint8)
    for _ in range(3):
        box = tuple(slice(middle - 1, middle + 2) for middle in (random.integers(4, size - 4) for size in values.shape))
        labels[box] = 1
    values[labels == 1] += brighter
    return labels


def _raw(folder: Path) -> Path:
    raw = folder / "raw" / NAME
    (raw / "labelsTr").mkdir(parents=True)
    return raw


def _train(folder: Path, dataset_json: Any, patches: Mapping[str, list[int]], folds: int, iterations: int) -> Path:
    """What a user does with nnU-Net's commands: plan, preprocess, train."""
    dataset_json |= {"labels": {"background": 0, "blob": 1}, "numTraining": 5}
    (folder / "raw" / NAME / "dataset.json").write_text(json.dumps(dataset_json))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("raw", "preprocessed", "results"):
            patch.setenv(f"nnUNet_{name}", str(folder / name))
        patch.setenv("nnUNet_compile", "f")
        plans = _plan(folder, patch, patches)
        patch.setenv("nnUNet_n_proc_DA", "0")
        for configuration in patches:
            for fold in range(folds):
                _run_training(plans, configuration, fold, dataset_json, iterations)
    torch.set_num_threads(threads)
    return folder / "results" / NAME


def _plan(folder: Path, patch: pytest.MonkeyPatch, patches: Mapping[str, list[int]]) -> dict[str, Any]:
    from nnunetv2.experiment_planning.dataset_fingerprint import fingerprint_extractor
    from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
    from nnunetv2.preprocessing.preprocessors import default_preprocessor
    from nnunetv2.utilities import utils

    # Its processes take longer to start than all the rest.
    threads = SimpleNamespace(get_context=lambda method: SimpleNamespace(Pool=ThreadPool))
    for module in (fingerprint_extractor, default_preprocessor):
        patch.setattr(module, "multiprocessing", threads)
    patch.setattr(utils, "Pool", ThreadPool)
    (folder / "preprocessed").mkdir()
    extractor = fingerprint_extractor.DatasetFingerprintExtractor(NAME, 1)
    extractor.num_foreground_voxels_for_intensitystats = 10**4
    extractor.run()
    planner = ExperimentPlanner(NAME)
    planner.UNet_base_num_features = 4
    planner.UNet_max_features_3d = planner.UNet_max_features_2d = 8
    planner.UNet_blocks_per_stage_encoder, planner.UNet_blocks_per_stage_decoder = (1,) * 14, (1,) * 13
    patch.setenv("nnUNet_n_proc_DA", "1")
    planner.plan_experiment()
    path = folder / "preprocessed" / NAME / "nnUNetPlans.json"
    plans: dict[str, Any] = json.loads(path.read_text())
    for configuration, size in patches.items():
        plans["configurations"][configuration]["patch_size"] = size
    path.write_text(json.dumps(plans))
    for configuration in patches:
        default_preprocessor.DefaultPreprocessor(verbose=False).run(NAME, configuration, "nnUNetPlans", 1)
    return plans


def _run_training(plans: Any, configuration: str, fold: int, dataset_json: dict[str, Any], iterations: int) -> None:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    np.random.seed(fold)  # noqa: NPY002 - nnU-Net draws from it
    torch.manual_seed(fold)
    given = copy.deepcopy(plans) | {"continue_training": False}
    trainer = nnUNetTrainer(given, configuration, fold, dataset_json, torch.device("cpu"))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, iterations, 1
    trainer.logger.plot_progress_png = lambda folder: None
    trainer.run_training()
