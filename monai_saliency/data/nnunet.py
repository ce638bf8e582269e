"""The cases of a folder with nnU-Net's names: one file for each channel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from monai_saliency.data.cohort import find_cases
from monai_saliency.storage.formats import scan_stem
from monai_saliency.utils.arguments import a_path

__all__ = ["find_nnunet_cases"]

_FOLDERS = {None: ("imagesTs", "imagesTr"), "test": ("imagesTs",), "training": ("imagesTr",)}


def find_nnunet_cases(
    dataset_dir: str | Path,
    channels: int = 1,
    section: str | None = None,
    exclude: str | Path | None = None,
    spatial_dims: int = 3,
) -> list[dict[str, Any]]:
    """Find the scans that a model of nnU-Net predicts.

    nnU-Net's files are called ``<case>_0000.nii.gz``, ``<case>_0001.nii.gz`` and so on, one for each channel. For one
    channel the number may be left out. A photograph has all its colours in one file, ``<case>_0000.png``.

    Args:
        dataset_dir: a folder or list of scans, as for :func:`~monai_saliency.data.find_cases`, or the folder of a
            dataset below ``nnUNet_raw``, whose ``imagesTs`` is taken.
        channels: how many channels the model reads.
        section: of a dataset's folder: ``"test"`` (``imagesTs``) or ``"training"`` (``imagesTr``). Default: the first
            that there is.
        exclude: a folder whose files are not scans of the cohort.
        spatial_dims: 3 for scans, 2 for photographs.

    Returns:
        one dictionary for each case, as of :func:`~monai_saliency.data.find_cases`; ``image`` is a list of files where
        a case has several.

    Raises:
        FileNotFoundError, ValueError: as for :func:`~monai_saliency.data.find_cases`, and when a case lacks the file of
            a channel.

    Example::

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     for channel in range(2):
        ...         (Path(folder) / f"brain_000{channel}.nii.gz").touch()
        ...     [case] = find_nnunet_cases(folder, channels=2)
        >>> case["case"], len(case["image"])
        ('brain', 2)
    """
    root = _images(a_path("dataset_dir", dataset_dir), section)
    listed = root.is_file() or (root / "dataset.json").is_file()
    found = find_cases(root, section if listed else None, exclude, spatial_dims, channels)
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
        # How many channels a photograph has is known when it is read.
        expected = range(min(len(by_channel), channels) if spatial_dims == 2 else channels)
        if name in cases or sorted(by_channel) != list(expected):
            wanted = ", ".join(f"{Path(name).name}_{channel:04d}" for channel in range(channels))
            has = ", ".join(Path(by_channel[channel]).name for channel in sorted(by_channel))
            raise ValueError(
                f"case {name} of {root} must have {channels} channel{'s' * (channels > 1)}, each in a file ({wanted}), "
                f"got {has}" + (" and a file without a number" if name in cases else "")
            )
        image = [by_channel[channel] for channel in expected]
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
