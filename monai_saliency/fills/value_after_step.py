"""What one step of a preprocessing, as it was applied to one scan, makes of one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
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
    Orientationd,
    RepeatChanneld,
    ResampleToMatchd,
    Resized,
    ResizeWithPadOrCropd,
    Rotate90d,
    Rotated,
    ScaleIntensityRanged,
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

from monai_saliency.fills.frozen_steps import Frozen, frozen
from monai_saliency.utils.tensors import plain

__all__ = ["LOADERS", "fits", "value_after_step"]

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

#: MONAI's steps that read nothing of the scan
_ALONE: tuple[type, ...] = (
    *_CASTS,
    *(RepeatChanneld, ScaleIntensityRanged, ShiftIntensityd, ThresholdIntensityd),
)

#: one voxel in so many holds the value in the trial of an unknown step, where the scan is large enough
_ONE_OF = 17

#: a trial with fewer voxels than these shows nothing
_FEWEST = 8

Run = Callable[[Any], Any]


def value_after_step(step: Any, run: Run, before: Any, after: Any, values: torch.Tensor) -> torch.Tensor | None:
    """The values after a step, with the scan's statistics, and the places of its voxels, as they were for this scan.

    Nothing is assumed of a step that is not known:

    - MONAI's spatial steps leave the value unchanged.
    - MONAI's steps that read nothing of the scan, and those that are known with their statistics
      (:mod:`monai_saliency.fills.frozen_steps`), are run on some of the scan's voxels beside the value.
    - Any other step is run once more, on the scan with the value in one voxel of 17, single ones and blocks. If all
      other voxels come out as before, to the bit, and the value is the same everywhere, that is what the step makes of
      it. The step is then run with the value in one voxel alone: a step whose statistics follow the value, and change
      no voxel of this scan, gives another value.
    - If other voxels change, the step reads statistics. The value is then read from the true scan: from voxels that
      hold it, or, between the scan's minimum and maximum, from the straight line on which all of its voxels lie. The
      trial must agree: there too the value comes out the same everywhere (a spatial filter does not give that), and on
      the line.

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
    if old.ndim < 2 or old.shape[1:] != new.shape[1:] or len(values) not in (1, len(old)) or not fits(values, old):
        return None
    each = values.expand(len(old))
    functions = frozen(step, old, new)
    if type(step) in _ALONE:
        found = _beside_few_voxels(lambda few: _run_on_voxels(run, few, before), old, new, each)
    elif functions is not None:
        found = _beside_few_voxels(lambda few: _each_channel(functions, few), old, new, each)
    else:
        found = _by_trial(run, before, old, new, each)
    if found is None or not bool(found.isfinite().all()):
        return None
    if type(step) in _CASTS and not bool(((found - each).abs() < (1e-3 * each.abs()).clamp_min(1)).all()):
        return None  # the value does not fit the new type
    return found[:1] if len(found.unique()) == 1 else found


def fits(values: torch.Tensor, image: torch.Tensor) -> bool:
    """Whether voxels of an image can hold the values: whole numbers in reach, where its type is one of whole numbers.

    Args:
        values: float64, of any shape.
        image: of any shape.
    """
    return image.is_floating_point() or bool((values.to(image.dtype).double() == values).all())


