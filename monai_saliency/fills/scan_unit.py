"""A constant in the unit of the scan's file, such as HU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import monai.transforms as mt
import numpy as np
import torch
from monai.transforms.utils_pytorch_numpy_unification import percentile

from monai_saliency.cases import Case
from monai_saliency.errors import AdviceError, root_cause
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.simple import ConstantFill
from monai_saliency.utils.arguments import finite_numbers
from monai_saliency.utils.tensors import plain

_INSTEAD = "give the fill in the network's input space (ConstantFill)"

#: these move voxels, or interpolate with weights of sum 1, or store the same numbers in another form
_KEEP_THE_VALUE: set[type] = {
    mt.Affined,
    mt.BorderPadd,
    mt.CastToTyped,
    mt.CenterScaleCropd,
    mt.CenterSpatialCropd,
    mt.CopyItemsd,
    mt.CropForegroundd,
    mt.DivisiblePadd,
    mt.EnsureChannelFirstd,
    mt.EnsureTyped,
    mt.Flipd,
    mt.Orientationd,
    mt.ResampleToMatchd,
    mt.ResizeWithPadOrCropd,
    mt.Resized,
    mt.Rotate90d,
    mt.Rotated,
    mt.Spacingd,
    mt.SpatialCropd,
    mt.SpatialPadd,
    mt.SpatialResampled,
    mt.SqueezeDimd,
    mt.ToDeviced,
    mt.ToNumpyd,
    mt.ToTensord,
    mt.Zoomd,
}
#: these treat each voxel alone, and are run on the value
_RUN_ON_THE_VALUE: set[type] = {
    mt.RepeatChanneld,
    mt.ScaleIntensityRanged,
    mt.ShiftIntensityd,
    mt.ThresholdIntensityd,
}


class ScanUnitFill(CaseFill):
    """One value in the scan's own unit (such as air at -1000 HU), converted to the network's input space.

    The fill is the value that the preprocessing gives a voxel of this value, with the statistics of the unperturbed
    scan (mean, minimum, percentiles). For each case the preprocessing runs once more on the case's file, and the value
    is followed through its steps. These may be

    - MONAI's spatial steps: orientation, spacing, resampling, cropping, padding, flips and rotations;
    - ``ScaleIntensityRanged``, ``ShiftIntensityd``, ``ThresholdIntensityd``, ``RepeatChanneld``;
    - ``NormalizeIntensityd``, ``ScaleIntensityd``, ``ScaleIntensityRangePercentilesd``, ``ClipIntensityPercentilesd``
      (without its soft clip);
    - conversions of the type and the device.

    An error names any other step that changes the image. Then give the fill in the network's input space
    (:class:`~monai_saliency.ConstantFill`).

    Args:
        value: one number for all channels, or one per channel, in the unit of the file (after its slope and
            intercept).
        transform: the preprocessing: a dictionary pipeline that begins with ``LoadImaged``.
        key: the pipeline's key of the image.

    Raises:
        ValueError: from :meth:`bind`, when the file is unknown or cannot be preprocessed again, when ``transform`` does
            not give the explained image, or when the value cannot be followed through a step.

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
        self.value = value
        self.transform = transform if isinstance(transform, mt.Compose) else mt.Compose(transform)
        self.key = key

    def bind(self, case: Case) -> ConstantFill:
        if case.file is None:
            raise ValueError(
                "a fill in the scan's own units needs the scan's file, which is unknown: explain a MetaTensor from "
                f"LoadImaged, give `cases=[ms.Case('ct_7', file='ct_7.nii')]`, or {_INSTEAD}"
            )
        image: Any = case.file
        values = torch.as_tensor(self.value, dtype=torch.float64).reshape(-1)
        for step in steps_on(self.transform, self.key):
            before, image = image, self._run(step, image)
            values = self._after(step, before, image, values)
        if not _is_array(image) or not _same(torch.as_tensor(image).to(case.image), case.image, 1e-3):
            raise ValueError(
                f"`transform` does not give the image that is explained under {self.key!r}: give the preprocessing "
                "that made it, a dictionary pipeline with LoadImaged"
            )
        _check_count(values, len(case.image))
        return ConstantFill(values.expand(len(case.image)).tolist())

    def _run(self, step: Any, image: Any) -> Any:
        """The image after a step."""
        try:
            return run_step(step, self.key, image)
        except Exception as error:
            cause = root_cause(error)
            raise AdviceError(
                "the scan could not be preprocessed again from its file alone, as a fill in the scan's own units "
                f"needs: {type(step).__name__} failed ({type(cause).__name__}: {cause}); {_INSTEAD}"
            ) from error

    def _refused(self, step: Any, reason: str) -> AdviceError:
        return AdviceError(
            f"the value of {self.value} cannot be followed through {type(step).__name__}, which {reason}; {_INSTEAD}"
        )

    def _after(self, step: Any, before: Any, after: Any, values: torch.Tensor) -> torch.Tensor:
        """The values ``(1,)`` or ``(C,)`` after a step that made the image ``after`` of ``before``."""
        kind = type(step)
        known = _KEEP_THE_VALUE | _RUN_ON_THE_VALUE | {*_WITH_STATISTICS} if _is_array(before) else {mt.LoadImaged}
        if kind not in known or not _is_array(after):
            raise self._refused(step, "is not one of the steps that ScanUnitFill knows")
        new = plain(torch.as_tensor(after))
        if kind not in _RUN_ON_THE_VALUE and kind not in _WITH_STATISTICS:
            self._check_kept(step, new, values)
            return values
        old = plain(torch.as_tensor(before))
        _check_count(values, len(old))
        voxels = values.expand(len(old)).to(old)[:, None]  # (C, 1): an image of one voxel
        if kind in _RUN_ON_THE_VALUE:
            made = plain(torch.as_tensor(step({self.key: voxels})[self.key]))
        else:
            made = self._with_statistics(step, old, new, voxels)
        values = made.double().flatten().cpu()
        return values[:1] if len(values.unique()) == 1 else values

    def _check_kept(self, step: Any, new: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse a spatial step or a conversion, which made ``new``, that does not keep the values."""
        if not new.is_floating_point() and not torch.equal(values.to(new.dtype).double(), values):
            raise self._refused(step, f"gives {new.dtype}: this type cannot hold it")
        if isinstance(step, mt.Resized) and any(step.anti_aliasing):
            raise self._refused(step, "blurs the border (anti_aliasing)")

    def _with_statistics(self, step: Any, old: torch.Tensor, new: torch.Tensor, voxels: torch.Tensor) -> torch.Tensor:
        """Voxels ``(C, 1)`` after a step that made ``new`` of ``old``, with its statistics of ``old``."""
        name, freeze = _WITH_STATISTICS[type(step)]
        transform = getattr(step, name)
        if transform.channel_wise:
            frozen = [freeze(transform, channel, number) for number, channel in enumerate(old)]
        else:
            of_all = freeze(transform, old, 0)
            frozen = [of_all for _ in old]
        if not _same(_by_channel(frozen, old), new, 1e-5):
            raise self._refused(step, "has settings that ScanUnitFill does not know")
        return _by_channel(frozen, voxels)


def steps_on(pipeline: mt.Compose, key: Hashable) -> list[Any]:
    """The steps of a preprocessing that change the image under a key."""
    steps = []
    for step in pipeline.flatten().transforms:
        if key in getattr(step, "keys", [key]) and not getattr(step, "only_checks", False):
            steps.append(step)
    return steps


def run_step(step: Any, key: Hashable, image: Any) -> Any:
    """The image after a step, which gets a copy: it may change it in place."""
    step = copy.copy(step)
    step.allow_missing_keys = True  # of other keys than the image's
    return step({key: copy.deepcopy(image)})[key]


# Each gives a transform of one channel with the statistics of the voxels of a scan, as MONAI's transform takes them.


def _scale(scale: Any, voxels: torch.Tensor, channel: int) -> Any:
    return mt.ScaleIntensityRange(float(voxels.min()), float(voxels.max()), scale.minv, scale.maxv, dtype=scale.dtype)


def _percentiles(scale: Any, voxels: torch.Tensor, channel: int) -> Any:
    low, high = float(percentile(voxels, scale.lower)), float(percentile(voxels, scale.upper))
    return mt.ScaleIntensityRange(low, high, scale.b_min, scale.b_max, scale.clip, scale.dtype)


def _normalize(normalize: Any, voxels: torch.Tensor, channel: int) -> Any:
    used = (voxels[voxels != 0] if normalize.nonzero else voxels).float()
    mean, deviation = used.mean(), used.std(unbiased=False)
    if normalize.subtrahend is not None:
        mean = np.ravel(normalize.subtrahend)[channel]
    if normalize.divisor is not None:
        deviation = np.ravel(normalize.divisor)[channel]
    kind: Any = mt.NormalizeIntensity  # its types know arrays alone
    return kind(float(mean), float(deviation), normalize.nonzero, dtype=normalize.dtype)


def _clip(clip: Any, voxels: torch.Tensor, channel: int) -> Any:
    low = percentile(voxels, clip.lower or 0)
    high = percentile(voxels, 100 if clip.upper is None else clip.upper)
    return lambda values: values.clamp(low, high)


#: the step's own transform of arrays, and what gives it the statistics of one scan
_WITH_STATISTICS: dict[type, tuple[str, Callable[[Any, torch.Tensor, int], Any]]] = {
    mt.ScaleIntensityd: ("scaler", _scale),
    mt.NormalizeIntensityd: ("normalizer", _normalize),
    mt.ScaleIntensityRangePercentilesd: ("scaler", _percentiles),
    mt.ClipIntensityPercentilesd: ("scaler", _clip),
}


def _by_channel(transforms: Sequence[Any], image: torch.Tensor) -> torch.Tensor:
    """An image ``(C, ...)`` after each channel went through a transform of its own."""
    channels = [transform(channel.clone()) for transform, channel in zip(transforms, image, strict=True)]
    return torch.stack([plain(torch.as_tensor(channel)) for channel in channels])


def _is_array(image: Any) -> bool:
    return isinstance(image, (torch.Tensor, np.ndarray))


def _check_count(values: torch.Tensor, channels: int) -> None:
    if len(values) not in (1, channels):
        raise ValueError(f"`value` must be one number or one per channel, got {len(values)} for {channels} channels")


def _same(image: torch.Tensor, explained: torch.Tensor, tolerance: float) -> bool:
    """Whether two images are the same, but for rounding."""
    one, other = plain(image).double(), plain(explained).double()
    atol = tolerance * float(other.abs().nanmean())
    return one.shape == other.shape and torch.allclose(one, other, tolerance, atol, equal_nan=True)
