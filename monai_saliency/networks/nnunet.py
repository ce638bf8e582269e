"""nnU-Net v2's networks: a trained model folder, and the network of its folds with mirroring.

`Isensee et al., nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation. Nature
Methods 18 (2021) <https://doi.org/10.1038/s41592-020-01008-z>`_. nnU-Net's own predictor reads the model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from monai_saliency.errors import AdviceError
from monai_saliency.utils.arguments import require
from monai_saliency.utils.plain_loading import load_plain

#: nnU-Net's readers whose scans are read as they do it
_READERS = ("SimpleITKIO", "SimpleITKIOWithReorient", "NibabelIO", "NibabelIOWithReorient")


class MirroredNetwork(torch.nn.Module):
    """A network that averages its logits over mirrored copies of a patch, as nnU-Net does (test-time augmentation)."""

    def __init__(self, network: torch.nn.Module, axes: Sequence[int] = (), spatial_dims: int = 3) -> None:
        super().__init__()
        self.network = network
        self.axes = tuple(axes)
        self.spatial_dims = spatial_dims
        self.flips: list[tuple[int, ...]] = []  # the axes of a patch (B, C, *spatial) to flip, for each mirrored copy
        for count in range(1, len(self.axes) + 1):
            self.flips += combinations([axis + 2 for axis in self.axes], count)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Compute the mean logits of patches and their mirrored copies."""
        slices = patches.ndim == self.spatial_dims + 3
        if slices:
            patches = patches.squeeze(2)
        logits = self.network(patches)
        # Summed in nnU-Net's order, so that the logits are equal to the bit.
        for axes in self.flips:
            logits = logits + torch.flip(self.network(torch.flip(patches, axes)), axes)
        logits = logits / (len(self.flips) + 1)
        return logits.unsqueeze(2) if slices else logits


