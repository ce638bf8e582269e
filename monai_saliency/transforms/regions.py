"""Tables of a case's maps in regions: in those that its masks hide, and in those of its label map."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.transforms import Transform
from monai.utils import CommonKeys

from monai_saliency.estimators.shapley import shapley_values
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.storage.tables import LABEL_REGION_COLUMNS, REGION_COLUMNS, CaseTable
from monai_saliency.transforms.save import LABEL_KEY
from monai_saliency.utils.affines import image_spacing
from monai_saliency.utils.arguments import a_path

logger = logging.getLogger(__name__)

# Larger labels are no numbers of regions; FreeSurfer's go to 14175.
_LARGEST = 100_000


class SaveRegionsd(Transform):
    """Writes a case's regions into two CSV tables in the output folder.

    ``regions.csv`` has the map's value and the volume of each region that its masks hide (:func:`region_rows`);
    ``label_regions.csv`` the map's mean in each region of its label map, for any method (:func:`label_region_rows`).
    The label map is the one under ``"label_on_map"``, which :class:`~monai_saliency.transforms.SaveSaliencyd` finds for
    a picture or a report. A case whose masks are not made of regions, or without a label map, has no rows there.

    Args:
        output_dir: the output folder.
        names: the regions' names, by label; None for no names.
        key: the key of the maps ``(K, *spatial)``.
        image_key: the key of the explained image, for its voxel sizes.

    Example::

        SaveRegionsd("maps")(
            {"case": "a", "image": image, "saliency": maps, "explanation": explanation, "label_on_map": organs}
        )
    """

    def __init__(
        self,
        output_dir: str | Path,
        names: Mapping[Any, str] | None = None,
        key: str = "saliency",
        image_key: str = CommonKeys.IMAGE,
    ) -> None:
        folder = a_path("output_dir", output_dir)
        self.hidden = CaseTable(folder / "regions.csv", REGION_COLUMNS)
        self.labelled = CaseTable(folder / "label_regions.csv", LABEL_REGION_COLUMNS)
        self.names = names
        self.key = key
        self.image_key = image_key

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        case, explanation, label = str(data["case"]), data.get("explanation"), data.get(LABEL_KEY)
        hidden, labelled = [], []
        if explanation is not None and explanation.masks is not None and explanation.masks.regions is not None:
            hidden = region_rows(explanation, image_spacing(data[self.image_key][None]), self.names)
        if explanation is not None and label is not None:
            maps = data[self.key].numpy(force=True)
            labelled = label_region_rows(case, explanation, maps, label, self.names)
        self.hidden.replace({case}, hidden)
        self.labelled.replace({case}, labelled)
        return data

    def withdraw(self, case: str) -> None:
        """Remove the rows of a case, which an earlier run may have written."""
        self.hidden.replace({case})
        self.labelled.replace({case})


def region_rows(
    explanation: Explanation, spacing: Sequence[float] | None = None, names: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """The values of the regions in the maps of a case whose masks are made of regions, as rows with
    :data:`REGION_COLUMNS`: ``saliency`` in the score's unit, the volume in ml on the grid that the network sees;
    ``kind`` is ``region``. Numbers of the case that were hidden too follow, with the ``kind`` ``number``, their
    ``value`` and ``baseline``.
    """
    assert explanation.masks is not None
    regions = explanation.masks.regions
    assert regions is not None
    named = {int(label): name for label, name in (names or {}).items()}
    index = regions.index.flatten().cpu()
    counts = index.bincount(minlength=len(regions.values) + 1)
    has_volume = spacing is not None and len(spacing) == 3  # a region of a 2D image has none
    volumes = (counts * float(np.prod(spacing or 0)) / 1000).double().tolist()
    rows = []
    for (label, channel, _), saliency in zip(explanation.explained, explanation.saliency, strict=True):
        # The map is constant inside a region, so the mean is its value there.
        means = index.bincount(saliency.flatten().cpu().double(), minlength=len(counts)) / counts
        for place, region in enumerate(regions.values, start=1):
            rows.append(
                {
                    "case": explanation.name,
                    "class": label,
                    "channel": channel,
                    "kind": "region",
                    "region": region,
                    "name": named.get(int(region), ""),
                    "saliency": float(means[place]),
                    "volume_ml": round(volumes[place], 6) if has_volume else "",
                }
            )
    return rows + _number_rows(explanation)


def _number_rows(explanation: Explanation) -> list[dict[str, Any]]:
    """The Shapley values of a case's numbers, for each score."""
    numbers = {} if explanation.masks is None else explanation.masks.numbers
    if not numbers:
        return []
    shapley, rows = shapley_values(explanation), []
    for place, label in enumerate(explanation.target.labels):
        values = shapley.table(place)
        for name, (value, baseline) in numbers.items():
            row = {"case": explanation.name, "class": label, "kind": "number", "name": name, "saliency": values[name]}
            rows.append(row | {"value": value, "baseline": baseline})
    return rows


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
    index = regions.ravel()
    counts = np.bincount(index)
    rows = []
    for (explained, channel, _), saliency in zip(explanation.explained, maps, strict=True):
        sums = np.bincount(index, saliency.ravel())
        positive = np.bincount(index, np.maximum(saliency.ravel(), 0))
        total = positive.sum()
        for region in np.flatnonzero(counts).tolist():
            rows.append(
                {
                    "case": case,
                    "class": explained,
                    "channel": channel,
                    "region": region,
                    "name": named.get(region, ""),
                    "saliency": sums[region] / counts[region],
                    "mass": positive[region] / total if total else "",
                    "voxels": counts[region],
                }
            )
    return rows
