"""A fill in the scan's own unit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, MapTransform, RandomizableTrait
from monai.transforms.traits import LazyTrait

from monai_saliency.cases import Case
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.utils.tensors import plain

__all__ = ["ScanUnitFill"]


class ScanUnitFill(CaseFill):
    """One value in the scan's own units (air at -1000 HU), taken to the network's input space as the scan was.

    The case's file is preprocessed once more, and the value follows it step by step. Steps of geometry leave it as it
    is. What a step of intensities makes of it is read off the step's own doing, and the scan's statistics stay the
    scan's: where the step treats each voxel alone (``ScaleIntensityRanged``, ``ThresholdIntensityd``, most
    ``Lambdad``), from the step run on some of the scan's voxels and the value; where it looks at the whole scan
    (``NormalizeIntensityd``, ``ScaleIntensityd``), from voxels that hold the value, or else from the line on which
    the step put the scan's voxels (but for those of value 0, which ``nonzero=True`` leaves). A step for which none of
    this holds is refused.

    Args:
        value: one number, or one per channel, in the units of the file (after its slope and intercept).
        transform: the preprocessing, a dictionary pipeline that begins with ``LoadImaged``.
        key: where its items hold the image.
    """

    def __init__(
        self, value: float | Sequence[float], transform: Callable[[Any], Any], key: Hashable = "image"
    ) -> None:
        self.value = value
        self.transform = transform
        self.key = key

    def bind(self, case: Case) -> ConstantFill:
        if case.file is None:
            raise ValueError(
                "a fill in the scan's own units needs the scan's file, which is unknown: explain a MetaTensor from "
                "LoadImaged, give `sources`, or give the fill in the network's input space (ConstantFill)"
            )
        pipeline = self.transform if isinstance(self.transform, Compose) else Compose(self.transform)
        item: dict[Hashable, Any] = {self.key: case.file}
        values = torch.as_tensor(self.value, dtype=torch.float64).reshape(-1)
        for step in pipeline.flatten().transforms:
            if self.key not in getattr(step, "keys", (self.key,)) or getattr(step, "only_checks", False):
                continue
            if isinstance(step, RandomizableTrait):
                raise ValueError(f"{type(step).__name__} is random, so a fill in the scan's own units has no one value")
            before = item[self.key]
            try:
                item = self._run(step, item)
                after = item[self.key]
            except Exception as error:
                raise ValueError(
                    f"{case.file} could not be preprocessed again from its file alone, as a fill in the scan's own "
                    f"units needs: {type(step).__name__} failed ({type(error).__name__}: {error}); give the fill in "
                    "the network's input space (ConstantFill)"
                ) from error
            if isinstance(before, torch.Tensor) and not _is_geometry(step, before, after):
                values = self._follow(step, before, after, values)
        image = torch.as_tensor(item[self.key]).to(case.image)
        if image.shape != case.image.shape or not torch.allclose(
            image, case.image, rtol=0, atol=1e-3 * float(case.image.abs().max())
        ):
            raise ValueError(
                f"`transform` of {case.file} does not give the image that is explained: give the preprocessing that "
                "made it"
            )
        return ConstantFill(values.expand(len(case.image)).tolist())

    def _run(self, step: Any, item: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """One step on the image alone, which it may not change in place."""
        image = item[self.key]
        if isinstance(step, MapTransform):
            step = copy.copy(step)
            step.allow_missing_keys = True
        return step({self.key: image.clone() if isinstance(image, torch.Tensor) else image})

    def _follow(self, step: Any, before: torch.Tensor, after: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The (C,) values after a step of intensities that took ``before`` to ``after``, both ``(C, *spatial)``."""
        if len(values) not in (1, len(before)):
            raise ValueError(
                f"`value` must be one number or one per channel, got {len(values)} for {len(before)} channels"
            )
        values = values.expand(len(before))
        x, y = (plain(torch.as_tensor(image)).flatten(1) for image in (before, after))
        alone = self._of_few_voxels(step, x, y, values, before.ndim)
        if alone is not None:
            return alone
        changed = before.clone()
        changed.flatten(1)[:, 0] = 0
        zero = self._run(step, {self.key: changed})[self.key].flatten(1)[:, 0] == 0
        followed = [
            0.0 if v == 0 and keeps_zero else _on_scan(x[c].double(), y[c].double(), v)
            for c, (v, keeps_zero) in enumerate(zip(values.tolist(), zero.tolist(), strict=True))
        ]
        if None in followed:
            raise ValueError(
                f"what {type(step).__name__} makes of {self.value} cannot be told exactly: no voxel of the scan has "
                "this value, and the step is neither one of single voxels nor linear; give the fill in the network's "
                "input space (ConstantFill)"
            )
        return torch.tensor(followed, dtype=torch.float64)

    def _of_few_voxels(
        self, step: Any, x: torch.Tensor, y: torch.Tensor, values: torch.Tensor, ndim: int
    ) -> torch.Tensor | None:
        """What a step that treats each voxel alone makes of the values; None where some voxels of ``x``, taken out of
        the scan, come out differently from ``y``.
        """
        picks = torch.cat([torch.linspace(0, x.shape[1] - 1, 62).long(), x.argmin(dim=1), x.argmax(dim=1)])
        kind = x.dtype if x.is_floating_point() else torch.float32
        few = torch.cat([x[:, picks].to(kind), values[:, None].to(kind)], dim=1)
        few = few.reshape(*few.shape, *[1] * (ndim - 2))
        try:
            out = torch.as_tensor(self._run(step, {self.key: MetaTensor(few)})[self.key])
        except Exception:  # a step that needs a whole scan may fail on a few voxels in its own way
            return None
        expected = y[:, picks].double()
        if out.shape != few.shape or not _close(out.flatten(1)[:, :-1].double(), expected):
            return None
        return plain(out.flatten(1)[:, -1].double())


def _is_geometry(step: Any, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a step moved voxels, or left all as it was, and changed no intensities."""
    if isinstance(step, LazyTrait) or before.shape != after.shape:
        return True
    affines = [image.affine for image in (before, after) if isinstance(image, MetaTensor)]
    return (len(affines) == 2 and not torch.equal(*affines)) or torch.equal(before.double(), after.double())


def _on_scan(x: torch.Tensor, y: torch.Tensor, value: float) -> float | None:
    """What a value becomes under a step that took a channel's voxels ``x`` to ``y``; None where they do not tell it."""
    same = x == value
    if bool(same.any()):
        found = y[same]
        return float(found[0]) if _close(found, found[:1]) else None
    for inside in (torch.ones_like(same), x != 0):
        x, y = x[inside], y[inside]
        if not len(x) or not bool(x.max() > x.min()):
            return None
        low, high = x.argmin(), x.argmax()
        slope = (y[high] - y[low]) / (x[high] - x[low])
        if _close(y[low] + slope * (x - x[low]), y):
            return float(y[low] + slope * (value - x[low]))
    return None


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to what single precision leaves of a line through numbers of this size."""
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())
