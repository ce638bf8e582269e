"""nnU-Net v2's networks: a trained model folder, and the network of its folds with mirroring.

`Isensee et al., nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation. Nature
Methods 18 (2021) <https://doi.org/10.1038/s41592-020-01008-z>`_. What the plans say is left to nnU-Net's own code.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from monai_saliency.errors import AdviceError
from monai_saliency.utils.optional_imports import require

__all__ = ["MirroredNetwork", "NNUNetModel", "NNUNetNetwork"]

#: nnU-Net's readers whose scans are read as they do it
_READERS = ("SimpleITKIO", "SimpleITKIOWithReorient", "NibabelIO", "NibabelIOWithReorient", "NaturalImage2DIO")
_ENTRIES = ("network_weights", "trainer_name", "init_args", "inference_allowed_mirroring_axes")


class MirroredNetwork(torch.nn.Module):
    """A network that averages its logits over mirrored copies of a patch, as nnU-Net does (test-time augmentation).

    Args:
        network: gives logits ``(B, classes, *spatial)`` of patches ``(B, C, *spatial)``.
        axes: spatial axes of the network that are mirrored, in all combinations; none by default.
        spatial_dims: of the network, 2 or 3. A network of 2 also takes patches of one slice, ``(B, C, 1, *spatial)``.
    """

    def __init__(self, network: torch.nn.Module, axes: Sequence[int] = (), spatial_dims: int = 3) -> None:
        super().__init__()
        if any(not 0 <= axis < spatial_dims for axis in axes):
            raise ValueError(f"`axes` must be axes of a network of {spatial_dims} spatial axes, got {tuple(axes)}")
        self.network = network
        self.axes = tuple(axes)
        self.spatial_dims = spatial_dims
        orders = chain.from_iterable(combinations(self.axes, count + 1) for count in range(len(self.axes)))
        self.flips = [tuple(axis + 2 for axis in each) for each in orders]

    def extra_repr(self) -> str:
        """The settings, for printing and for :func:`~monai_saliency.networks.identity.network_fingerprint`."""
        return f"axes={self.axes}, spatial_dims={self.spatial_dims}"

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Compute the mean logits of patches and their mirrored copies."""
        slices = patches.ndim == self.spatial_dims + 3
        if slices:
            patches = patches.squeeze(2)
        logits = self.network(patches)
        # Summed in nnU-Net's order, so that the logits are equal to the bit.
        for axes in self.flips:
            logits = logits + torch.flip(self.network(torch.flip(patches, axes)), axes)
        if self.flips:
            logits = logits / (len(self.flips) + 1)
        return logits.unsqueeze(2) if slices else logits


