"""One value in the scan's own unit, such as air at -1000 HU."""

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
    """One value in the scan's own unit (such as air at -1000 HU), converted to the network's input space.

    For each case, the preprocessing runs once more on the case's file, and the value is converted step by step:

    - Steps that only move voxels (resampling, cropping, padding) leave the value unchanged.
    - Steps that treat each voxel alone (``ScaleIntensityRanged``, ``ThresholdIntensityd``, most ``Lambdad``) are run on
      the value, beside some of the scan's voxels.
    - Steps that use statistics of the scan (``NormalizeIntensityd``, ``ScaleIntensityd``) are not run on the value,
      which would change the statistics. The new value is read from voxels that had the value before, or from the
      straight line on which the step puts the scan's voxels (without voxels of 0, which ``nonzero=True`` leaves
      unchanged).

    Other steps are refused.

    Args:
        value: one number for all channels, or one per channel, in the unit of the file (after its slope and
            intercept).
        transform: the preprocessing: a dictionary pipeline that begins with ``LoadImaged``.
        key: the pipeline's key of the image.

    Raises:
        ValueError: from :meth:`bind`, when the file is unknown or cannot be preprocessed again, when ``transform`` does
            not give the explained image, when a step is random, or when the value after a step is not known exactly.

    Example::

        >>> import tempfile, nibabel, numpy, torch
        >>> from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityRanged
        >>> from monai_saliency import ClassScore, ScanUnitFill, sliding_window
        >>> load = [LoadImaged("image"), EnsureChannelFirstd("image")]
        >>> preprocessing = Compose([*load, ScaleIntensityRanged("image", -1000, 1000, 0, 1)])
        >>> explain = sliding_window(2, target=ClassScore([0], "none"), fill=ScanUnitFill(-500, preprocessing))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nibabel.save(nibabel.Nifti1Image(numpy.zeros((4, 4, 4)), numpy.eye(4)), f"{folder}/ct.nii")
        ...     image = preprocessing({"image": f"{folder}/ct.nii"})["image"]
        ...     maps = explain(image[None], lambda x: x.flatten(1).sum(1, keepdim=True))
        >>> float(maps[0, 0, 1, 1, 1])  # eight voxels of 0 HU (0.5) become -500 HU (0.25)
        2.0
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
                raise ValueError(
                    f"{type(step).__name__} is random, so a fill in the scan's own units would have another value each "
                    "time; give the fill in the network's input space (ConstantFill)"
                )
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
        """Run one step on the image alone. The step gets a copy, so that it cannot change the image in place."""
        image = item[self.key]
        if isinstance(step, MapTransform):
            step = copy.copy(step)
            step.allow_missing_keys = True
        return step({self.key: image.clone() if isinstance(image, torch.Tensor) else image})

    def _follow(self, step: Any, before: torch.Tensor, after: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The values ``(C,)`` after a step that changed intensities ``before`` to ``after``, both ``(C, *spatial)``."""
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
                f"the value of {self.value} after {type(step).__name__} is not known exactly: no voxel of the scan has "
                "this value, and the step is neither linear nor computed voxel by voxel; give the fill in the "
                "network's input space (ConstantFill)"
            )
        return torch.tensor(followed, dtype=torch.float64)

    def _of_few_voxels(
        self, step: Any, x: torch.Tensor, y: torch.Tensor, values: torch.Tensor, ndim: int
    ) -> torch.Tensor | None:
        """The values ``(C,)`` after a step that treats each voxel alone.

        None for other steps: those that turn some voxels of the scan, given alone, into something else than in ``y``.

        Args:
            step: the step.
            x: ``(C, voxels)``, the scan before the step.
            y: ``(C, voxels)``, the scan after it.
            values: ``(C,)``, the values before it.
            ndim: number of axes of the image with its channel axis.
        """
        picks = torch.cat([torch.linspace(0, x.shape[1] - 1, 62).long(), x.argmin(dim=1), x.argmax(dim=1)])
        kind = x.dtype if x.is_floating_point() else torch.float32
        few = torch.cat([x[:, picks].to(kind), values[:, None].to(kind)], dim=1)
        few = few.reshape(*few.shape, *[1] * (ndim - 2))
        try:
            out = torch.as_tensor(self._run(step, {self.key: MetaTensor(few)})[self.key])
        except Exception:  # a step that needs a whole scan may fail on a few voxels, with any exception
            return None
        expected = y[:, picks].double()
        if out.shape != few.shape or not _close(out.flatten(1)[:, :-1].double(), expected):
            return None
        return plain(out.flatten(1)[:, -1].double())


def _is_geometry(step: Any, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a step changed no intensities: it moved voxels or did nothing."""
    if isinstance(step, LazyTrait) or before.shape != after.shape:
        return True
    affines = [image.affine for image in (before, after) if isinstance(image, MetaTensor)]
    return (len(affines) == 2 and not torch.equal(*affines)) or torch.equal(before.double(), after.double())


def _on_scan(x: torch.Tensor, y: torch.Tensor, value: float) -> float | None:
    """A value after a step that turned a channel's voxels ``x`` into ``y``; None if the voxels do not determine it."""
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
    """Whether two tensors agree up to the float32 rounding of a line through numbers of this size."""
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())