def _keeps_a_constant(step: Any, old: torch.Tensor, new: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a spatial step leaves an image of one value as it is."""
    if isinstance(step, Resized) and any(step.anti_aliasing):
        return False  # its Gaussian darkens the border
    if len(values) > 1 and len(values) != len(new) and type(step) is not EnsureChannelFirstd:
        return False
    return fits(values, new)


def _run_on_voxels(run: Run, few: torch.Tensor, before: Any) -> torch.Tensor:
    """What a step makes of voxels ``(C, n)``, as ``(C', n)``."""
    image = few.reshape(*few.shape, *[1] * (before.ndim - 2))
    out = plain(torch.as_tensor(run(image.numpy() if isinstance(before, np.ndarray) else MetaTensor(image))))
    return out.flatten(1)


def _each_channel(functions: list[Frozen], few: torch.Tensor) -> torch.Tensor:
    """What frozen steps make of voxels ``(C, n)``."""
    return torch.stack([plain(function(voxels)) for function, voxels in zip(functions, few, strict=True)])


def _beside_few_voxels(
    apply: Callable[[torch.Tensor], torch.Tensor], old: torch.Tensor, new: torch.Tensor, values: torch.Tensor
) -> torch.Tensor | None:
    """The values after a step that turns some voxels, run alone beside the values, into what they are in ``new``."""
    x, y = old.flatten(1), new.flatten(1)
    # Whole numbers throughout: as float32, places above 2 ** 24 are rounded.
    picks = torch.cat([torch.arange(62) * (x.shape[1] - 1) // 61, *(each.cpu() for each in _extremes(x))])
    few = torch.cat([x[:, picks], values[:, None].to(x)], dim=1)
    try:
        out = apply(few)
    except Exception:  # a step that needs a whole scan may fail on a few voxels, with any exception
        return None
    if out.shape != (len(y), few.shape[1]):
        return None
    out, expected = out.double(), y[:, picks].double()
    known = expected.isfinite()
    if not _equal(out[:, :-1][~known], expected[~known]):
        return None
    size = expected[known].abs().max() if bool(known.any()) else expected.new_zeros(())
    return out[:, -1].cpu() if _close(out[:, :-1][known], expected[known], 1e-5 * size) else None


def _extremes(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of the least and the greatest of ``(C, voxels)``, each ``(C,)``. NaN is neither."""
    flat = flat if flat.is_floating_point() else flat.double()  # torch does not order all types
    nan = flat.isnan()
    return flat.masked_fill(nan, torch.inf).argmin(dim=1), flat.masked_fill(nan, -torch.inf).argmax(dim=1)


def _by_trial(run: Run, before: Any, old: torch.Tensor, new: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """The values after a step of which nothing is known: see :func:`value_after_step`."""
    channels = len(old)
    if channels > 1 and len(new) != channels:
        return None
    planted = _places(old)
    if int(planted.sum(dim=1).min()) < _FEWEST:
        return None
    trial = _tried(run, before, new, planted, values)
    if trial is None:
        return None
    x, y, tried, out = (image.flatten(1) for image in (old, new, *trial))
    found, still = [], []
    for c in range(len(y)):
        source = c if channels > 1 else 0
        one = _one_value(out[c][planted[source]].double())
        if one is not None and not _equal(torch.where(planted[source], y[c], out[c]), y[c]):
            scan, trial_scan = (x[source].double(), y[c].double()), (tried[source].double(), out[c].double())
            one = _with_statistics(*scan, *trial_scan, float(values[source].to(old)))
        else:
            still.append(c)
        if one is None:
            return None
        found.append(one)
    if still and not _so_alone(run, before, new, planted, values, {c: found[c] for c in still}):
        return None
    return torch.tensor(found, dtype=torch.float64)


def _so_alone(
    run: Run, before: Any, new: torch.Tensor, planted: torch.Tensor, values: torch.Tensor, found: dict[int, float]
) -> bool:
    """Whether channels give the values found, and other voxels as they are, where one voxel alone holds the value."""
    single = torch.zeros_like(planted)
    for places, one in zip(planted, single, strict=True):
        candidates = places.nonzero()[:, 0]
        one[candidates[len(candidates) // 2]] = True
    trial = _tried(run, before, new, single, values)
    if trial is None:
        return False
    y, out = new.flatten(1), trial[1].flatten(1)
    for c, value in found.items():
        places = single[c if len(single) > 1 else 0]
        alone = out[c][places].double()
        if not _close(alone, alone.new_tensor([value]), 1e-6 * alone.abs().max()):
            return False
        if not _equal(torch.where(places, y[c], out[c]), y[c]):
            return False
    return True


def _tried(
    run: Run, before: Any, new: torch.Tensor, planted: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scan with the values ``(C,)`` at places ``(C, voxels)``, and what the step makes of it; None if it fails."""
    trial = before.clone() if isinstance(before, torch.Tensor) else torch.tensor(before)
    scan = plain(trial)
    scan.copy_(torch.where(planted.reshape(scan.shape), values.to(scan).reshape(-1, *[1] * (scan.ndim - 1)), scan))
    try:
        out = plain(torch.as_tensor(run(trial.numpy() if isinstance(before, np.ndarray) else trial)))
    except Exception:  # a step may reject such a scan, with any exception
        return None
    return None if out.shape != new.shape else (scan, out)


def _places(image: torch.Tensor) -> torch.Tensor:
    """Where a trial has the value: single voxels and blocks, other ones in each channel, but not its extremes.

    A filter that removes specks leaves single voxels of a flat scan as they were, and not the blocks.

    Args:
        image: ``(C, *spatial)``.

    Returns:
        ``(C, voxels)``, true for about one voxel of 17, or more in small scans.
    """
    one_of = 2 * min(_ONE_OF, max(2, image[0].numel() // 16))
    # At random places: a regular pattern may be its own mirror image.
    generator = torch.Generator().manual_seed(0)
    edges = [min(4, max(1, size // 4)) for size in image.shape[1:]]
    cells = [-(-size // edge) for size, edge in zip(image.shape[1:], edges, strict=True)]
    blocks = torch.randint(one_of, (len(image), *cells), dtype=torch.uint8, generator=generator) == 0
    blocks.flatten(1)[:, blocks[0].numel() // 2] = True
    for axis, (size, edge) in enumerate(zip(image.shape[1:], edges, strict=True), 1):
        blocks = blocks.repeat_interleave(edge, dim=axis).narrow(axis, 0, size)
    single = torch.randint(one_of, image.shape, dtype=torch.uint8, generator=generator) == 0
    planted = (blocks | single).flatten(1).to(image.device)
    for places in _extremes(image.flatten(1)):
        planted.scatter_(1, places[:, None], False)
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
        if value != 0 and _on_line(tried[there], out[there], value) is not None:
            return _on_line(x[here], y[here], value)
    return None


def _held(x: torch.Tensor, y: torch.Tensor, value: float) -> float | None:
    """What became of a value that voxels ``x`` hold, in ``y``; None if none holds it, or it became several."""
    return _one_value(y[x == value])


def _one_value(found: torch.Tensor) -> float | None:
    if not len(found):
        return None
    return float(found[0]) if _close(found, found[:1], 1e-6 * found[:1].abs().max()) else None


def _on_line(x: torch.Tensor, y: torch.Tensor, value: float) -> float | None:
    """The place of a value on the straight line that turns voxels ``x`` into ``y``; None if there is no such line.

    Each voxel must lie on it but for the rounding of numbers of its own size: beside one huge voxel, any others would
    seem to lie on a line.
    """
    if not len(x) or not bool(x.max() > x.min()):
        return None
    low, high, near = x.argmin(), x.argmax(), (x - value).abs().argmin()
    slope = (y[high] - y[low]) / (x[high] - x[low])
    line = y[near] + slope * (x - x[near])
    size = y.abs() + y[near].abs() + y.abs().mean() + slope.abs() * (x.abs() + x[near].abs())
    return float(y[near] + slope * (value - x[near])) if bool(((line - y).abs() <= 1e-6 * size).all()) else None


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= tolerance)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree to the bit. NaN agrees with NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
