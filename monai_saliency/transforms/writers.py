"""Everything that is written for a case, as one list that our bundle, the overlay and ``attach`` share."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.transforms import Compose, MapTransform
from monai.utils import CommonKeys

from monai_saliency.cases import image_spacing
from monai_saliency.estimators.shapley import shapley_values
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.storage.tables import REGION_COLUMNS, CaseTable
from monai_saliency.transforms.regions import SaveLabelRegionsd
from monai_saliency.transforms.save import GRID_KEY, SaveSaliencyd, error_key
from monai_saliency.transforms.save_bids import SaveBidsd
from monai_saliency.transforms.save_dicom import SaveDicomd
from monai_saliency.utils.arguments import a_path

__all__ = ["SaveRegionsd", "case_writers", "region_rows", "writer_settings"]


def case_writers(
    output_dir: str | Path,
    key: str = "saliency",
    image_key: str = CommonKeys.IMAGE,
    cases: Sequence[str] | None = None,
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

    The keyword arguments are settings: bundles read them from ids of these names (:func:`writer_settings`).

    Args:
        output_dir: the output folder.
        key: the key of the map ``(K, *spatial)``, and the ending of its files' names.
        image_key: the key of the network's input, for the volumes of regions.
        cases: the names of the cohort's cases, for the tables of regions; None keeps the rows of others.
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

    Example::

        >>> [type(step).__name__ for step in case_writers("maps").transforms]
        ['SaveSaliencyd', 'SaveDicomd', 'SaveSaliencyd', 'SaveRegionsd', 'SaveLabelRegionsd', 'SaveBidsd']
    """
    drawn: dict[str, Any] = {"picture": picture, "scale": picture_scale, "picture_format": picture_format}
    folder = a_path("output_dir", output_dir)
    on_grid: dict[str, Any] = {"output_dir": folder, "grid_key": GRID_KEY}
    others = [error_key(key), "disagreement"]
    regions = SaveRegionsd(
        folder / "regions.csv", names=region_names, image_key=image_key, cases=cases, allow_missing_keys=True
    )
    label_regions = SaveLabelRegionsd(key, folder / "label_regions.csv", region_names, cases)
    tables = regions.table, label_regions.table
    return Compose(
        [
            SaveSaliencyd(key, **on_grid, **drawn, report=report, class_names=class_names),
            SaveDicomd(key, **on_grid, scale=picture_scale, dicom=dicom, dicom_seg=dicom_seg),
            SaveSaliencyd(others, **on_grid, picture=False, allow_missing_keys=True),
            regions,
            label_regions,
            SaveBidsd([key, *others], **on_grid, tables=tables, bids=bids, allow_missing_keys=True),
        ]
    )


def writer_settings() -> list[str]:
    """The names of the settings of :func:`case_writers`, which are ids of configs."""
    parameters = inspect.signature(case_writers).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


class SaveRegionsd(MapTransform):
    """Adds a case's regions to a CSV table: the map's value and the volume of each region.

    The columns are described in :func:`region_rows`. A case whose masks are not made of regions has no rows.

    Args:
        path: the table's file, such as ``regions.csv``.
        keys: the keys of the :class:`~monai_saliency.Explanation` objects.
        names: the regions' names, by label; None for no names.
        image_key: the key of the explained image, for its voxel sizes.
        cases: the names of the cohort's cases. Rows of other cases are removed from the table. None keeps all rows.
        allow_missing_keys: whether items may lack a key.

    Example::

        SaveRegionsd("regions.csv")({"explanation": explanation, "image": image, "case": "a"})
    """

    def __init__(
        self,
        path: str | Path,
        keys: KeysCollection = "explanation",
        names: Mapping[Any, str] | None = None,
        image_key: str = CommonKeys.IMAGE,
        cases: Sequence[str] | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.table = CaseTable(path, cases, REGION_COLUMNS)
        self.names = names
        self.image_key = image_key

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        for key in self.key_iterator(dict(data)):
            if data[key].masks.regions is None:
                self.withdraw(data[key].name)
            else:
                self.table.add(region_rows(data[key], image_spacing(data[self.image_key][None]), self.names))
        return data

    def withdraw(self, case: str) -> None:
        """Remove the rows of a case, which an earlier run may have written."""
        if self.table.path.exists():
            self.table.replace({case})


def region_rows(
    explanation: Explanation, spacing: Sequence[float] | None = None, names: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """The values of the regions in the maps of a case, as rows with :data:`REGION_COLUMNS`: ``saliency`` in the score's
    unit, the volume in ml on the grid that the network sees; ``kind`` is ``region``. Numbers of the case that were
    hidden too follow, with the ``kind`` ``number``, their ``value`` and ``baseline``.
    """
    regions = explanation.masks.regions
    if regions is None:
        raise ValueError("the masks are not made of regions, so no region has a value: use RegionMasks")
    named = {int(label): name for label, name in (names or {}).items()}
    index = regions.index.flatten().cpu()
    counts = index.bincount(minlength=len(regions.values) + 1)
    # A region of a 2D image has no volume.
    voxel = float(np.prod(spacing)) / 1000 if spacing is not None and len(spacing) == 3 else None
    rows = []
    for (label, channel, _), saliency in zip(explanation.explained, explanation.saliency, strict=True):
        # The map is constant inside a region, so the mean is its value there.
        values = index.bincount(saliency.flatten().cpu().double(), minlength=len(counts)) / counts
        for place, region in enumerate(regions.values, start=1):
            volume = "" if voxel is None else round(int(counts[place]) * voxel, 6)
            where = "" if channel is None else channel
            name = named.get(int(region), "")
            cells = explanation.name, label, where, "region", region, name, float(values[place]), volume, "", ""
            rows.append(dict(zip(REGION_COLUMNS, cells, strict=True)))
    return [*rows, *_number_rows(explanation)]


def _number_rows(explanation: Explanation) -> list[dict[str, Any]]:
    """The Shapley values of a case's numbers, for each score."""
    if not (numbers := explanation.masks.numbers):
        return []
    found, rows = shapley_values(explanation), []
    for place, label in enumerate(explanation.target.labels):
        values = found.table(place)
        for name, (value, baseline) in numbers.items():
            cells = explanation.name, label, "", "number", "", name, values[name], "", value, baseline
            rows.append(dict(zip(REGION_COLUMNS, cells, strict=True)))
    return rows
