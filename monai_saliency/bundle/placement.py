"""Where the maps of somebody else's bundle lie, by the way back through its preprocessing, and what its cases are
called, by their files.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, ConcatItemsd, CopyItemsd, InvertibleTransform, Lambdad, MapTransform
from monai.transforms.utils import convert_applied_interp_mode
from monai.utils import ImageMetaKey, OptionalImportError, TraceKeys, WSIPatchKeys

from monai_saliency.data.cohort import CaseIds
from monai_saliency.storage.dicom import holds_series, order_problem, series_files, series_id
from monai_saliency.storage.scans import header_problem
from monai_saliency.transforms.save import GRID_KEY, error_key, lies_on_scan
from monai_saliency.utils.affines import mm_per_unit
from monai_saliency.utils.inversion import check_inversion, steps_of

__all__ = ["Placement", "input_file"]

logger = logging.getLogger(__name__)


def input_file(image: Any) -> Path | None:
    """The file, or the folder of slices, that an image was loaded from; None if it does not say."""
    meta = image.meta if isinstance(image, MetaTensor) else {}
    name = meta.get(ImageMetaKey.FILENAME_OR_OBJ, meta.get(WSIPatchKeys.PATH))
    name = name[0] if isinstance(name, (list, tuple)) and name else name
    return Path(name) if isinstance(name, (str, Path)) and str(name) and Path(name).exists() else None


class Placement:
    """Names cases by their files, and takes maps from the network's input back through a bundle's preprocessing."""

    def __init__(
        self,
        loader: Any,
        image_key: Hashable,
        saliency_key: str = "saliency",
        nearest: bool = False,
        keeps_place: bool = False,
        setting: str = "keeps_place",
    ) -> None:
        self.image_key = image_key
        self.saliency_key = saliency_key
        self.nearest = nearest
        dataset, self.transform = _preprocessing(loader, image_key)
        self.problem = _unrecorded(self.transform, image_key, keeps_place, setting)
        self._said: set[str] = set()
        # The key of the file that the image was made of; the first one's if it was made of several.
        source = ([image_key] + [before for _, _, before in _backwards(self.transform, image_key)])[-1]
        self._files = _files(dataset, image_key) or _files(dataset, source)
        listed = Counter(map(os.path.abspath, self._files))
        self._twice = {file for file, count in listed.items() if count > 1}
        root = Path(os.path.commonpath([Path(file).parent for file in listed])) if listed else None
        self._ids = CaseIds(root, self._files)
        self._met: dict[str, str] = {}
        # Else a loader cuts files into pieces.
        self._is_whole = bool(listed) and not self._twice and len(listed) == _length(dataset) == _length(loader.dataset)

    def name(self, case: dict[Hashable, Any], place: str) -> str:
        """The name of a case: its file's path below the cohort's common folder, without its suffix unless two files
        differ only there. Then the corner of a patch, and the place if the file gives several cases. Empty for a
        case that was met in an earlier batch: a loader that ended early begins anew.
        """
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return f"{case.get('case', 'case')}-{place}"
        name, corner = self._name(file), image.meta.get(WSIPatchKeys.LOCATION)
        if corner is not None:
            name = f"{name}_patch-{'-'.join(map(str, np.atleast_1d(np.asarray(corner)).astype(int).tolist()))}"
        met = self._met.setdefault(name, place)
        if corner is None and self._is_whole and met.partition("-")[0] != place.partition("-")[0]:
            return ""
        twice = corner is None and os.path.abspath(file) in self._twice
        return f"{name}-{place}" if met != place or twice else name

    def all_names(self, case: dict[Hashable, Any]) -> list[str] | None:
        """The names of all cases, if they are like this one; None if the dataset does not list them."""
        image = case[self.image_key]
        if not self._files or self._twice or input_file(image) is None or WSIPatchKeys.LOCATION in image.meta:
            return None
        return [self._name(file) for file in self._files]

    def _name(self, file: Path) -> str:
        """The name of a file's case. Names of DICOM files and folders may be a patient's."""
        name = self._ids(file)
        return series_id(name) if holds_series(file) else name

    def problem_of(self, case: dict[Hashable, Any], dicom: bool) -> str | None:
        """Why a case's map can lie nowhere, by its file's header; None if it can."""
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return None
        if (unit := mm_per_unit(image.meta)) != 1 and "unit" not in self._said:
            self._said.add("unit")
            words = "peaks and sizes in mm are converted, but the bundle's own transforms take it for 1 mm"
            logger.warning("%s: by its header, 1 in its affine is %g mm: %s", file, unit, words)
        # A folder is read as one volume, by a reader that may not see gaps.
        if image.ndim == 4 and (file.is_dir() or dicom) and holds_series(file):
            with suppress(OptionalImportError):
                return order_problem(series_files(file)) or header_problem(image)
        return header_problem(image)

    def __call__(self, case: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """A case with its maps on the scan's grid, or if no way leads there with the grid that they lie on."""
        image = case[self.image_key]
        if input_file(image) is None:
            return self._keep(case, "they come from no file that is known")
        if WSIPatchKeys.LOCATION in image.meta:
            return self._keep(case, "they are patches of a larger image")
        if self.transform is None:
            return self._keep(case, "the loader's dataset shows no preprocessing that could be inverted")
        check_inversion(str(case["case"]), steps_of(self.transform))
        placed = dict(case)
        for key in {self.saliency_key, error_key(self.saliency_key), "disagreement"} & case.keys():
            back, reason = self._back(case, key)
            if back is None:
                return self._keep(case, reason)
            placed[key] = back
        return placed

    def _back(self, case: dict[Hashable, Any], key: Hashable) -> tuple[torch.Tensor | None, str]:
        """A map on its scan; None if no way leads there, and why."""
        kind = "preprocessing does" if isinstance(self.image_key, str) else "transforms of arrays do"
        reason = f"the bundle's {kind} not lead back to the file's grid"
        if self.problem:
            return None, f"{reason} ({self.problem})"
        problems: list[Exception] = []
        back = case[key].clone()  # a computed map must not be lost with a way that ends half-way
        if isinstance(self.image_key, str):
            back = _inverted(back, case[self.image_key], self.transform, self.image_key, self.nearest, problems)
        elif isinstance(self.transform, InvertibleTransform):
            back = self.transform.inverse(back)
        if lies_on_scan(back):
            return back, ""
        return None, reason + "".join(f" ({type(each).__name__}: {each})" for each in problems[:1])

    def _keep(self, case: dict[Hashable, Any], reason: str) -> dict[Hashable, Any]:
        """A case whose map stays on the grid of the network's input."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("maps lie on the grid of the network's input, with its affine, since %s", reason)
        return {**case, GRID_KEY: case[self.image_key]}


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


def _preprocessing(loader: Any, image_key: Hashable) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset that lists the items, and all that it and the datasets around it apply."""
    nested = list(_nested(getattr(loader, "dataset", None), image_key if isinstance(image_key, int) else 0))
    applied = [getattr(each, "transform", None) for each in reversed(nested)]
    found = [each for each in applied if callable(each) and not (isinstance(each, Compose) and not each.transforms)]
    return (nested or [None])[-1], Compose(found) if len(found) > 1 else (found or [None])[0]


