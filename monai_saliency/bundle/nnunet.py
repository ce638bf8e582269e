"""The cases of a folder with nnU-Net's names of files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from monai_saliency.data.cohort import find_cases
from monai_saliency.storage.scans import scan_stem


def find_nnunet_cases(
    dataset_dir: str | Path, channels: int = 1, section: str | None = None, exclude: str | Path | None = None
) -> list[dict[str, Any]]:
    """Find the scans that a model of nnU-Net predicts.

    nnU-Net's files are called ``<case>_0000.nii.gz``, ``<case>_0001.nii.gz`` and so on, one for each channel. For one
    channel the number may be left out.

    Args:
        dataset_dir: a folder, such as ``imagesTs``, or a list of scans, as for :func:`~monai_saliency.data.find_cases`.
        channels: how many channels the model reads.
        section: of a list.
        exclude: a folder whose files are not scans of the cohort.

    Returns:
        one dictionary for each case, as of :func:`~monai_saliency.data.find_cases`; ``image`` is a list of files where
        a case has several. Label maps are looked for in ``labelsTs`` next to ``imagesTs``.

    Raises:
        FileNotFoundError, ValueError: as for :func:`~monai_saliency.data.find_cases`, and when a case lacks a channel.
    """
    found = find_cases(dataset_dir, section, exclude, channels=channels)
    if Path(dataset_dir).is_file() or Path(dataset_dir, "dataset.json").is_file():
        return found  # a list, which gives the files of each case
    cases: dict[str, dict[str, Any]] = {}
    numbered: dict[str, list[str]] = {}
    for case in found:
        # A DICOM series has a list of files.
        number = re.search(r"_\d{4}$", scan_stem(case["image"])) if isinstance(case["image"], str) else None
        if number is None:
            cases[case["case"]] = case
        else:
            numbered.setdefault(case["case"].removesuffix(number[0]), []).append(case["image"])
    for name, files in numbered.items():
        images = sorted(files)
        stems = [scan_stem(image) for image in images]
        wanted = [f"{Path(name).name}_{channel:04d}" for channel in range(channels)]
        if name in cases or stems != wanted:
            raise ValueError(
                f"case {name} of {dataset_dir} must have one file for each of {channels} channels, "
                f"{', '.join(wanted)}, got {', '.join(stems)}{' and one without a number' if name in cases else ''}"
            )
        image = images if channels > 1 else images[0]
        cases[name] = {"case": name, "image": image, "label": _label(Path(images[0])), "channels": channels}
    return [cases[name] for name in sorted(cases)]


def _label(image: Path) -> str:
    """The label map of a case in ``imagesTr`` or ``imagesTs``, next to that folder; empty without one."""
    folder = image.parent.with_name(image.parent.name.replace("images", "labels", 1))
    label = folder / re.sub(r"_\d{4}(?=\.)", "", image.name)
    return str(label) if label.is_file() and folder != image.parent else ""
