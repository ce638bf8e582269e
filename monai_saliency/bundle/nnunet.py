"""nnU-Net in bundles: the cases of a folder with its names, and MONAI's wrapper of it (``monai.apps.nnunet``).

The wrapper takes an image as it is in the file, preprocesses it, and gives labels, which show no gradual change. So its
logits are explained, on nnU-Net's own grid, with nnU-Net's own patches; maps go back to the wrapper's input, and from
there through the bundle's preprocessing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import ResampleToMatch

from monai_saliency.data.cohort import find_cases
from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.networks.nnunet import network_of
from monai_saliency.storage.files import scan_stem
from monai_saliency.transforms import NNUNetPreprocessd
from monai_saliency.utils.arguments import a_path

__all__ = ["WrappedNNUNet", "find_nnunet_cases", "predicting"]

_FOLDERS = {None: ("imagesTs", "imagesTr"), "test": ("imagesTs",), "training": ("imagesTr",)}


def find_nnunet_cases(
    dataset_dir: str | Path,
    channels: int = 1,
    section: str | None = None,
    exclude: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Find the scans that a model of nnU-Net predicts.

    nnU-Net's files are called ``<case>_0000.nii.gz``, ``<case>_0001.nii.gz`` and so on, one for each channel. For one
    channel the number may be left out.

    Args:
        dataset_dir: a folder or list of scans, as for :func:`~monai_saliency.data.find_cases`, or the folder of a
            dataset below ``nnUNet_raw``, whose ``imagesTs`` is taken.
        channels: how many channels the model reads.
        section: of a dataset's folder: ``"test"`` (``imagesTs``) or ``"training"`` (``imagesTr``). Default: the first
            that there is.
        exclude: a folder whose files are not scans of the cohort.

    Returns:
        one dictionary for each case, as of :func:`~monai_saliency.data.find_cases`; ``image`` is a list of files where
        a case has several.

    Raises:
        FileNotFoundError, ValueError: as for :func:`~monai_saliency.data.find_cases`, and when a case lacks the file of
            a channel.
    """
    root = _images(a_path("dataset_dir", dataset_dir), section)
    listed = root.is_file() or (root / "dataset.json").is_file()
    found = find_cases(root, section if listed else None, exclude, channels=channels)
    cases: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[int, str]] = {}
    for each in found:
        # A DICOM series has a list of files.
        is_file = not listed and isinstance(each["image"], str)
        number = re.search(r"_(\d{4})$", scan_stem(each["image"])) if is_file else None
        if number is None:
            cases[each["case"]] = each
            continue
        name = each["case"].removesuffix(number[0])
        files.setdefault(name, {})[int(number[1])] = each["image"]
    for name, by_channel in files.items():
        if name in cases or sorted(by_channel) != list(range(channels)):
            wanted = ", ".join(f"{Path(name).name}_{channel:04d}" for channel in range(channels))
            has = ", ".join(Path(by_channel[channel]).name for channel in sorted(by_channel))
            raise ValueError(
                f"case {name} of {root} must have {channels} channel{'s' * (channels > 1)}, each in a file ({wanted}), "
                f"got {has}" + (" and a file without a number" if name in cases else "")
            )
        image = [by_channel[channel] for channel in range(channels)]
        label = _label(Path(image[0]))
        cases[name] = {
            "case": name,
            "image": image if len(image) > 1 else image[0],
            "label": label,
            "channels": channels,
        }
    return [cases[name] for name in sorted(cases)]


def _images(root: Path, section: str | None) -> Path:
    """The folder of a dataset's images, where it is one of ``nnUNet_raw``."""
    listing = root / "dataset.json"
    if not listing.is_file():
        return root
    try:
        ending = json.loads(listing.read_text(encoding="utf-8")).get("file_ending")
    except (ValueError, AttributeError):  # said where it is read
        return root
    folders = [root / name for name in _FOLDERS.get(section, ()) if (root / name).is_dir()]
    return folders[0] if ending and folders else root


def _label(image: Path) -> str:
    """The label map of a case in ``imagesTr`` or ``imagesTs``, beside that folder."""
    name = re.sub(r"_\d{4}(?=\.)", "", image.name)
    label = image.parent.with_name(image.parent.name.replace("images", "labels", 1)) / name
    return str(label) if label.is_file() and label.parent != image.parent else ""


class WrappedNNUNet:
    """Stands for an evaluator whose network is MONAI's ``ModelnnUNetWrapper``."""

    def __init__(self, evaluator: Any) -> None:
        predictor = evaluator.network.predictor
        self.device = torch.device(predictor.device)
        self.network = network_of(predictor, predictor.use_mirroring).to(self.device)
        self.inferer = NNUNetInferer(
            predictor.configuration_manager.patch_size, predictor.tile_step_size, predictor.use_gaussian
        )
        self.activation = "sigmoid" if predictor.label_manager.has_regions else "softmax"
        self.amp = self.device.type == "cuda"
        self.amp_kwargs: dict[str, Any] = {}
        self.meter = getattr(evaluator, "meter", None)
        plans = predictor.plans_manager.plans, predictor.dataset_json
        names = predictor.plans_manager.available_configurations
        settings = predictor.configuration_manager.configuration
        same = (name for name in names if predictor.plans_manager.get_configuration(name).configuration == settings)
        self._arguments = *plans, next(same)
        self._transforms: dict[Any, NNUNetPreprocessd] = {}

    def transform(self, key: Any) -> NNUNetPreprocessd:
        """What the wrapper does to its input, which a case holds under a key: the same object at each call."""
        if key not in self._transforms:
            self._transforms[key] = NNUNetPreprocessd(key, *self._arguments, as_given=True)
        return self._transforms[key]

    def preprocess(self, case: dict[Any, Any], key: Any) -> MetaTensor:
        """What nnU-Net's network gets of the image ``(C, *spatial)`` under a key of a case."""
        return self.transform(key)({key: case[key]})[key].to(self.device)

    @staticmethod
    def on_grid(labels: torch.Tensor, image: MetaTensor) -> torch.Tensor:
        """A label map on the grid of a preprocessed image."""
        return ResampleToMatch(mode="nearest", padding_mode="zeros")(labels.cpu(), image.cpu())


def predicting(evaluator: Any) -> Any:
    """What predicts in an evaluator: the evaluator itself, or what is inside of MONAI's nnU-Net wrapper."""
    is_wrapped = type(evaluator.network).__name__ == "ModelnnUNetWrapper" and hasattr(evaluator.network, "predictor")
    return WrappedNNUNet(evaluator) if is_wrapped else evaluator
