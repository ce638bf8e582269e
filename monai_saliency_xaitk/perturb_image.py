"""Masks: where an image is perturbed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from monai_saliency_xaitk.base import EnginePerturber, check_p1, pair

if TYPE_CHECKING:
    from monai_saliency.masks.base import Masks

__all__ = ["RISEGrid", "SlidingWindow"]


class RISEGrid(EnginePerturber):
    """Random smooth masks of RISE (Petsiuk et al., BMVC 2018, section 3.2).

    With a seed, the masks are those of xaitk-saliency's ``RISEGrid(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws; None draws a new one for each object.
        threads: kept for configurations. The engine uses torch's threads.

    Raises:
        ValueError: when ``p1`` is not in [0, 1].

    Example::

        >>> import numpy as np
        >>> from monai_saliency_xaitk.perturb_image import RISEGrid
        >>> RISEGrid(n=3, s=2, p1=0.5, seed=0)(np.zeros((4, 6), np.uint8)).shape
        (3, 4, 6)
    """

    def __init__(self, n: int, s: int, p1: float, seed: int | None = None, threads: int | None = 4) -> None:
        self.n = n
        self.s = s
        self.p1 = check_p1(p1)
        self.seed = seed
        self.threads = threads
        self._seed = _drawn(seed)

    @property
    def grid(self) -> np.ndarray:
        """The small grids ``(n, s, s)``, float32: 1 where a cell is kept."""
        drawn = np.random.default_rng(self._seed).random((self.n, self.s, self.s)) < self.p1
        return drawn.astype(np.float32)

    def masks(self, shape: Sequence[int]) -> Masks:
        from monai_saliency.masks.rise import RISEMasks

        return RISEMasks(self.n, self.s, self.p1, self._seed)


class SlidingWindow(EnginePerturber):
    """Windows that slide over the image (Zeiler and Fergus, ECCV 2014, section 4.2): each mask hides one.

    Args:
        window_size: height and width of a window.
        stride: steps from window to window, down and across.

    Example::

        >>> import numpy as np
        >>> from monai_saliency_xaitk.perturb_image import SlidingWindow
        >>> SlidingWindow((1, 2), (1, 2))(np.zeros((1, 4)))[:, 0].tolist()
        [[False, False, True, True], [True, True, False, False]]
    """

    mask_type = np.bool_

    def __init__(self, window_size: tuple[int, int] = (50, 50), stride: tuple[int, int] = (20, 20)) -> None:
        self.window_size = pair("window_size", window_size, int)
        self.stride = pair("stride", stride, int)

    def masks(self, shape: Sequence[int]) -> Masks:
        from monai_saliency.xaitk.array_masks import AnyWindows

        return AnyWindows(self.window_size, self.stride)


def _drawn(seed: int | None) -> int:
    """The seed, or a new one: an object without one has the same masks whenever it is asked."""
    return secrets.randbits(63) if seed is None else seed