class NNUNetNetwork(torch.nn.Module):
    """The networks of several folds as one: the mean of their logits.

    The inferer :class:`~monai_saliency.inferers.nnunet.NNUNetInferer` predicts fold by fold, as nnU-Net does. On a
    patch, which is what an explanation runs, the mean is the same.

    Args:
        members: the folds' networks.

    Example::

        >>> import torch
        >>> double = torch.nn.Conv3d(1, 1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(double.weight, 2.0)
        >>> NNUNetNetwork([double, torch.nn.Identity()])(torch.ones(1, 1, 1, 1, 1)).item()
        1.5
    """

    def __init__(self, members: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Compute the mean logits ``(B, classes, *spatial)`` of patches ``(B, C, *spatial)``."""
        first, *others = self.members
        logits = first(patches)
        for member in others:
            logits = logits + member(patches)
        return logits / len(self.members) if others else logits


class NNUNetModel:
    """A trained nnU-Net v2 model: its plans, and its network.

    Args:
        folder: the model folder ``<trainer>__<plans>__<configuration>``, with ``plans.json``, ``dataset.json`` and a
            folder ``fold_<fold>`` for each fold; or the folder of a dataset that holds such folders.
        folds: the folds whose logits are averaged: numbers, or ``"all"``. By default all numbered folds that have the
            checkpoint, or ``fold_all`` where there is no other.
        configuration: such as ``"3d_fullres"``: which model of a dataset's folder. Needed only where there are
            several.
        checkpoint: the file in each fold's folder.

    Attributes:
        plans: the content of ``plans.json``.
        dataset_json: the content of ``dataset.json``.
        configuration: the name of the configuration that the checkpoints were trained with.
        folds: the folds.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when there are several models to choose from, the folds do not fit each other, the model is the
            second stage of a cascade, or its scans are read by another reader than those of NIfTI and of photographs.
    """

    def __init__(
        self,
        folder: str | Path,
        folds: Sequence[int | str] | int | str | None = None,
        configuration: str | None = None,
        checkpoint: str = "checkpoint_final.pth",
    ) -> None:
        self.folder = _model_folder(folder, configuration)
        self.dataset_json = _json(self.folder / "dataset.json")
        self.plans = _json(self.folder / "plans.json")
        self._check_reader()
        self.checkpoint = checkpoint
        self.folds = _folds(self.folder, folds, checkpoint)
        self.checkpoints = [_read(self.folder / f"fold_{fold}" / checkpoint) for fold in self.folds]
        found = {each["init_args"]["configuration"] for each in self.checkpoints}
        if len(found) > 1 or (configuration is not None and found != {configuration}):
            raise ValueError(
                f"the checkpoints of {self.folder} are of the configuration {', '.join(sorted(found))}"
                + (f", not {configuration}" if configuration is not None else ", where all folds must have one")
            )
        self.configuration = found.pop()
        settings = self.settings
        if settings.previous_stage_name is not None:
            raise ValueError(
                f"{self.configuration} is the second stage of a cascade: its network also reads the segmentation of "
                f"{settings.previous_stage_name}, which changes with the image, so its map would leave out what comes "
                f"by way of the first stage. Explain the first stage, {settings.previous_stage_name}, or 3d_fullres"
            )

    @property
    def manager(self) -> Any:
        """nnU-Net's ``PlansManager``."""
        return require("nnunetv2.utilities.plans_handling.plans_handler", extra="nnunet").PlansManager(self.plans)

    @property
    def settings(self) -> Any:
        """nnU-Net's ``ConfigurationManager`` of the configuration."""
        return self.manager.get_configuration(self.configuration)

    @property
    def labels(self) -> Any:
        """nnU-Net's ``LabelManager``."""
        return self.manager.get_label_manager(self.dataset_json)

    @property
    def activation(self) -> str:
        """What makes probabilities of logits: ``"softmax"``, or ``"sigmoid"`` for labels that are regions."""
        return "sigmoid" if self.labels.has_regions else "softmax"

    @property
    def channels(self) -> int:
        """How many channels (modalities, each in a file) a scan has."""
        return len(self.dataset_json.get("channel_names", self.dataset_json.get("modality")))

    @property
    def reorients(self) -> bool:
        """Whether nnU-Net's reader turns scans to RAS axes first."""
        return self._reader.endswith("WithReorient")

    @property
    def reads_photographs(self) -> bool:
        """Whether its images are 2D files such as PNG, which nnU-Net's ``NaturalImage2DIO`` reads."""
        return self._reader == "NaturalImage2DIO"

    @property
    def spatial_dims(self) -> int:
        """How many spatial axes an image has: 2 for photographs, 3 for scans, also where slices are predicted."""
        return 2 if self.reads_photographs else 3

    @property
    def _reader(self) -> str:
        return str(self.plans["image_reader_writer"])

    def _check_reader(self) -> None:
        if self._reader == "Tiff3DIO":
            raise ValueError(
                f"the scans of {self.folder} are 3D TIFFs, which have no place in a scanner for a map: save them as "
                "NIfTI, with the pages as the third axis and the voxel sizes of their *.json in reverse, and write "
                "`image_reader_writer`: SimpleITKIO into plans.json"
            )
        if self._reader not in _READERS:
            raise ValueError(
                f"the scans of {self.folder} are read by {self._reader}, which may turn them: explained are models "
                f"with nnU-Net's {', '.join(_READERS)} as `image_reader_writer` in plans.json"
            )

    def network(self, mirroring: bool = True) -> NNUNetNetwork:
        """The folds' networks as one, in evaluation mode, on the CPU.

        Args:
            mirroring: whether to average logits over mirrored patches along the axes that the checkpoint allows.
        """
        axes = self.checkpoints[0].get("inference_allowed_mirroring_axes") if mirroring else None
        dims = len(self.settings.patch_size)
        members = [MirroredNetwork(self._fold(weights), axes or (), dims) for weights in self.checkpoints]
        return NNUNetNetwork(members).eval()

    def _fold(self, checkpoint: Mapping[str, Any]) -> torch.nn.Module:
        name = checkpoint["trainer_name"]
        found = require("nnunetv2.utilities.find_objects", extra="nnunet").recursive_find_trainer_class_by_name(name)
        if found is None:
            raise ValueError(
                f"nnU-Net has no trainer {name}, with which this model was trained: install it where nnU-Net finds it "
                "(a file below nnunetv2/training/nnUNetTrainer, or nnUNet_extTrainer)"
            )
        handling = require("nnunetv2.utilities.label_handling.label_handling", extra="nnunet")
        build, manager, settings = found.build_network_architecture, self.manager, self.settings
        channels = handling.determine_num_input_channels(manager, settings, self.dataset_json)
        counts = channels, self.labels.num_segmentation_heads
        if "plans_manager" in inspect.signature(build).parameters:
            network = build(manager, settings, *counts, enable_deep_supervision=False)
        else:  # trainers written for nnU-Net before 2.8
            names = ("class_name", "init_kwargs", "init_kwargs_req_import")
            given = [getattr(settings, f"network_arch_{each}") for each in names]
            network = build(*given, *counts, enable_deep_supervision=False)
        network.load_state_dict(checkpoint["network_weights"])
        return network


def _model_folder(folder: str | Path, configuration: str | None) -> Path:
    """The folder of one model."""
    folder = Path(folder)
    if (folder / "plans.json").is_file():
        return folder
    below = sorted(path.parent for path in folder.glob("*__*__*/plans.json"))
    found = [each for each in below if configuration in (None, each.name.rpartition("__")[2])]
    if len(found) == 1:
        return found[0]
    if below and not found:
        raise FileNotFoundError(
            f"{folder} holds no model of the configuration {configuration}, only {_listed(below)}: choose one of these "
            "by --nnunet_configuration, or train that one"
        )
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no plans.json: pass --nnunet_model_folder with the model folder that nnU-Net's training "
            "made, <nnUNet_results>/<dataset>/<trainer>__<plans>__<configuration>"
        )
    raise ValueError(
        f"{folder} holds several models ({_listed(found)}): pass one of these folders as --nnunet_model_folder"
        + (", or choose by --nnunet_configuration" if configuration is None else "")
    )


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(sorted({path.name for path in paths})) or "none"


