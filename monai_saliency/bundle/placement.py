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
from monai.utils import OptionalImportError, TraceKeys, WSIPatchKeys

from monai_saliency.cases import image_file
from monai_saliency.data.cohort import CaseIds
from monai_saliency.handlers.saliency_handler import Item
from monai_saliency.storage.dicom import holds_series, order_problem, series_files, series_id
from monai_saliency.storage.files import error_key
from monai_saliency.storage.scans import header_problem
from monai_saliency.transforms.save import GRID_KEY, lies_on_scan
from monai_saliency.utils.affines import check_inversion, steps_of

logger = logging.getLogger(__name__)


def input_file(image: Any) -> Path | None:
    """The file, or the folder of slices, that an image was loaded from; None if it does not say."""
    if not isinstance(image, MetaTensor):
        return None
    name = image_file(image) or image.meta.get(WSIPatchKeys.PATH)
    return Path(name) if name and Path(name).exists() else None


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
        dataset, self.transform = _preprocessing(loader)
        self.problem = _unrecorded(self.transform, image_key, keeps_place, setting)
        self._said: set[str] = set()
        self._files = _files(dataset, image_key) or _files(dataset, _source_key(self.transform, image_key))
        counts = Counter(map(os.path.abspath, self._files))
        self._twice = {file for file, count in counts.items() if count > 1}
        root = Path(os.path.commonpath([Path(file).parent for file in counts])) if counts else None
        self._ids = CaseIds(root, self._files)
        self._met: dict[str, str] = {}
        # Else a loader cuts files into pieces.
        is_listed_once = bool(counts) and not self._twice
        self._is_whole = is_listed_once and len(counts) == _length(dataset) == _length(loader.dataset)

    def name(self, case: Item, place: str) -> str:
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
            numbers = np.atleast_1d(np.asarray(corner)).astype(int).tolist()
            name = f"{name}_patch-{'-'.join(map(str, numbers))}"
        first = self._met.setdefault(name, place)
        if self._is_whole and first.partition("-")[0] != place.partition("-")[0]:
            return ""
        is_one_case = corner is not None or os.path.abspath(file) not in self._twice
        return name if first == place and is_one_case else f"{name}-{place}"

    def all_names(self, case: Item) -> list[str]:
        """The names of all cases, if they are like this one; empty if the dataset does not list them."""
        image = case[self.image_key]
        if self._twice or input_file(image) is None or WSIPatchKeys.LOCATION in image.meta:
            return []
        return [self._name(file) for file in self._files]

    def _name(self, file: Path) -> str:
        """The name of a file's case. Names of DICOM files and folders may be a patient's."""
        name = self._ids(file)
        return series_id(name) if holds_series(file) else name

    def problem_of(self, case: Item, dicom: bool) -> str | None:
        """Why a case's map can lie nowhere, by its file's header; None if it can."""
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return None
        # A folder is read as one volume, by a reader that may not see gaps.
        if image.ndim == 4 and (file.is_dir() or dicom) and holds_series(file):
            with suppress(OptionalImportError):
                return order_problem(series_files(file)) or header_problem(image)
        return header_problem(image)

    def __call__(self, case: Item) -> Item:
        """A case with its maps on the scan's grid, or if no way leads there with the grid that they lie on."""
        image = case[self.image_key]
        if input_file(image) is None:
            return self._keep(case, "they come from no file that is known")
        if WSIPatchKeys.LOCATION in image.meta:
            return self._keep(case, "they are patches of a larger image")
        if self.transform is None:
            return self._keep(case, "the loader's dataset shows no preprocessing that could be inverted")
        check_inversion(str(case["case"]), self.transform)
        placed = dict(case)
        for key in {self.saliency_key, error_key(self.saliency_key), "disagreement"} & case.keys():
            back, reason = self._back(case, key)
            if back is None:
                return self._keep(case, reason)
            placed[key] = back
        return placed

    def _back(self, case: Item, key: Hashable) -> tuple[torch.Tensor | None, str]:
        """A map on its scan; None if no way leads there, and why."""
        problem = self.problem
        if not problem:
            # A computed map must not be lost with a way that ends half-way.
            image = case[self.image_key]
            back, problem = _inverted(case[key].clone(), image, self.transform, self.image_key, self.nearest)
            if lies_on_scan(back):
                return back, ""
        return None, f"the bundle's preprocessing does not lead back to the file's grid{problem and f' ({problem})'}"

    def _keep(self, case: Item, reason: str) -> Item:
        """A case whose map stays on the grid of the network's input."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("maps lie on the grid of the network's input, with its affine, since %s", reason)
        return {**case, GRID_KEY: case[self.image_key]}


def _files(dataset: Any, key: Hashable) -> list[Path]:
    """The files of all of a dataset's items, of several the first; empty if it does not list them."""
    items = getattr(dataset, "data", None)
    if not isinstance(items, (list, tuple)):
        return []
    files = []
    for item in items:
        value = item.get(key) if isinstance(item, dict) else item
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if not isinstance(first, (str, Path)):
            return []
        files.append(Path(first))
    return files


