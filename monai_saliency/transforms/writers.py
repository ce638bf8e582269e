"""Everything that is written for a case, as one list that our bundle, the overlay and ``attach`` share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monai.transforms import Compose, Transform
from monai.utils import CommonKeys

from monai_saliency.storage.files import error_key
from monai_saliency.transforms.regions import SaveRegionsd
from monai_saliency.transforms.save import SaveSaliencyd
from monai_saliency.transforms.save_bids import BIDS_FOLDER, SaveBidsd
from monai_saliency.transforms.save_dicom import SaveDicomd
from monai_saliency.utils.arguments import a_path


def case_writers(
    output_dir: str | Path,
    key: str = "saliency",
    image_key: str = CommonKeys.IMAGE,
    *,
    picture: bool = True,
    picture_format: str = "png",
    picture_scale: float | None = None,
    dicom: bool = False,
    dicom_seg: float | None = None,
    bids: bool = False,
    report: bool = True,
    region_names: Mapping[Any, str] | None = None,
    class_names: Mapping[Any, str] | Sequence[str] | None = None,
) -> Compose:
    """The transforms that write a case's files. A new output format is a transform and a line here.

    The DICOM and the BIDS writer are left out where they are off, unless the output folder has such files: then they
    remove what an earlier run has written of a case. The keyword arguments are settings: bundles read them from ids of
    these names (:func:`writer_settings`).

    Args:
        output_dir: the output folder.
        key: the key of the map ``(K, *spatial)``, and the ending of its files' names.
        image_key: the key of the network's input, for the volumes of regions.
        picture: whether to draw pictures.
        picture_format: of these, ``"png"`` or ``"svg"``.
        picture_scale: the largest absolute value of their colour bars, in the map's unit; by default the score's range
            where it is known.
        dicom: whether to write the maps of DICOM series as DICOM too.
        dicom_seg: the share of a map's largest value, in (0, 1], above which voxels belong to a DICOM Segmentation.
            None writes none.
        bids: whether to write the maps of scans of a BIDS dataset as a BIDS derivative too.
        report: whether to keep in ``views/`` what a report shows of the scans.
        region_names: the names of regions by label, for ``regions.csv`` and ``label_regions.csv``.
        class_names: the names of classes or output channels for the report, by number or in order. A bundle's are in
            its metadata (``channel_def``).

    Raises:
        ValueError: when a setting is wrong.
        OptionalImportError: when ``dicom`` or ``dicom_seg`` is set and highdicom is not installed.
    """
    folder = a_path("output_dir", output_dir)
    others = [error_key(key), "disagreement"]
    writers: list[Transform] = [
        SaveSaliencyd(
            key,
            folder,
            picture=picture,
            picture_format=picture_format,
            scale=picture_scale,
            report=report,
            class_names=class_names,
        ),
        SaveSaliencyd(others, folder, picture=False, allow_missing_keys=True),
        SaveRegionsd(folder, region_names, key, image_key),
    ]
    if dicom or dicom_seg is not None or any(folder.rglob("*.dcm")):
        writers.append(SaveDicomd(key, folder, scale=picture_scale, dicom=dicom, dicom_seg=dicom_seg))
    if bids or (folder / BIDS_FOLDER).exists():
        writers.append(SaveBidsd([key, *others], folder, bids=bids, allow_missing_keys=True))
    return Compose(writers)


def writer_settings() -> list[str]:
    """The names of the settings of :func:`case_writers`, which are ids of configs."""
    parameters = inspect.signature(case_writers).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