class NNUNetNetwork(torch.nn.Module):
    """The networks of several folds as one: the mean of their logits. The inferer predicts fold by fold, as nnU-Net."""

    def __init__(self, members: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Compute the mean logits ``(B, classes, *spatial)`` of patches ``(B, C, *spatial)``."""
        return sum(member(patches) for member in self.members) / len(self.members)


class NNUNetModel:
    """A trained nnU-Net v2 model: its plans, and its network.

    Args:
        folder: the model folder ``<trainer>__<plans>__<configuration>``, with ``plans.json``, ``dataset.json`` and a
            folder ``fold_<fold>`` for each fold; or the folder of a dataset that holds such folders.
        folds: the folds whose logits are averaged: numbers, or ``"all"``. By default all numbered folds that have the
            checkpoint, or ``fold_all`` if it is the only one.
        configuration: such as ``"3d_fullres"``: which model of a dataset's folder, where there are several.
        checkpoint: the file in each fold's folder.

    Attributes:
        predictor: nnU-Net's ``nnUNetPredictor``, on the CPU.
        plans: the content of ``plans.json``.
        dataset_json: the content of ``dataset.json``.
        configuration: the name of the configuration that the checkpoints were trained with.
        folds: the folds.
        reorients: whether nnU-Net's reader turns scans to RAS axes first.
        patch_size: the size of a patch in voxels: three numbers, or two for a network of slices.
        activation: from logits to probabilities: ``"softmax"``, or ``"sigmoid"`` for labels that are regions.
        channels: how many channels (modalities, each in a file) a scan has.

    Raises:
        ValueError: when there are several models to choose from, a checkpoint holds code, the model is the second stage
            of a cascade, or its scans are read by another reader than nnU-Net's of NIfTI.
    """

    def __init__(
        self,
        folder: str | Path,
        folds: Sequence[int | str] | int | str | None = None,
        configuration: str | None = None,
        checkpoint: str = "checkpoint_final.pth",
    ) -> None:
        self.folder = _model_folder(Path(folder), configuration)
        self.dataset_json = _read_json(self.folder / "dataset.json")
        self.plans = _read_json(self.folder / "plans.json")
        self.reorients = self._reader().endswith("WithReorient")
        self.folds = _folds(self.folder, folds, checkpoint)
        self.configuration = _configuration([self.folder / f"fold_{fold}" / checkpoint for fold in self.folds])
        if configuration not in (None, self.configuration):
            raise ValueError(f"the checkpoints of {self.folder} are of {self.configuration}, not {configuration}")
        self._check_stage()
        module = require("nnunetv2.inference.predict_from_raw_data", extra="nnunet")
        self.predictor = module.nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
        self.predictor.initialize_from_trained_model_folder(str(self.folder), self.folds, checkpoint)
        self.patch_size = list(self.predictor.configuration_manager.patch_size)
        self.activation = "sigmoid" if self.predictor.label_manager.has_regions else "softmax"
        self.channels = len(self.dataset_json.get("channel_names", self.dataset_json.get("modality")))

    def _reader(self) -> str:
        """The name of nnU-Net's reader of scans."""
        reader = str(self.plans["image_reader_writer"])
        if reader not in _READERS:
            raise ValueError(
                f"the scans of {self.folder} are read by {reader}, and only scans of {', '.join(_READERS)} are "
                "explained: save them as NIfTI, and write `image_reader_writer`: SimpleITKIO into plans.json"
            )
        return reader

    def _check_stage(self) -> None:
        """Refuse the second stage of a cascade."""
        stage = self.plans["configurations"][self.configuration].get("previous_stage")
        if stage is not None:
            raise ValueError(
                f"{self.configuration} is the second stage of a cascade: its network also reads the segmentation of "
                f"{stage}, whose part in the score a map would leave out. Explain {stage}, or 3d_fullres"
            )

    def network(self, mirroring: bool = True) -> NNUNetNetwork:
        """The folds' networks as one, in evaluation mode, on the CPU; ``mirroring`` averages logits over mirrored
        patches along the axes that the checkpoint allows.
        """
        axes = self.predictor.allowed_mirroring_axes if mirroring else None
        members = []
        for weights in self.predictor.list_of_parameters:
            # The predictor has one network, into which it loads one fold after the other.
            network = copy.deepcopy(self.predictor.network)
            network.load_state_dict(weights)
            members.append(MirroredNetwork(network, axes or (), len(self.patch_size)))
        return NNUNetNetwork(members).eval()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _model_folder(folder: Path, configuration: str | None) -> Path:
    """The folder of one model."""
    if (folder / "plans.json").is_file():
        return folder
    below = sorted(path.parent for path in folder.glob("*__*__*/plans.json"))
    fitting = [model for model in below if configuration in (None, model.name.rpartition("__")[2])]
    if len(fitting) == 1:
        return fitting[0]
    if not below:
        raise FileNotFoundError(
            f"{folder} holds no plans.json: pass --nnunet_model_folder with the model folder that nnU-Net's training "
            "made, <nnUNet_results>/<dataset>/<trainer>__<plans>__<configuration>"
        )
    count = "several models" if fitting else "no model"
    raise ValueError(
        f"{folder} holds {count} of the configuration {configuration or 'any'}, and these: {_listed(below)}. Pass one "
        "as --nnunet_model_folder, or choose by --nnunet_configuration"
    )


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(sorted({path.name for path in paths})) or "none"


def _folds(folder: Path, folds: Sequence[int | str] | int | str | None, checkpoint: str) -> list[int | str]:
    """The folds to average."""
    there = sorted(path.parent.name.removeprefix("fold_") for path in folder.glob(f"fold_*/{checkpoint}"))
    if folds is None:
        chosen = [fold for fold in there if fold != "all"] or there
    elif isinstance(folds, (int, str)):
        chosen = [str(folds)]
    else:
        chosen = [str(fold) for fold in folds]
    missing = [fold for fold in chosen if fold not in there]
    if missing or not chosen:
        raise FileNotFoundError(
            f"{folder} has no {checkpoint} of fold {', '.join(missing) or 'any number'}, but "
            f"{_listed(folder.glob('fold_*/*.pth'))} in {_listed(folder.glob('fold_*'))}: choose by --nnunet_checkpoint"
        )
    return [fold if fold == "all" else int(fold) for fold in chosen]


def _configuration(checkpoints: Sequence[Path]) -> str:
    """The configuration of all checkpoints, and that they hold no code: nnU-Net's predictor would run it."""
    configurations = set()
    for path in checkpoints:
        try:
            content = load_plain(path, map_location="cpu", mmap=True)
        except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise AdviceError(
                f"the checkpoint {path} cannot be read without running code in it: where you trust it, save it again "
                "with the entries network_weights, trainer_name, init_args, inference_allowed_mirroring_axes alone"
            ) from error
        configurations.add(content["init_args"]["configuration"])
    if len(configurations) > 1:
        raise ValueError(f"all folds must be of one configuration, got {', '.join(sorted(configurations))}")
    return configurations.pop()