def _folds(folder: Path, folds: Sequence[int | str] | int | str | None, checkpoint: str) -> list[int | str]:
    """The folds to average."""
    there = sorted(path.parent.name.removeprefix("fold_") for path in folder.glob(f"fold_*/{checkpoint}"))
    if folds is None:
        folds = [fold for fold in there if fold != "all"] or there
    elif isinstance(folds, (int, str)):
        folds = [folds]
    if not there:
        raise FileNotFoundError(
            f"no fold of {folder} has the checkpoint {checkpoint}: is the training finished? Folds there: "
            f"{_listed(folder.glob('fold_*'))}; checkpoints in them: {_listed(folder.glob('fold_*/*.pth'))}, of which "
            "--nnunet_checkpoint chooses"
        )
    if not folds:
        raise ValueError(f"`folds` must name a fold, got {folds!r}; {folder} has {', '.join(there)}")
    missing = [str(fold) for fold in folds if str(fold) not in there]
    if missing:
        raise FileNotFoundError(
            f"{folder} has no {checkpoint} of fold {', '.join(missing)}; it has those of {', '.join(there)}"
        )
    return [fold if fold == "all" else int(fold) for fold in folds]


def _json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: nnU-Net's training puts it into the model folder")
    return json.loads(path.read_text(encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    """What predicts of a checkpoint, on the CPU. No code in it is run."""
    # The log that nnU-Net's trainer keeps may hold numbers of NumPy.
    scalar = np.float64(0).__reduce__()[0]
    types = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.bool_)]
    try:
        with torch.serialization.safe_globals([scalar, np.dtype, *types]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise AdviceError(
            f"the checkpoint {path} cannot be read without running code in it ({str(error).splitlines()[0]}): where "
            f"you trust it, save it again with the entries {', '.join(_ENTRIES)} alone"
        ) from error
    # Without the optimizer's state, which is twice as large as the weights.
    return {name: content[name] for name in _ENTRIES if name in content}
