"""One value in the scan's own unit, such as air at -1000 HU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose, EnsureChannelFirstd, LoadImage, MapTransform, RandomizableTrait

from monai_saliency.cases import Case
from monai_saliency.errors import AdviceError
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.fills.value_after_step import LOADERS, value_after_step
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
    - MONAI's linear steps with statistics of the scan (``NormalizeIntensityd``, ``ScaleIntensityd``,
      ``ScaleIntensityRangePercentilesd``) put the value on the straight line of the scan's voxels.
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
                raise AdviceError(
                    f"{case.file} could not be preprocessed again from its file alone, as a fill in the scan's own "
                    f"units needs: {type(step).__name__} failed ({type(error).__name__}: {error}); give the fill in "
                    "the network's input space (ConstantFill)"
                ) from error
            if _is_array(before):
                values = self._follow(step, before, after, values)
            elif _is_array(after) and type(step) not in LOADERS:
                self._check_unit(step, after, case.file)
        if not _is_array(item[self.key]):
            raise ValueError(f"`transform` does not load {case.file}: give a dictionary pipeline with LoadImaged")
        image = torch.as_tensor(item[self.key]).to(case.image)
        if image.shape != case.image.shape or not torch.allclose(
            image, case.image, rtol=0, atol=1e-3 * float(case.image.abs().max())
        ):
            raise ValueError(
                f"`transform` of {case.file} does not give the image that is explained: give the preprocessing that "
                "made it"
            )
        self._check_count(values, len(case.image))
        return ConstantFill(values.expand(len(case.image)).tolist())

    def _check_count(self, values: torch.Tensor, channels: int) -> None:
        if len(values) not in (1, channels):
            raise ValueError(
                f"`value` must be one number or one per channel, got {len(values)} for {channels} channels"
            )

    def _follow(self, step: Any, before: Any, after: Any, values: torch.Tensor) -> torch.Tensor:
        """The values after a step that made ``after`` of ``before``."""
        if type(step) is not EnsureChannelFirstd:
            self._check_count(values, len(before))

        def run(image: Any) -> Any:
            return self._run(step, {self.key: image})[self.key]

        found = value_after_step(step, run, before, after, values)
        if found is None:
            raise ValueError(
                f"the value of {self.value} after {type(step).__name__} is not known exactly: it does not fit the new "
                "type, or the step mixes voxels, changes places and intensities in one, or uses statistics of the "
                "scan, is not linear and no voxel of the scan has this value; give the fill in the network's input "
                "space (ConstantFill)"
            )
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

    def _run(self, step: Any, item: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """Run one step on the image alone. The step gets a copy, so that it cannot change the image in place."""
        image = item[self.key]
        if isinstance(step, MapTransform):
            step = copy.copy(step)
            step.allow_missing_keys = True
        return step({self.key: image.clone() if isinstance(image, torch.Tensor) else copy.copy(image)})


def _is_array(image: Any) -> bool:
    return isinstance(image, (torch.Tensor, np.ndarray))
