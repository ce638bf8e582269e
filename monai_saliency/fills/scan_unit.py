"""One value in the scan's own unit, such as air at -1000 HU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from monai.transforms import (
    Compose,
    ConcatItemsd,
    CopyItemsd,
    EnsureChannelFirstd,
    LoadImage,
    MapTransform,
    RandomizableTrait,
    apply_transform,
)
from monai.transforms.lazy.functional import apply_pending_transforms, apply_pending_transforms_in_order

from monai_saliency.cases import Case
from monai_saliency.errors import AdviceError, root_cause
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.fills.value_after_step import LOADERS, fits, value_after_step
from monai_saliency.storage.dicom import holds_series
from monai_saliency.utils.arguments import finite_numbers, instance
from monai_saliency.utils.tensors import plain

__all__ = ["ScanUnitFill"]


class ScanUnitFill(CaseFill):
    """One value in the scan's own unit (such as air at -1000 HU), converted to the network's input space.

    The fill is what the network would see if the hidden voxels of the scan truly held the value, while the
    preprocessing does what it did to this scan: its statistics (mean, minimum, percentiles) stay those of the
    unperturbed scan, and its crop stays where it was. For each case the preprocessing runs once more on the case's
    file, and the value is converted step by step (:mod:`monai_saliency.fills.value_after_step`):

    - MONAI's steps that only move voxels (resampling, cropping, padding) leave the value unchanged.
    - Steps that treat each voxel alone (``ScaleIntensityRanged``, ``ThresholdIntensityd``, most ``Lambdad``) are run on
      the value. They may make several channels of one, such as two CT windows.
    - MONAI's steps with statistics of the scan (``NormalizeIntensityd``, ``ScaleIntensityd``,
      ``ScaleIntensityRangePercentilesd``, ``ClipIntensityPercentilesd``, ``AdjustContrastd``) are run on the value with
      the statistics of the scan.
    - Copies of the scan under several keys (``CopyItemsd``), put together again as channels (``ConcatItemsd``), are
      followed one by one.
    - Other steps with statistics convert a value that the scan holds, or one on the scan's straight line between its
      minimum and maximum.

    Where the value is not known exactly there is an error: after a filter that mixes voxels, after a step that changes
    places and intensities in one, after ``HistogramNormalized`` where no voxel holds the value. Write such a fill in
    the network's input space (:class:`~monai_saliency.ConstantFill`).

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
        finite_numbers("value", value)
        if not isinstance(transform, (list, tuple)):
            instance(
                "transform", transform, (), "the preprocessing, such as Compose([LoadImaged(...), ...])", function=True
            )
        self.value = value
        self.transform = transform
        self.key = key

    def bind(self, case: Case) -> ConstantFill:
        if case.file is None:
            raise ValueError(
                "a fill in the scan's own units needs the scan's file, which is unknown: explain a MetaTensor from "
                "LoadImaged, give `sources`, or give the fill in the network's input space (ConstantFill)"
            )
        # Names of DICOM files may be a patient's.
        words = "its DICOM series" if holds_series(case.file) else case.file
        pipeline = self.transform if isinstance(self.transform, Compose) else Compose(self.transform)
        item: dict[Hashable, Any] = {self.key: case.file}
        values: dict[Hashable, torch.Tensor] = {}  # of each image that is made of the scan
        for step in pipeline.flatten().transforms:
            keys = [key for key in getattr(step, "keys", item) if key in item]
            if not keys or getattr(step, "only_checks", False):
                continue
            if isinstance(step, RandomizableTrait):
                raise ValueError(
                    f"{type(step).__name__} is random, so a fill in the scan's own units would have another value each "
                    "time; give the fill in the network's input space (ConstantFill)"
                )
            try:
                item = apply_pending_transforms_in_order(step, item, pipeline.lazy, pipeline.overrides)
                after = self._run(step, item, keys, pipeline)
            except Exception as error:
                cause = root_cause(error)
                raise AdviceError(
                    f"{words} could not be preprocessed again from its file alone, as a fill in the scan's own "
                    f"units needs: {type(step).__name__} failed ({type(cause).__name__}: {cause}); give the fill in "
                    "the network's input space (ConstantFill)"
                ) from error
            values = self._follow_all(step, keys, item, after, values, words)
            item = after
        image = apply_pending_transforms(item, None, pipeline.overrides).get(self.key)
        if not _is_array(image):
            raise ValueError(
                f"`transform` does not load {words} under {self.key!r}: give a dictionary pipeline with LoadImaged"
            )
        if not _same(torch.as_tensor(image).to(case.image), case.image):
            raise ValueError(
                f"`transform` of {words} does not give the image that is explained: give the preprocessing that made it"
            )
        self._check_count(values[self.key], len(case.image))
        return ConstantFill(values[self.key].expand(len(case.image)).tolist())

    def _follow_all(
        self,
        step: Any,
        keys: list[Hashable],
        item: dict[Hashable, Any],
        after: dict[Hashable, Any],
        values: dict[Hashable, torch.Tensor],
        file: str,
    ) -> dict[Hashable, torch.Tensor]:
        """The values in each image after a step that made ``after`` of ``item``."""
        found = {}
        for key, image in after.items():
            if not _is_array(image):
                continue
            source = step.keys[step.names.index(key) % len(step.keys)] if _copies(step, key) else key
            if source != key and source in values:
                found[key] = values[source]
            elif isinstance(step, ConcatItemsd) and key == step.name:
                if step.dim != 0 or len(keys) < len(step.keys) or not values.keys() >= set(keys):
                    raise self._unknown(step)
                found[key] = torch.cat([values[each].expand(len(item[each])) for each in keys])
            elif key in values and (key in keys or image is item[key]):
                is_same = key not in keys or isinstance(step, (CopyItemsd, ConcatItemsd))
                found[key] = values[key] if is_same else self._follow(step, key, item[key], image, values[key])
            elif key in item and not _is_array(item[key]):
                found[key] = torch.as_tensor(self.value, dtype=torch.float64).reshape(-1)
                if not fits(found[key], torch.as_tensor(image)):
                    raise self._unknown(step)
                if type(step) not in LOADERS:
                    self._check_unit(step, image, file)
            elif key == self.key:
                raise self._unknown(step)
        return found

    def _unknown(self, step: Any) -> ValueError:
        return ValueError(
            f"the value of {self.value} after {type(step).__name__} is not known exactly: it does not fit the new "
            "type, or the step mixes voxels, changes places and intensities in one, puts images of several files "
            "together, or uses statistics of the scan, is not linear and no voxel of the scan has this value; give "
            "the fill in the network's input space (ConstantFill)"
        )

    def _check_count(self, values: torch.Tensor, channels: int) -> None:
        if len(values) not in (1, channels):
            raise ValueError(
                f"`value` must be one number or one per channel, got {len(values)} for {channels} channels"
            )

    def _follow(self, step: Any, key: Hashable, before: Any, after: Any, values: torch.Tensor) -> torch.Tensor:
        """The values after a step that made ``after`` of ``before``."""
        if type(step) is not EnsureChannelFirstd:
            self._check_count(values, len(before))

        def run(image: Any) -> Any:
            return self._run(step, {key: image}, [key])[key]

        found = value_after_step(step, run, before, after, values)
        if found is None:
            raise self._unknown(step)
        return found

    def _check_unit(self, step: Any, loaded: Any, file: str) -> None:
        """Whether a loader other than MONAI's gives the scan as MONAI's does, up to the order of voxels."""
        image, own = (plain(torch.as_tensor(each)).double() for each in (loaded, LoadImage(image_only=True)(file)))
        ours, monais = (torch.stack([each.min(), each.max(), each.mean(), each.std()]) for each in (image, own))
        if image.numel() != own.numel() or not torch.allclose(ours, monais, rtol=1e-6, atol=0):
            raise ValueError(
                f"{type(step).__name__} does not load {file} in the file's unit, as LoadImaged does, so the value of "
                f"{self.value} after it is not known exactly; give the fill in the network's input space (ConstantFill)"
            )

    def _run(
        self, step: Any, item: dict[Hashable, Any], keys: list[Hashable], pipeline: Compose | None = None
    ) -> dict[Hashable, Any]:
        """Run one step on these keys alone. The step gets copies, so that it cannot change images in place."""
        if isinstance(step, MapTransform):
            step = copy.copy(step)
            step.allow_missing_keys = True
        images = {key: item[key] for key in keys}
        copies = {
            key: image.clone() if isinstance(image, torch.Tensor) else copy.copy(image) for key, image in images.items()
        }
        how = {} if pipeline is None else {"lazy": pipeline.lazy, "overrides": pipeline.overrides}
        return dict(apply_transform(step, {**item, **copies}, map_items=False, **how))


def _is_array(image: Any) -> bool:
    return isinstance(image, (torch.Tensor, np.ndarray))


def _copies(step: Any, key: Hashable) -> bool:
    return isinstance(step, CopyItemsd) and key in step.names


def _same(image: torch.Tensor, explained: torch.Tensor) -> bool:
    """Whether two images are the same, but for what rounding on another device may change.

    Of the size of most voxels: beside one huge voxel, all others would seem the same.
    """
    if image.shape != explained.shape:
        return False
    sizes = plain(explained).flatten()[:: max(1, explained.numel() // 10**6)].double().abs()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    atol = 1e-3 * float(sizes.quantile(0.99)) if len(sizes) else 0.0
    return torch.allclose(image, explained, rtol=1e-3, atol=atol, equal_nan=True)
