"""What the cases of somebody else's loader are called: by their files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import MetaTensor
from monai.utils import ImageMetaKey, OptionalImportError, WSIPatchKeys

from monai_saliency.data.case_ids import CaseIds
from monai_saliency.storage.dicom import holds_series, order_problem, series_files, series_id
from monai_saliency.transforms.check import header_problem

__all__ = ["CaseNames", "input_file"]


def input_file(image: Any) -> Path | None:
    """The file, or the folder of slices, that an image was loaded from; None if it does not say."""
    meta = image.meta if isinstance(image, MetaTensor) else {}
    name = meta.get(ImageMetaKey.FILENAME_OR_OBJ, meta.get(WSIPatchKeys.PATH))
    name = name[0] if isinstance(name, (list, tuple)) and name else name
    return Path(name) if isinstance(name, (str, Path)) and str(name) and Path(name).exists() else None


class CaseNames:
    """Names cases by their files, whatever other cases this process meets."""

    def __init__(self, loader: Any, dataset: Any, image_key: Hashable, file_key: Hashable) -> None:
        self.image_key = image_key
        self._files = _files(dataset, image_key) or _files(dataset, file_key)
        listed = Counter(map(os.path.abspath, self._files))
        self._twice = {file for file, count in listed.items() if count > 1}
        root = Path(os.path.commonpath([Path(file).parent for file in listed])) if listed else None
        self._ids = CaseIds(root, self._files)
        self._met: dict[str, str] = {}
        # The batches of a loader whose dataset gives each file once; further ones are pieces that a loader cuts.
        once = bool(listed) and not self._twice and len(dataset) == len(listed) == _length(loader.dataset)
        self._num_batches = _length(loader) if once else 0
        self._again: set[str] = set()

    def name(self, case: dict[Hashable, Any], place: str) -> str:
        """What to call a case: its file's path below the cohort's common folder, without its suffix unless two files
        differ in nothing else. Then the corner of a patch, and the place if the file gives several cases.
        """
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return f"{case.get('case', 'case')}-{place}"
        name, corner = self._name(file), image.meta.get(WSIPatchKeys.LOCATION)
        if corner is not None:
            name = f"{name}_patch-{'-'.join(map(str, np.atleast_1d(np.asarray(corner)).astype(int).tolist()))}"
        met = self._met.setdefault(name, place)
        batches = met.partition("-")[0], place.partition("-")[0]
        if corner is None and batches[0] != batches[1] and int(batches[1]) < self._num_batches:
            self._again.add(name)
            return name
        twice = corner is None and os.path.abspath(file) in self._twice
        return f"{name}-{place}" if met != place or twice else name

    def is_again(self, case: dict[Hashable, Any]) -> bool:
        """Whether a named case was met in an earlier batch: a loader that ends early begins anew."""
        return case["case"] in self._again

    def all(self, case: dict[Hashable, Any]) -> list[str] | None:
        """What all cases are called, if they are like this one; None if the dataset does not list them."""
        image = case[self.image_key]
        if not self._files or self._twice or input_file(image) is None or WSIPatchKeys.LOCATION in image.meta:
            return None
        return [self._name(file) for file in self._files]

    def _name(self, file: Path) -> str:
        """What a file's case is called. Names of DICOM files and folders may be a patient's."""
        name = self._ids(file)
        return series_id(name) if holds_series(file) else name

    def problem(self, case: dict[Hashable, Any], dicom: bool) -> str | None:
        """Why a case's map can lie nowhere, by its file's header; None if it can."""
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return None
        # A folder is read as one volume, by a reader that may not see gaps.
        if image.ndim == 4 and (file.is_dir() or dicom) and holds_series(file):
            with suppress(OptionalImportError):
                return order_problem(series_files(file)) or header_problem(image, image.ndim - 1)
        return header_problem(image, image.ndim - 1)


def _files(dataset: Any, key: Hashable) -> list[Path]:
    """The files of all of a dataset's items; empty if it does not list them."""
    items = getattr(dataset, "data", None)
    values = (
        [item.get(key) if isinstance(item, dict) else item for item in items]
        if isinstance(items, (list, tuple))
        else []
    )
    firsts: list[Any] = [value[0] if isinstance(value, (list, tuple)) and value else value for value in values]
    return [Path(each) for each in firsts] if all(isinstance(each, (str, Path)) for each in firsts) else []


def _length(value: Any) -> int:
    """How long something is; 0 if it does not know, as a loader of pieces that are cut as they come."""
    try:
        return len(value)
    except TypeError:
        return 0
