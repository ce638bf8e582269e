"""The colours of maps: cold below zero, warm above, growing with the square root of the value."""

from __future__ import annotations

import numpy as np

__all__ = ["COLD", "OPACITY", "WARM", "blended"]

# From against to for the score. No white in the middle: what is coloured at all must be seen on a white lesion.
#: from the lowest value to the last one below zero
COLD = ("#08306b", "#2171b5", "#41b6c4", "#a8ddb5")
#: from the first value above zero to the highest one
WARM = ("#ffe08a", "#fd8d3c", "#e31a1c", "#800026")
#: of the weakest and the strongest colours; the scan is seen under both
OPACITY = (0.3, 0.6)


def blended(gray: np.ndarray, saliency: np.ndarray, coloured: np.ndarray, scale: float) -> np.ndarray:
    """A picture of a map over its scan, as bytes.

    Args:
        gray: ``(rows, columns)`` or ``(rows, columns, 3)``, the scan, in [0, 1].
        saliency: ``(rows, columns)``, the map.
        coloured: ``(rows, columns)``, which of its values are coloured.
        scale: the value with the last colour.

    Returns:
        ``(rows, columns, 3)`` in uint8.

    Example::

        >>> one = np.ones((1, 1))
        >>> blended(0 * one, one, one == 1, scale=1).tolist()  # the last warm colour, #800026, at 0.6
        [[[77, 0, 23]]]
    """
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