def _length(value: Any) -> int:
    """How long something is; 0 if it does not know, as a loader of pieces that are cut as they come."""
    try:
        return len(value)
    except TypeError:
        return 0


def _preprocessing(loader: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset that lists the items, and all that it and the datasets around it apply; None where there is none."""
    innermost, transforms = None, []
    for dataset in _nested(getattr(loader, "dataset", None)):
        innermost, transform = dataset, getattr(dataset, "transform", None)
        if callable(transform) and not (isinstance(transform, Compose) and not transform.transforms):
            transforms.append(transform)
    if len(transforms) > 1:
        return innermost, Compose(transforms[::-1])
    return innermost, transforms[0] if transforms else None


def _nested(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it wraps, from the outside in; of several the first."""
    while dataset is not None:
        yield dataset
        name = next((name for name in ("dataset", "datasets", "data") if hasattr(dataset, name)), "")
        inner = getattr(dataset, name, None)
        if isinstance(inner, (list, tuple)) and inner:
            inner = inner[0]
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


def _source_key(transform: Any, key: Any) -> Any:
    """The key of the file that an image was made of; the first one's if it was made of several."""
    for _, _, before in _backwards(transform, key):
        key = before
    return key


def _unrecorded(transform: Any, key: Hashable, keeps_place: bool, setting: str) -> str:
    """Which steps move voxels of the image, or may do so, and record nothing, in words; empty if there are none."""
    moving, unknown = [], []
    for step, after, before in _backwards(transform, key):
        if before != after or after not in getattr(step, "keys", ()):
            continue
        name, module = type(step).__name__, type(step).__module__
        is_recorded = isinstance(step, InvertibleTransform)
        # MONAI 1.6.1 does not call the `inv_func` of a Lambdad.
        if isinstance(step, Lambdad) or not (is_recorded or module.startswith(("monai.", "monai_saliency."))):
            unknown.append(name)
        elif module.startswith("monai.transforms.spatial.") and not is_recorded:
            moving.append(name)
    if moving:
        return f"{', '.join(moving)} moves voxels and does not record it"
    if not unknown or keeps_place:
        return ""
    words = f"may move voxels and records nothing: if it changes values only, set `{setting}`"
    return f"{', '.join(dict.fromkeys(unknown))} {words}"


def _inverted(
    saliency: torch.Tensor, image: MetaTensor, transform: Any, key: Hashable, nearest: bool
) -> tuple[MetaTensor, str]:
    """A map taken back through those steps that can be inverted, whatever order MONAI recorded them in, and the first
    error of a step in words.
    """
    back = MetaTensor(saliency).copy_meta_from(image)
    operations = copy.deepcopy(image.applied_operations)
    for operation in operations:
        if isinstance(operation, dict):
            operation[TraceKeys.ID] = TraceKeys.NONE
    back.applied_operations = convert_applied_interp_mode(operations, "nearest") if nearest else operations
    problem = ""
    for step, after, before in _backwards(transform, key):
        if before != after or not isinstance(step, InvertibleTransform) or after not in getattr(step, "keys", ()):
            continue
        alone = copy.copy(step)
        if isinstance(alone, MapTransform):
            alone.allow_missing_keys = True
        given = back.clone()
        try:
            inverse = alone.inverse({after: given})[after]
            back = inverse if isinstance(inverse, MetaTensor) else given  # as of ToTensord, whose inverse is an array
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {error}"
    return back, problem
