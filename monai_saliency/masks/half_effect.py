"""How many cells a mask keeps, so that about half of the effect is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# However the effect falls, some cells are kept and some are hidden.
_LEAST, _MOST = 0.05, 0.95
# Halvings of the interval in which p1 lies: to within a thousandth.
_HALVINGS = 10


def half_effect(kept: Sequence[float], left: Sequence[float]) -> float:
    """The probability p1 that a cell is kept at which half of the effect is left, by the masks scored so far.

    A mask teaches most where chance decides most about its score. Say that the score is 1 or 0:

    - *Any one of k cells is enough (OR)*. It is 1 with probability ``S(p) = 1 - (1 - p)^k``. Its variance ``S (1 - S)``
      is largest at ``S = 1/2``, so at ``p1 = 1 - 2^(-1/k)``: 0.5, 0.29, 0.16 and 0.08 for k = 1, 2, 4 and 8.
    - *All k cells are needed (AND)*. ``S(p) = p^k``, and ``p1 = 2^(-1/k)``: 0.5, 0.71, 0.84 and 0.92.
    - *A sum* of k cells has variance ``p (1 - p) / k`` and mean ``p``; a *majority* has ``S(1/2) = 1/2``. ``p1 = 1/2``.

    So the share of the effect that is left is a half at the best p1 in each case. OR and AND of k are one family of
    curves, one for each p1. The curve is taken on which the expected shares of all masks add up to theirs. Each mask
    counts at its own p1, so masks can be added at the p1 that earlier ones gave. One more mask, kept by half, of which
    half is left, stands for what is known before any is scored.

    Where masks that hide half or more score above the image on average, what they hide is no loss, and they are
    evidence themselves (a broken symmetry). Then hardly anything is hidden.

    Args:
        kept: p1 of each mask.
        left: of each mask the share of the effect that is left, ``(score - fill's) / (image's - fill's)``.

    Returns:
        p1 in [0.05, 0.95]; 0.5 without masks.

    Example::

        >>> from monai_saliency.masks.half_effect import half_effect
        >>> half_effect([], [])
        0.5
        >>> round(half_effect([0.5] * 100, [1.0] * 75 + [0.0] * 25), 2)  # three of four: either of two cells is enough
        0.29
    """
    beyond = [share for p1, share in zip(kept, left, strict=True) if p1 <= 0.5]
    if sum(beyond) > len(beyond):
        return _MOST
    shares = np.array([*left, 0.5]).clip(0, 1)
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_more = shares.sum() > _expected(middle, np.array([*kept, 0.5])).sum()
        low, high = (low, middle) if is_more else (middle, high)
    return round((low + high) / 2, 2)


def _expected(p1: float, kept: np.ndarray) -> np.ndarray:
    """The shares that are left of masks ``(n,)`` where half is left at p1: by an OR below 1/2, by an AND above it."""
    if p1 < 0.5:
        return 1 - (1 - kept) ** (-1 / np.log2(1 - p1))
    return kept ** (-1 / np.log2(p1))
