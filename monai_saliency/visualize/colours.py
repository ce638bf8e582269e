"""The colours of maps, cold below zero and warm above, growing with the square root of the value; and of scans."""

from __future__ import annotations

import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.visualize.legend import TIMES_ERROR, Legend

__all__ = ["COLD", "OPACITY", "WARM", "blended", "coloured_voxels", "focus_voxel", "gray_window"]

# From against to for the score. No white in the middle: what is coloured at all must be seen on a white lesion.
#: from the lowest value to the last one below zero
COLD = ("#08306b", "#2171b5", "#41b6c4", "#a8ddb5")
#: from the first value above zero to the highest one
WARM = ("#ffe08a", "#fd8d3c", "#e31a1c", "#800026")
#: of the weakest and the strongest colours; the scan is seen under both
OPACITY = (0.3, 0.6)


def coloured_voxels(saliency: np.ndarray, error: np.ndarray | None, legend: Legend) -> np.ndarray:
    """Which voxels ``(*spatial)`` of a map are coloured, by its standard error where there is one."""
    if not legend.in_score_unit and legend.is_nothing(saliency):
        return np.zeros(saliency.shape, bool)
    size = np.abs(saliency)
    found = np.isfinite(size) & (size >= legend.floor(error is not None))
    return found if error is None else found & (size >= TIMES_ERROR * error)


def focus_voxel(saliency: np.ndarray, coloured: np.ndarray) -> tuple[int, ...]:
    """The voxel that is looked at first: the peak, or the strongest coloured one, or the middle if none is coloured."""
    if not coloured.any():
        return tuple(size // 2 for size in saliency.shape)
    peak = peak_voxel(saliency)
    return peak if coloured[peak] else peak_voxel(np.where(coloured, np.abs(saliency), 0))


def gray_window(scan: np.ndarray) -> tuple[float, float]:
    """The scan's values that are drawn black and white."""
    finite = np.isfinite(scan)
    if not finite.all():
        scan = scan[finite] if finite.any() else np.zeros(1)
    # A small lesion can be the brightest part of the scan, so almost nothing is clipped at the upper end.
    low, high = np.percentile(scan, [0.5, 99.99])
    return low, max(high, low + 1e-6)


def blended(gray: np.ndarray, saliency: np.ndarray, coloured: np.ndarray, scale: float) -> np.ndarray:
    """A picture of a map over its scan, ``(rows, columns, 3)`` in uint8."""
    scan = np.broadcast_to(gray[..., None], (*gray.shape, 3)) if gray.ndim == 2 else gray
    strength = np.sqrt(np.clip(np.abs(np.nan_to_num(saliency)) / scale, 0, 1))
    places = np.linspace(0, 1, len(WARM))
    colours = np.stack(
        [
            np.where(saliency < 0, np.interp(strength, places, cold[::-1]), np.interp(strength, places, warm))
            for cold, warm in zip(_channels(COLD), _channels(WARM), strict=True)
        ],
        axis=-1,
    )
    weakest, strongest = OPACITY
    alpha = np.where(coloured, weakest + (strongest - weakest) * strength, 0.0)[..., None]
    return np.rint(255 * (1 - alpha) * np.clip(scan, 0, 1) + alpha * colours).astype(np.uint8)


def _channels(colours: tuple[str, ...]) -> list[list[int]]:
    """Red, green and blue of some colours, in [0, 255]."""
    return [[int(each[i : i + 2], 16) for each in colours] for i in (1, 3, 5)]
