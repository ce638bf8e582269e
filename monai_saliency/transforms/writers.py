"""Everything that is written for a case, as one list that our bundle, the overlay and ``attach`` share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monai.transforms import Compose
from monai.utils import CommonKeys

from monai_saliency.transforms.label_maps import SaveRegionsd
from monai_saliency.transforms.save import GRID_KEY, SaveSaliencyd, error_key
from monai_saliency.transforms.save_dicom import SaveDicomd
from monai_saliency.utils.arguments import a_path, check_option, positive_or_none
from monai_saliency.visualize.pictures import PICTURE_FORMATS

__all__ = ["case_writers", "writer_settings"]


def case_writers(
    output_dir: str | Path,
    key: str = "saliency",
    image_key: str = CommonKeys.IMAGE,
    cases: Sequence[str] | None = None,
    prefix: str = "",
    *,
    picture: bool = True,
    picture_format: str = "png",
    picture_scale: float | None = None,
    dicom: bool = False,
    report: bool = True,
    region_names: Mapping[Any, str] | None = None,
) -> Compose:
    """The transforms that write a case's files. A new output format is a transform and a line here.

    The keyword arguments are settings: bundles read them from ids of these names (:func:`writer_settings`).

    Args:
        output_dir: the output folder.
        key: the key of the map ``(K, *spatial)``, and the ending of its files' names.
        image_key: the key of the network's input, for the volumes of regions.
        cases: the names of the cohort's cases, for ``regions.csv``; None keeps the rows of others.
        prefix: what precedes the settings' names in a config, for errors.
        picture: whether to draw pictures.
        picture_format: of these, ``"png"`` or ``"svg"``.
        picture_scale: the largest absolute value of their colour bars, in the map's unit; by default the score's range
            where it is known.
        dicom: whether to write the maps of DICOM series as DICOM too.
        report: whether to keep in ``views/`` what a report shows of the scans.
        region_names: the names of regions by label, for ``regions.csv``.

    Raises:
        ValueError: when a setting is wrong.
        OptionalImportError: when ``dicom`` is set and highdicom is not installed.

    Example::

        >>> [type(step).__name__ for step in case_writers("maps").transforms]
        ['SaveSaliencyd', 'SaveDicomd', 'SaveSaliencyd', 'SaveRegionsd']
    """
    drawn: dict[str, Any] = {"picture": picture, "scale": positive_or_none(f"{prefix}picture_scale", picture_scale)}
    drawn["picture_format"] = check_option(f"{prefix}picture_format", picture_format, PICTURE_FORMATS)
    folder = a_path("output_dir", output_dir)
    on_grid: dict[str, Any] = {"output_dir": folder, "grid_key": GRID_KEY}
    return Compose(
        [
            SaveSaliencyd(key, **on_grid, **drawn, report=report),
            SaveDicomd(key, **on_grid, dicom=dicom, scale=picture_scale),
            SaveSaliencyd([error_key(key), "disagreement"], **on_grid, picture=False, allow_missing_keys=True),
            SaveRegionsd(
                folder / "regions.csv", names=region_names, image_key=image_key, cases=cases, allow_missing_keys=True
            ),
        ]
    )


def writer_settings() -> list[str]:
    """The names of the settings of :func:`case_writers`, which are ids of configs."""
    parameters = inspect.signature(case_writers).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
