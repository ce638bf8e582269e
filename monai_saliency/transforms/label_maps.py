"""Label maps whose regions are hidden: loaded on the image's grid, and the table of what each was worth."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monai.config import KeysCollection
from monai.transforms import EnsureChannelFirst, LoadImage, MapTransform, ResampleToMatch
from monai.utils import CommonKeys

from monai_saliency.cases import image_spacing
from monai_saliency.errors import CaseError
from monai_saliency.handlers.summary import REGION_COLUMNS, Summary, region_rows

__all__ = ["LoadRegionsD", "LoadRegionsDict", "LoadRegionsd", "SaveRegionsD", "SaveRegionsDict", "SaveRegionsd"]


class LoadRegionsd(MapTransform):
    """Loads label maps, organs or an atlas, and brings them to an image's grid by nearest neighbour.

    Place it at the end of the preprocessing. A label map may lie on any grid: only its place in the scanner counts.
    Where it does not reach, the label is 0.

    Args:
        keys: the label maps' files.
        names: where the label maps ``(1, *spatial)`` go, one for each key.
        image_key: the preprocessed image.
        case_key: where an item holds its case's name.
        allow_missing_keys: don't raise for a key that an item lacks.

    Raises:
        CaseError: when a case has no label map.
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
        self.load = LoadImage(image_only=True)
        self.channel_first = EnsureChannelFirst()
        self.match = ResampleToMatch(mode="nearest", padding_mode="zeros")

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key, name in self.key_iterator(d, self.names):
            if not d[key]:
                raise CaseError(
                    str(d.get(self.case_key, key)),
                    f"it has no label map (its {key!r} is empty), so there are no regions to hide: list one in "
                    "dataset.json, or make regions of the scan itself (supervoxels)",
                )
            labels = self.channel_first(self.load(d[key]))
            if len(labels) != 1:
                raise CaseError(
                    str(d.get(self.case_key, key)),
                    f"its label map {d[key]} has {len(labels)} channels, 1 is expected: number the regions in one map",
                )
            d[name] = self.match(labels, d[self.image_key])
        return d


class SaveRegionsd(MapTransform):
    """Adds what a case's map says of each region to a table, ``regions.csv``: see :func:`region_rows`.

    Args:
        keys: the :class:`~monai_saliency.Explanation`.
        path: the table.
        names: the regions' names by label, where they have some.
        image_key: the explained image.
        cases: the cohort's cases; rows of others are dropped. None keeps all.
        allow_missing_keys: don't raise for a key that an item lacks.
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
        self.table = Summary(path, cases, REGION_COLUMNS)
        self.names = names
        self.image_key = image_key

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        for key in self.key_iterator(dict(data)):
            self.table.add(region_rows(data[key], image_spacing(data[self.image_key][None]), self.names))
        return data


LoadRegionsD = LoadRegionsDict = LoadRegionsd
SaveRegionsD = SaveRegionsDict = SaveRegionsd
