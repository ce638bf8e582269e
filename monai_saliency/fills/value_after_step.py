"""What one step of a preprocessing, as it was applied to one scan, makes of one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
    AdjustContrastd,
    Affined,
    BorderPadd,
    BoundingRectd,
    CastToTyped,
    CenterScaleCropd,
    CenterSpatialCropd,
    CropForegroundd,
    DivisiblePadd,
    EnsureChannelFirstd,
    EnsureTyped,
    Flipd,
    GridDistortiond,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RepeatChanneld,
    ResampleToMatchd,
    Resized,
    ResizeWithPadOrCropd,
    Rotate90d,
    Rotated,
    ScaleIntensityd,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentiles,
    ScaleIntensityRangePercentilesd,
    ShiftIntensityd,
    Spacingd,
    SpatialCropd,
    SpatialPadd,
    SpatialResampled,
    SqueezeDimd,
    ThresholdIntensityd,
    ToDeviced,
    ToNumpyd,
    ToTensord,
    Zoomd,
)

from monai_saliency.utils.tensors import plain

__all__ = ["LOADERS", "value_after_step"]

#: these give the scan in the file's own unit
LOADERS: tuple[type, ...] = (LoadImaged,)

#: MONAI's steps that move voxels, or interpolate with weights of sum 1
_SPATIAL: tuple[type, ...] = (
    *(Affined, BorderPadd, BoundingRectd, CenterScaleCropd, CenterSpatialCropd, CropForegroundd, DivisiblePadd),
    *(EnsureChannelFirstd, Flipd, GridDistortiond, Orientationd, ResampleToMatchd, Resized, ResizeWithPadOrCropd),
    *(Rotate90d, Rotated, Spacingd, SpatialCropd, SpatialPadd, SpatialResampled, SqueezeDimd, Zoomd),
)

#: MONAI's steps that only store the same numbers in another form
_CASTS: tuple[type, ...] = (CastToTyped, EnsureTyped, ToDeviced, ToNumpyd, ToTensord)

#: MONAI's steps that read of the scan nothing, or its minimum and maximum alone
_FEW_VOXELS: tuple[type, ...] = (
    *_CASTS,
    *(AdjustContrastd, RepeatChanneld, ScaleIntensityd, ScaleIntensityRanged, ShiftIntensityd, ThresholdIntensityd),
    NormalizeIntensityd,  # where its mean and deviation are given
)

#: one voxel in so many holds the value in the trial of an unknown step
_ONE_OF = 17

Run = Callable[[Any], Any]


def value_after_step(step: Any, run: Run, before: Any, after: Any, values: torch.Tensor) -> torch.Tensor | None:
    """The values after a step, with the scan's statistics, and the places of its voxels, as they were for this scan.

    Nothing is assumed of a step that is not known:

    - MONAI's spatial steps leave the value unchanged.
    - MONAI's steps that read nothing of the scan, or its extremes, are run on some of the scan's voxels, the extremes
      among them, beside the value.
    - Any other step is run once more, on the scan with the value in one voxel of 17. If all other voxels come out as
      before, to the bit, and the value is the same everywhere, that is what the step makes of it.
    - If other voxels change, the step reads statistics. The value is then read from the true scan: from voxels that
      hold it, or, between the scan's minimum and maximum, from the straight line on which all of its voxels lie. The
      trial must agree: there too the value comes out the same everywhere (a spatial filter does not give that), and on
      the line.
    - MONAI's ``NormalizeIntensityd``, ``ScaleIntensityd`` and ``ScaleIntensityRangePercentilesd`` are known to be
      linear, also beyond the scan's minimum and maximum (but for the clip), and need no trial.

    Args:
        step: the step.
        run: applies the step to an image.
        before: the image before the step, ``(C, *spatial)``, a tensor or an array. It is not changed.
        after: the image after it.
        values: ``(1,)`` or ``(C,)``, float64, the values before it.

    Returns:
        float64, ``(1,)`` or one for each channel of ``after``; None where they are not known exactly.
    """
    old, new = (plain(torch.as_tensor(image)) for image in (before, after))
    if type(step) in _SPATIAL:
        return values if _keeps_a_constant(step, old, new, values) else None
    if old.ndim < 2 or old.shape[1:] != new.shape[1:] or len(values) not in (1, len(old)):
        return None
    each = values.expand(len(old))
    found = None
    if type(step) in _FEW_VOXELS:
        found = _beside_few_voxels(run, before, old, new, each)
    if found is None and _is_linear(step):
        found = _linear(step, old, new, each)
    elif found is None:
        found = _by_trial(run, before, old, new, each)
    if found is None or not bool(found.isfinite().all()):
        return None
    if type(step) in _CASTS and not bool(((found - each).abs() < 1).all()):
        return None  # the value does not fit the new type
    return found[:1] if len(found.unique()) == 1 else found


def _keeps_a_constant(step: Any, old: torch.Tensor, new: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a spatial step leaves an image of one value as it is."""
    if isinstance(step, Resized) and any(step.anti_aliasing):
        return False  # its Gaussian darkens the border
    if len(values) > 1 and len(values) != len(new) and type(step) is not EnsureChannelFirstd:
        return False
    return new.dtype == old.dtype or new.is_floating_point() or bool((values.to(new.dtype) == values).all())


