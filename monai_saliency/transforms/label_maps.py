"""Label maps whose regions are hidden: loading them on the image's grid, and writing the table of their regions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import EnsureChannelFirst, MapTransform, ResampleToMatch
from monai.utils import CommonKeys

from monai_saliency.cases import image_spacing
from monai_saliency.errors import CaseError, as_case_error
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.storage.formats import load_image
from monai_saliency.storage.tables import REGION_COLUMNS, CaseTable
from monai_saliency.utils.tensors import check_labels, plain, with_meta_of

__all__ = [
    "REGION_COLUMNS",
    "LoadRegionsD",
    "LoadRegionsDict",
    "LoadRegionsd",
    "SaveRegionsD",
    "SaveRegionsDict",
    "SaveRegionsd",
    "region_rows",
]


class LoadRegionsd(MapTransform):
    """Loads label maps (organs or an atlas) and resamples them to an image's grid by nearest neighbour.

    Place it at the end of the preprocessing. A label map may have any grid: it is placed by its affine. Outside the
    label map the label is 0.

    Args:
        keys: the keys of the label maps' files.
        names: the keys of the loaded label maps ``(1, *spatial)``, one for each of ``keys``.
        image_key: the key of the preprocessed image ``(C, *spatial)``.
        case_key: the key of the case's name, for errors.
        allow_missing_keys: whether items may lack a key.

    Raises:
        ValueError: when there is not one name for each key.
        CaseError: when called, if a case has no label map, one that cannot be loaded, or one with several channels.

    Example::

        item = LoadRegionsd("organs")({"image": image, "organs": "organs.nii.gz", "case": "a"})
        item["regions"]  # (1, *spatial) on the image's grid
    """

    def __init__(
        self,
        keys: KeysCollection = CommonKeys.LABEL,
        names: str | Sequence[str] = "regions",
        image_key: str = CommonKeys.IMAGE,
        case_key: str = "case",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.names = (names,) if isinstance(names, str) else tuple(names)
        if len(self.names) != len(self.keys):
            raise ValueError(f"`names` must name one place for each of the keys {self.keys}, got {self.names}")
        self.image_key = image_key
        self.case_key = case_key
        self.load = load_image(image_only=True, dtype=np.float64)  # which holds large labels exactly
        self.channel_first = EnsureChannelFirst()
        self.match = ResampleToMatch(mode="nearest", padding_mode="zeros")

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key, name in self.key_iterator(d, self.names):
            case = str(d.get(self.case_key, key))
            if not d[key]:
                raise CaseError(
                    case,
                    f"it has no label map (its {key!r} is empty), so there are no regions to hide: list one in "
                    "dataset.json, or make regions from the scan itself (supervoxels)",
                )
            labels = self._load(d, key)
            if len(labels) != 1:
                raise CaseError(
                    case,
                    f"its label map {d[key]} has {len(labels)} channels, 1 is expected: number the regions in one map",
                )
            try:
                check_labels(labels)
            except ValueError as error:
                words = str(error).replace("the label map", f"its label map {d[key]}", 1)
                raise CaseError(case, words) from error
            d[name] = self._matched(labels, d[self.image_key])
        return d

    def _matched(self, labels: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        # MONAI resamples to float32, which rounds large labels, so it gets their places in a list; 0 is around the map.
        values, places = plain(labels).unique(return_inverse=True)
        matched = self.match(MetaTensor(places + 1).copy_meta_from(labels), image)
        return with_meta_of(matched, torch.cat([values.new_zeros(1), values])[plain(matched).long()])

    def _load(self, data: Mapping[Hashable, Any], key: Hashable) -> torch.Tensor:
        try:
            return self.channel_first(self.load(data[key]))
        except Exception as error:  # the scan itself may be in order, so the file is named
            raise as_case_error(
                error,
                str(data.get(self.case_key, key)),
                before=f"its label map {data[key]} could not be loaded: ",
                after=". Mend or replace that file, or make regions from the scan itself (supervoxels)",
            ) from error


class SaveRegionsd(MapTransform):
    """Adds a case's regions to a CSV table: the map's value and the volume of each region.

    The columns are described in :func:`region_rows`. Cases whose masks are not made of regions are left alone.

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
                continue
            self.table.add(region_rows(data[key], image_spacing(data[self.image_key][None]), self.names))
        return data

    def withdraw(self, case: str) -> None:
        """Remove the rows of a case, which an earlier run may have written."""
        if self.table.path.exists():
            self.table.replace({case})


def region_rows(
    explanation: Explanation, spacing: Sequence[float] | None = None, names: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """The values of the regions in the maps of a case, as rows of a table.

    Args:
        explanation: the result of the inferer, with masks made of regions.
        spacing: the voxel sizes of the explained image in mm, for the volumes. None leaves the volumes empty.
        names: the name of each region, by label.

    Returns:
        one dictionary for each map and region, with the keys of :data:`REGION_COLUMNS`. The value is in the unit of the
        score, the volume in ml on the grid that the network sees.

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
            rows.append(
                {
                    "case": explanation.name,
                    "class": label,
                    "channel": "" if channel is None else channel,
                    "region": region,
                    "name": named.get(int(region), ""),
                    "saliency": float(values[place]),
                    "volume_ml": "" if voxel is None else round(int(counts[place]) * voxel, 6),
                }
            )
    return rows


LoadRegionsD = LoadRegionsDict = LoadRegionsd
SaveRegionsD = SaveRegionsDict = SaveRegionsd
