"""Where the maps of somebody else's bundle lie, and under which names they are saved."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, Invertd, InvertibleTransform
from monai.utils import ImageMetaKey, OptionalImportError, WSIPatchKeys

from monai_saliency.bundle.inversion import inverted_by_steps, source_key, unrecorded_steps
from monai_saliency.data.case_ids import CaseIds
from monai_saliency.errors import root_cause
from monai_saliency.storage.dicom import holds_series, is_dicom, order_problem, series_files, series_id, series_uid
from monai_saliency.transforms.check import header_problem
from monai_saliency.transforms.save import GRID_KEY, error_key, lies_on_scan

__all__ = ["Placement", "input_file"]

logger = logging.getLogger(__name__)


def input_file(image: Any) -> Path | None:
    """The file, or the folder of slices, that an image was loaded from; None where it does not say."""
    meta = image.meta if isinstance(image, MetaTensor) else {}
    name = meta.get(ImageMetaKey.FILENAME_OR_OBJ, meta.get(WSIPatchKeys.PATH))
    name = name[0] if isinstance(name, (list, tuple)) and name else name
    return Path(name) if isinstance(name, (str, Path)) and str(name) and Path(name).exists() else None


class Placement:
    """Takes maps from the network's input back through a bundle's preprocessing.

    The preprocessing is what the loader's dataset applies, so its ids do not matter. A map stays on the grid of the
    network's input, which the log says, where there is no way back: for images that come from no file, for patches of
    a slide, for pipelines that do not restore the file's grid, and for those with a step that moves voxels without
    recording it, such as a flip in a ``Lambdad``. Other steps that cannot be inverted are passed by, and a map of an
    image that was put together from several files goes back to the first one.

    Args:
        loader: the evaluator's, which the preprocessing is found in.
        image_key: where a case holds the network's input.
        saliency_key: where a case holds its map.
        nearest: whether maps are resampled by nearest neighbour, for maps that are flat in regions; linearly by
            default.
        dicom: whether maps are to be written as DICOM too, for which a series must be one volume.
    """

    def __init__(
        self,
        loader: Any,
        image_key: Hashable,
        saliency_key: str = "saliency",
        nearest: bool = False,
        dicom: bool = False,
    ) -> None:
        self.image_key = image_key
        self.nearest = nearest
        self.saliency_key = saliency_key
        self.dicom = dicom
        self.dataset, self.transform = _preprocessing(loader, image_key)
        file_key = source_key(self.transform, image_key) if isinstance(image_key, str) else image_key
        self._files = _files(self.dataset, image_key) or _files(self.dataset, file_key)
        self._root = None if self._files is None else _common_folder(self._files)
        listed = Counter(map(os.path.abspath, self._files or []))
        self._twice = {file for file, count in listed.items() if count > 1}
        self._ids = CaseIds(self._root, self._files or [])
        self._met: dict[str, str] = {}
        # The batches of a loader whose dataset gives each file once; further ones are pieces that a loader cuts.
        count = len(self._files or [])
        once = (
            bool(count) and not self._twice and len(self.dataset) == count == _length(getattr(loader, "dataset", None))
        )
        self._num_batches = _length(loader) if once else 0
        self._again: set[str] = set()
        self._said: set[str] = set()
        self._unrecorded: list[str] | None = None

    def begin_from(self, transform: InvertibleTransform) -> None:
        """Invert a further transform first, which the network's wrapper applies to its input."""
        before = [] if self.transform is None else [self.transform]
        self.transform = Compose([*before, transform])

    def name(self, case: dict[Hashable, Any], place: str) -> str:
        """What to call a case, whatever others this process meets.

        Args:
            case: its dictionary.
            place: in the cohort, which tells cases apart that come from no file.

        Returns:
            its file's path below the cohort's common folder: without its suffix, unless two files differ in nothing
            else. Then the corner where it is a patch, and the place where the file gives several cases.
        """
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return f"{case.get('case', 'case')}-{place}"
        name = self._name(file)
        corner = image.meta.get(WSIPatchKeys.LOCATION)
        twice = corner is None and os.path.abspath(file) in self._twice
        if corner is not None:
            name = f"{name}_patch-{'-'.join(map(str, np.atleast_1d(np.asarray(corner)).astype(int).tolist()))}"
        met = self._met.setdefault(name, place)
        batches = met.partition("-")[0], place.partition("-")[0]
        if corner is None and batches[0] != batches[1] and int(batches[1]) < self._num_batches:
            self._again.add(name)
            return name
        again = met != place
        return f"{name}-{place}" if again or twice else name

    def is_again(self, case: dict[Hashable, Any]) -> bool:
        """Whether a named case was met in an earlier batch: a loader that ends early begins anew."""
        return case["case"] in self._again

    def _name(self, file: Path) -> str:
        """What a file's case is called. Names of DICOM files and folders may be a patient's."""
        name = self._ids(file)
        if not holds_series(file):
            return name
        first = next((each for each in sorted(file.rglob("*")) if is_dicom(each)), file) if file.is_dir() else file
        with suppress(OptionalImportError):  # the bundle may read it with another package
            return series_id(f"{series_uid(first)} {name}")
        return series_id(name)

    def problem(self, case: dict[Hashable, Any]) -> str | None:
        """Why a case's map can lie nowhere, by its file's header; None where it can."""
        image = case[self.image_key]
        file = input_file(image)
        if file is None:
            return None
        # A folder is read as one volume, by a reader that may not see gaps.
        if image.ndim == 4 and (file.is_dir() or self.dicom) and holds_series(file):
            with suppress(OptionalImportError):
                return order_problem(series_files(file)) or header_problem(image, image.ndim - 1)
        return header_problem(image, image.ndim - 1)

    def names(self, case: dict[Hashable, Any]) -> list[str] | None:
        """What all cases are called, if they are like this one; None where the dataset does not tell."""
        image = case[self.image_key]
        if self._files is None or self._twice or input_file(image) is None or WSIPatchKeys.LOCATION in image.meta:
            return None
        return [self._name(file) for file in self._files]

    def __call__(self, case: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """A case with its maps on the scan's grid, or where no way leads there with the grid that they lie on."""
        image = case[self.image_key]
        if input_file(image) is None:
            return self._keep(case, "they come from no file that is known")
        if WSIPatchKeys.LOCATION in image.meta:
            return self._keep(case, "they are patches of a larger image")
        if self.transform is None:
            return self._keep(case, "the loader's dataset shows no preprocessing that could be inverted")
        back, reason = self._back(case, self.saliency_key)
        if back is None:
            return self._keep(case, reason)
        placed = {**case, self.saliency_key: back}
        for key in {error_key(self.saliency_key), "disagreement"} & case.keys():
            placed[key] = self._back(case, key)[0]  # the way of the map
        return placed

    def _back(self, case: dict[Hashable, Any], key: str) -> tuple[torch.Tensor | None, str]:
        """A case's map, or its error, on its scan, by whichever way leads there; None where none does, and why."""
        kind = "preprocessing" if isinstance(self.image_key, str) else "transforms of arrays"
        reason = f"the bundle's {kind} do{'es' * isinstance(self.image_key, str)} not lead back to the file's grid"
        if moved := self.unrecorded(case):
            return None, f"{reason} ({', '.join(moved)} moves voxels and does not record it)"
        for way in (self._invert, self._invert_by_steps):
            # A copy: a computed map must not be lost with a way that ends half-way.
            copied = {**case, key: case[key].clone()}
            try:
                back = way(copied, key)
            except Exception as error:
                cause = root_cause(error)
                reason = f"{reason} ({type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]})"
                continue
            if back is not None and lies_on_scan(back):
                return back, ""
        return None, reason

    def unrecorded(self, case: dict[Hashable, Any]) -> list[str]:
        """The steps of the preprocessing that move voxels and do not record it: the image's affine is wrong then."""
        if self._unrecorded is None and self.transform is not None and isinstance(self.image_key, str):
            self._unrecorded = unrecorded_steps(self.transform, self.image_key, case[self.image_key])
        return self._unrecorded or []

    def _invert(self, case: dict[Hashable, Any], key: str) -> torch.Tensor:
        if not isinstance(self.transform, InvertibleTransform):
            return case[key]
        if isinstance(self.image_key, str):
            back = Invertd(key, self.transform, orig_keys=self.image_key, nearest_interp=self.nearest)
            return back(case)[key]
        return self.transform.inverse(case[key])

    def _invert_by_steps(self, case: dict[Hashable, Any], key: str) -> torch.Tensor | None:
        if not isinstance(self.image_key, str):
            return None
        image = case[self.image_key]
        return inverted_by_steps(case[key], image, self.transform, self.image_key, self.nearest)

    def _keep(self, case: dict[Hashable, Any], reason: str) -> dict[Hashable, Any]:
        """A case whose map stays on the grid of the network's input."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("maps lie on the grid of the network's input, with its affine, since %s", reason)
        return {**case, GRID_KEY: case[self.image_key]}


def _preprocessing(loader: Any, image_key: Hashable) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset that lists the items, and all that it and those around it apply."""
    nested = list(_nested(getattr(loader, "dataset", None), image_key if isinstance(image_key, int) else 0))
    applied = [getattr(each, "transform", None) for each in reversed(nested)]
    transforms = [
        each for each in applied if callable(each) and not (isinstance(each, Compose) and not each.transforms)
    ]
    if len(transforms) < 2:
        return (nested or [None])[-1], (transforms or [None])[0]
    return nested[-1], Compose(transforms)


def _nested(dataset: Any, place: int) -> Iterator[Any]:
    """A dataset and those that it wraps, from the outside in; of several side by side the one at a place."""
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        yield dataset
        inner = next(
            (getattr(dataset, name, None) for name in ("dataset", "datasets", "data") if hasattr(dataset, name)), None
        )
        if isinstance(inner, (list, tuple)):
            inner = inner[place] if place < len(inner) else None
        dataset = inner if isinstance(inner, torch.utils.data.Dataset) else None


def _files(dataset: Any, image_key: Hashable) -> list[Path] | None:
    """The files of all of a dataset's items, at least one; None where it does not list them."""
    items = getattr(dataset, "data", None)
    if not isinstance(items, (list, tuple)):
        return None
    files = []
    for item in items:
        value = item.get(image_key) if isinstance(item, dict) else item
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if not isinstance(value, (str, Path)):
            return None
        files.append(Path(value))
    return files or None


def _common_folder(files: Sequence[Path]) -> Path:
    """The folder that all of some files lie below."""
    folders = [file.absolute().parent for file in files]
    common = folders[0]
    while not all(common == folder or common in folder.parents for folder in folders):
        common = common.parent
    return common


def _length(value: Any) -> int:
    """How long something is; 0 where it does not know, as a loader of pieces that are cut as they come."""
    try:
        return len(value)
    except TypeError:
        return 0