def _nested(dataset: Any, place: int) -> Iterator[Any]:
    """A dataset and those that it wraps, from the outside in; of several in parallel the one at a place."""
    while dataset is not None:
        yield dataset
        name = next((name for name in ("dataset", "datasets", "data") if hasattr(dataset, name)), "")
        inner = getattr(dataset, name, None)
        if isinstance(inner, (list, tuple)):
            inner = inner[place] if place < len(inner) else None
        dataset = inner if isinstance(inner, torch.utils.data.Dataset) else None


def _backwards(transform: Any, key: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The steps of a preprocessing, the last one first, each with the image's key after and before it."""
    for step in reversed([*steps_of(transform)]):
        before = key
        if isinstance(step, ConcatItemsd) and step.name == key:
            before = str(step.keys[0])
        elif isinstance(step, CopyItemsd) and key in step.names:
            before = str(step.keys[step.names.index(key) % len(step.keys)])
        yield step, key, before
        key = before


def _unrecorded(transform: Any, key: Hashable, keeps_place: bool, setting: str) -> str:
    """Which steps move voxels of the image, or may do so, and record nothing, in words; empty if there are none."""
    moving, unknown = [], []
    for step, after, before in _backwards(transform, key) if isinstance(key, str) else ():
        if before != after or after not in getattr(step, "keys", ()):
            continue
        name, own = type(step).__name__, type(step).__module__.startswith(("monai.", "monai_saliency."))
        # MONAI 1.6.1 does not call the `inv_func` of a Lambdad.
        if isinstance(step, Lambdad) or not (own or isinstance(step, InvertibleTransform)):
            unknown.append(name)
        elif type(step).__module__.startswith("monai.transforms.spatial.") and not isinstance(
            step, InvertibleTransform
        ):
            moving.append(name)
    if moving:
        return f"{', '.join(moving)} moves voxels and does not record it"
    words = f"may move voxels and records nothing: if it changes values only, set `{setting}`"
    return f"{', '.join(dict.fromkeys(unknown))} {words}" if unknown and not keeps_place else ""


def _inverted(
    saliency: torch.Tensor, image: MetaTensor, transform: Any, key: str, nearest: bool, problems: list[Exception]
) -> MetaTensor:
    """A map taken back through those steps that can be inverted, whatever order MONAI recorded them in."""
    back = MetaTensor(saliency).copy_meta_from(image)
    operations = copy.deepcopy(image.applied_operations)
    back.applied_operations = [
        {**operation, TraceKeys.ID: TraceKeys.NONE} if isinstance(operation, dict) else operation
        for operation in (convert_applied_interp_mode(operations, "nearest") if nearest else operations)
    ]
    for step, after, before in _backwards(transform, key):
        if before != after or not isinstance(step, InvertibleTransform) or after not in getattr(step, "keys", ()):
            continue
        alone = copy.copy(step)
        if isinstance(alone, MapTransform):
            alone.allow_missing_keys = True
        given = back.clone()
        try:
            found = alone.inverse({after: given})[after]
            back = found if isinstance(found, MetaTensor) else given  # as of ToTensord, whose inverse is an array
        except Exception as error:
            problems.append(error)
    return back
