"""Tables of a case's maps in regions: in the regions that its masks hide, and in the regions of its label map."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.transforms import MapTransform
from monai.utils import CommonKeys

from monai_saliency.estimators.shapley import shapley_values
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.storage.tables import LABEL_REGION_COLUMNS, REGION_COLUMNS, CaseTable
from monai_saliency.transforms.save import LABEL_KEY
from monai_saliency.utils.affines import image_spacing

__all__ = ["SaveLabelRegionsd", "SaveRegionsd", "label_region_rows", "region_rows"]

logger = logging.getLogger(__name__)

# Larger labels are no numbers of regions; FreeSurfer's go to 14175.
_LARGEST = 100_000


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


class SaveLabelRegionsd(MapTransform):
    """Adds the mean of a case's maps in each region of its label map to a CSV table, for any method.

    The columns are described in :func:`label_region_rows`. The label map is the one under ``"label_on_map"``, which
    :class:`~monai_saliency.transforms.SaveSaliencyd` finds for a picture or a report. A case without one has no rows.

    Args:
        keys: the keys of the maps ``(K, *spatial)``.
        path: the table's file, such as ``label_regions.csv``.
        names: the regions' names, by label; None for no names.
        cases: the names of the cohort's cases. Rows of other cases are removed from the table. None keeps all rows.
        allow_missing_keys: whether items may lack a key.

    Example::

        SaveLabelRegionsd("saliency", "label_regions.csv")(
            {"saliency": maps, "label_on_map": organs, "explanation": explanation, "case": "a"}
        )
    """

    def __init__(
        self,
        keys: KeysCollection,
        path: str | Path,
        names: Mapping[Any, str] | None = None,
        cases: Sequence[str] | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.table = CaseTable(path, cases, LABEL_REGION_COLUMNS)
        self.names = names

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        label, explanation = data.get(LABEL_KEY), data.get("explanation")
        for key in self.key_iterator(dict(data)):
            case, rows = str(data["case"]), []
            if label is not None and explanation is not None:
                rows = label_region_rows(case, explanation, data[key].numpy(force=True), label, self.names)
            self.table.replace({case}, rows)
        return data

    def withdraw(self, case: str) -> None:
        """Remove the rows of a case, which an earlier run may have written."""
        self.table.replace({case})


def label_region_rows(
    case: str, explanation: Explanation, maps: np.ndarray, label: np.ndarray, names: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """What the maps ``(K, *spatial)`` of a case are in each region of its label map ``(*spatial)``.

    Returns:
        rows with :data:`LABEL_REGION_COLUMNS`, one for each map and each value of the label map. ``saliency`` is the
        mean of the map in the region, in the map's unit; ``mass`` the region's share of the sum of the map's values
        above 0, in [0, 1], empty where none is; ``voxels`` its size. Region 0 is what no label covers. No rows, with a
        line in the log, where the label map does not hold whole numbers from 0 to 100,000.
    """
    regions = np.nan_to_num(label).astype(np.int64)
    if not np.array_equal(regions, label) or regions.min() < 0 or regions.max() > _LARGEST:
        logger.warning("case %s: its label map does not hold numbers of regions, so they have no means", case)
        return []
    named = {0: "outside", **{int(region): name for region, name in (names or {}).items()}}
    index, counts = regions.ravel(), np.bincount(regions.ravel())
    rows = []
    for (explained, channel, _), saliency in zip(explanation.explained, maps, strict=True):
        sums = np.bincount(index, saliency.ravel())
        positive = np.bincount(index, np.maximum(saliency.ravel(), 0))
        for region in np.flatnonzero(counts).tolist():
            mass = positive[region] / positive.sum() if positive.sum() else ""
            where = "" if channel is None else channel
            cells = region, named.get(region, ""), sums[region] / counts[region], mass, counts[region]
            rows.append(dict(zip(LABEL_REGION_COLUMNS, (case, explained, where, *cells), strict=True)))
    return rows
