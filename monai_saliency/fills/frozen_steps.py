"""MONAI's steps that read statistics of a scan, frozen: what they make of any voxels, with this scan's statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from monai.transforms import (
    AdjustContrastd,
    ClipIntensityPercentilesd,
    NormalizeIntensity,
    NormalizeIntensityd,
    ScaleIntensityd,
    ScaleIntensityRange,
    ScaleIntensityRangePercentilesd,
)
from monai.transforms.utils import soft_clip
from monai.transforms.utils_pytorch_numpy_unification import clip, percentile
from monai.utils import convert_data_type

__all__ = ["Frozen", "frozen"]

#: takes voxels ``(n,)`` of one channel and returns what the step makes of them; NaN where that is not known
Frozen = Callable[[torch.Tensor], torch.Tensor]


def frozen(step: Any, old: torch.Tensor, new: torch.Tensor) -> list[Frozen] | None:
    """A step with the statistics of one scan.

    Of a scan of one value, with no statistics to speak of, only this value is known.

    Args:
        step: the step.
        old: the scan before the step, ``(C, *spatial)``.
        new: the scan after it, of the same shape.

    Returns:
        one function for each channel; None where the step is not one of MONAI's, or reads further statistics.
    """
    if type(step) not in _FREEZE or old.shape != new.shape:
        return None
    name, freeze = _FREEZE[type(step)]
    transform = getattr(step, name)
    each = bool(getattr(transform, "channel_wise", False))
    functions = []
    for c, voxels in enumerate(old if each else [old]):
        function = freeze(transform, voxels, c)
        if function is None:
            return None
        if bool(voxels.min() == voxels.max()):
            function = _only(voxels.flatten()[:1], new[c].flatten()[:1])
        functions.append(function)
    return functions if each else functions * len(old)


def _only(value: torch.Tensor, result: torch.Tensor) -> Frozen:
    """A function that is known at one value."""

    def function(voxels: torch.Tensor) -> torch.Tensor:
        return torch.where(voxels == value, result.double(), torch.nan)

    return function


def _scale(scale: Any, voxels: torch.Tensor, channel: int) -> Frozen:
    if scale.minv is None and scale.maxv is None:
        return lambda values: scale(values)

    def typed(values: torch.Tensor) -> torch.Tensor:
        return values if scale.dtype is None else convert_data_type(values, dtype=scale.dtype)[0]

    low, high = (float(typed(extreme)) for extreme in (voxels.min(), voxels.max()))
    to_range: Any = ScaleIntensityRange(low, high, scale.minv, scale.maxv, dtype=scale.dtype)
    return lambda values: to_range(typed(values))


def _normalize(normalize: Any, voxels: torch.Tensor, channel: int) -> Frozen | None:
    given = (normalize.subtrahend, normalize.divisor)
    if any(each is not None and np.ndim(each) != int(normalize.channel_wise) for each in given):
        return None  # another number for each voxel
    mean, deviation = (None if each is None else float(np.ravel(each)[channel]) for each in given)
    voxels = voxels.float()
    voxels = voxels[voxels != 0] if normalize.nonzero else voxels
    if not voxels.numel():
        return lambda values: torch.where(values == 0, 0.0, torch.nan)
    mean = voxels.mean().item() if mean is None else mean
    is_known = deviation is not None
    deviation = voxels.std(unbiased=False).item() if deviation is None else deviation
    kind: Any = NormalizeIntensity  # whose types know arrays alone
    alone = kind(mean, deviation, normalize.nonzero, dtype=normalize.dtype)
    if deviation or is_known:
        return lambda values: alone(values.clone())
    only = voxels.flatten()[0]
    return lambda values: torch.where((values == 0) | (values == only), alone(values.clone()), torch.nan)


def _percentiles(scale: Any, voxels: torch.Tensor, channel: int) -> Frozen:
    low, high = scale.b_min, scale.b_max
    if scale.relative:
        span = high - low
        low, high = span * (scale.lower / 100.0) + low, span * (scale.upper / 100.0) + low
    least, most = (float(percentile(voxels, each)) for each in (scale.lower, scale.upper))
    to_range: Any = ScaleIntensityRange(least, most, low, high, scale.clip, dtype=scale.dtype)
    return lambda values: to_range(values)


def _clip(clipping: Any, voxels: torch.Tensor, channel: int) -> Frozen:
    low, high = (None if each is None else percentile(voxels, each) for each in (clipping.lower, clipping.upper))
    factor = clipping.sharpness_factor
    if factor is None:
        ends = (voxels.min() if low is None else low, voxels.max() if high is None else high)
        return lambda values: torch.as_tensor(clip(values, *ends)).to(voxels.dtype)
    return lambda values: torch.as_tensor(soft_clip(values, factor, low, high, clipping.dtype)).to(voxels.dtype)


def _contrast(adjust: Any, voxels: torch.Tensor, channel: int) -> Frozen | None:
    if adjust.retain_stats:
        return None
    ends = torch.stack([voxels.min(), voxels.max()])

    def function(values: torch.Tensor) -> torch.Tensor:
        inside = (values >= ends[0]) & (values <= ends[1])
        return torch.where(inside, adjust(torch.cat([values.clamp(*ends), ends]))[:-2], torch.nan)

    return function


#: the step's own transform of arrays, and what freezes it
_FREEZE: dict[type, tuple[str, Callable[[Any, torch.Tensor, int], Frozen | None]]] = {
    ScaleIntensityd: ("scaler", _scale),
    NormalizeIntensityd: ("normalizer", _normalize),
    ScaleIntensityRangePercentilesd: ("scaler", _percentiles),
    ClipIntensityPercentilesd: ("scaler", _clip),
    AdjustContrastd: ("adjuster", _contrast),
}
