"""Where the maps of somebody else's bundle lie: the way back through its preprocessing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, ConcatItemsd, CopyItemsd, InvertibleTransform, Lambdad, MapTransform
from monai.transforms.utils import convert_applied_interp_mode
from monai.utils import TraceKeys, WSIPatchKeys

from monai_saliency.bundle.case_names import CaseNames, input_file
from monai_saliency.transforms.save import GRID_KEY, error_key, lies_on_scan

__all__ = ["Placement"]

logger = logging.getLogger(__name__)


class Placement:
    """Takes maps from the network's input back through a bundle's preprocessing."""

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
        self.names = CaseNames(loader, dataset, image_key, _source_key(self.transform, image_key))
        self.problem = _unrecorded(self.transform, image_key, keeps_place, setting)
        self._said: set[str] = set()

    def begin_from(self, transform: InvertibleTransform) -> None:
        """Invert a further transform first, which the network's wrapper applies to its input."""
        before = [] if self.transform is None else [self.transform]
        self.transform = Compose([*before, transform])

    def __call__(self, case: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """A case with its maps on the scan's grid, or if no way leads there with the grid that they lie on."""
        image = case[self.image_key]
        if input_file(image) is None:
            return self._keep(case, "they come from no file that is known")
        if WSIPatchKeys.LOCATION in image.meta:
            return self._keep(case, "they are patches of a larger image")
        if self.transform is None:
            return self._keep(case, "the loader's dataset shows no preprocessing that could be inverted")
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


def _steps(transform: Any) -> Iterator[Any]:
    """The steps of nested ``Compose`` one by one. (``Compose.flatten`` makes new ones of some kinds.)"""
    if isinstance(transform, Compose):
        for step in transform.transforms:
            yield from _steps(step)
    elif transform is not None:
        yield transform


def _backwards(transform: Any, key: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The steps of a preprocessing, the last one first, each with the image's key after and before it."""
    for step in reversed([*_steps(transform)]):
        before = key
        if isinstance(step, ConcatItemsd) and step.name == key:
            before = str(step.keys[0])
        elif isinstance(step, CopyItemsd) and key in step.names:
            before = str(step.keys[step.names.index(key) % len(step.keys)])
        yield step, key, before
        key = before


def _source_key(transform: Any, key: Hashable) -> Hashable:
    """The key of the file that an image was made of; the first one's if it was put together from several."""
    for _, _, before in _backwards(transform, key):
        key = before
    return key


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