def _is_linear(step: Any) -> bool:
    if type(step) is NormalizeIntensityd:
        given = (step.normalizer.subtrahend, step.normalizer.divisor)
        return all(each is None or np.ndim(each) <= int(step.normalizer.channel_wise) for each in given)
    return type(step) in (ScaleIntensityd, ScaleIntensityRangePercentilesd)


def _linear(step: Any, old: torch.Tensor, new: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """The values ``(C,)`` after a step that is known to be linear, perhaps clipped, read from the scan."""
    if len(old) != len(new):
        return None
    nonzero = type(step) is NormalizeIntensityd and step.normalizer.nonzero
    bounds = _bounds(step.scaler) if type(step) is ScaleIntensityRangePercentilesd else None
    found = []
    for x, y, value in zip(old.flatten(1).double(), new.flatten(1).double(), values.tolist(), strict=True):
        if nonzero and value == 0:
            found.append(0.0)
            continue
        exact = _held(x, y, value)
        if exact is None and bounds is not None:
            exact = _on_clipped_line(x, y, value, bounds)
        elif exact is None:
            exact = _on_line(x, y, value, 1e-5)
        if exact is None and nonzero:
            exact = _on_line(x[x != 0], y[x != 0], value, 1e-5)
        if exact is None:
            return None
        found.append(exact)
    return torch.tensor(found, dtype=torch.float64)


def _beside_few_voxels(
    run: Run, before: Any, old: torch.Tensor, new: torch.Tensor, values: torch.Tensor
) -> torch.Tensor | None:
    """The values after a step that turns some voxels, run alone beside the values, into what they are in ``new``."""
    kind = old.dtype if old.is_floating_point() else torch.float32
    x, y = old.flatten(1).to(kind), new.flatten(1)
    # Whole numbers throughout: as float32, places above 2 ** 24 are rounded.
    picks = torch.cat([torch.arange(62) * (x.shape[1] - 1) // 61, x.argmin(dim=1).cpu(), x.argmax(dim=1).cpu()])
    few = torch.cat([x[:, picks], values[:, None].to(x)], dim=1)
    few = few.reshape(*few.shape, *[1] * (old.ndim - 2))
    try:
        out = plain(torch.as_tensor(run(few.numpy() if isinstance(before, np.ndarray) else MetaTensor(few))))
    except Exception:  # a step that needs a whole scan may fail on a few voxels, with any exception
        return None
    if out.shape != (len(y), *few.shape[1:]):
        return None
    out, expected = out.flatten(1).double(), y[:, picks].double()
    return out[:, -1].cpu() if _close(out[:, :-1], expected, 1e-5 * expected.abs().max()) else None


def _by_trial(run: Run, before: Any, old: torch.Tensor, new: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """The values after a step of which nothing is known: see :func:`value_after_step`."""
    channels = len(old)
    if channels > 1 and len(new) != channels:
        return None
    kind = old.dtype if old.is_floating_point() else torch.float32
    trial = before.clone().to(kind) if isinstance(before, torch.Tensor) else torch.tensor(before, dtype=kind)
    planted = _plant(plain(trial), values)
    try:
        out = plain(torch.as_tensor(run(trial.numpy() if isinstance(before, np.ndarray) else trial)))
    except Exception:  # a step may reject such a scan, with any exception
        return None
    if out.shape != new.shape:
        return None
    x, y, tried, out = (image.flatten(1) for image in (old, new, plain(trial), out))
    found = []
    for c in range(len(y)):
        source = c if channels > 1 else 0
        one = _one_value(out[c][planted[source]].double())
        if one is not None and not _equal(torch.where(planted[source], y[c], out[c]), y[c]):
            scan, trial_scan = (x[source].double(), y[c].double()), (tried[source].double(), out[c].double())
            one = _with_statistics(*scan, *trial_scan, float(values[source].to(kind)))
        if one is None:
            return None
        found.append(one)
    return torch.tensor(found, dtype=torch.float64)


def _plant(image: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Put each channel's value into one voxel of 17, other ones in each channel, but not into the channel's extremes.

    Args:
        image: ``(C, *spatial)``, which is changed in place.
        values: ``(C,)``.

    Returns:
        ``(C, voxels)``, where the value now is.
    """
    flat = image.reshape(len(image), -1)
    # At random places: a regular pattern may be its own mirror image.
    draws = torch.randint(_ONE_OF, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    planted = (draws == 0).to(flat.device)
    for c, channel in enumerate(flat):
        planted[c, channel.argmin()] = planted[c, channel.argmax()] = False
        channel[planted[c]] = values[c].to(flat)
    image.copy_(flat.reshape(image.shape))
    return planted


def _with_statistics(
    x: torch.Tensor, y: torch.Tensor, tried: torch.Tensor, out: torch.Tensor, value: float
) -> float | None:
    """A value after a step that reads statistics, from the scan ``x`` to ``y``, and the trial ``tried`` to ``out``.

    All are ``(voxels,)``. None where scan and trial do not determine it.
    """
    if _held(tried, out, value) is None:
        return None
    if bool((x == value).any()):
        return _held(x, y, value)
    if not bool(x.min() < value < x.max()):
        return None  # a step may clip what is beyond the scan, and no trial shows where
    for keep in (lambda image: torch.ones_like(image, dtype=torch.bool), lambda image: image != 0):
        here, there = keep(x), keep(tried)
        if value != 0 and _on_line(tried[there], out[there], value, 1e-6) is not None:
            return _on_line(x[here], y[here], value, 1e-6)
    return None


def _held(x: torch.Tensor, y: torch.Tensor, value: float) -> float | None:
    """What became of a value that voxels ``x`` hold, in ``y``; None if none holds it, or it became several."""
    return _one_value(y[x == value])


def _one_value(found: torch.Tensor) -> float | None:
    if not len(found):
        return None
    return float(found[0]) if _close(found, found[:1], 1e-6 * found[:1].abs().max()) else None


def _on_line(x: torch.Tensor, y: torch.Tensor, value: float, tolerance: float) -> float | None:
    """The place of a value on the straight line that turns voxels ``x`` into ``y``; None if there is no such line."""
    if not len(x) or not bool(x.max() > x.min()):
        return None
    low, high = x.argmin(), x.argmax()
    slope = (y[high] - y[low]) / (x[high] - x[low])
    if not _close(y[low] + slope * (x - x[low]), y, tolerance * y.abs().max()):
        return None
    return float(y[low] + slope * (value - x[low]))


def _bounds(scaler: ScaleIntensityRangePercentiles) -> tuple[float, float] | None:
    """Where scaling by percentiles clips; None where it does not."""
    low, high = scaler.b_min, scaler.b_max
    if not scaler.clip or low is None or high is None:
        return None
    if not scaler.relative:
        return low, high
    return (high - low) * scaler.lower / 100 + low, (high - low) * scaler.upper / 100 + low


def _on_clipped_line(x: torch.Tensor, y: torch.Tensor, value: float, bounds: tuple[float, float]) -> float | None:
    """As :func:`_on_line`, where places beyond the bounds are clipped to them."""
    inside = (y > min(bounds)) & (y < max(bounds))
    if not bool(inside.any()):
        return None
    here, there = x[inside], y[inside]
    low, high = here.argmin(), here.argmax()
    if not bool(here[high] > here[low]):
        return None
    slope = (there[high] - there[low]) / (here[high] - here[low])
    line = (there[low] + slope * (torch.cat([x, x.new_tensor([value])]) - here[low])).clamp(min(bounds), max(bounds))
    return float(line[-1]) if _close(line[:-1], y, 1e-5 * y.abs().max()) else None


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= tolerance)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree to the bit. NaN agrees with NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
