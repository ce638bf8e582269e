"""Masks: where an image is perturbed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from xaitk_saliency import PerturbImage

from monai_saliency.xaitk.plugins.base import Configured, EnginePerturber, check_k, check_p1, pair

if TYPE_CHECKING:
    from monai_saliency.masks.base import Masks

__all__ = ["MCRISEGrid", "RISEGrid", "RandomGrid", "SlidingRadial", "SlidingWindow"]


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
        >>> from monai_saliency.xaitk.plugins.perturb_image import RISEGrid
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


class MCRISEGrid(Configured, PerturbImage):
    """Random smooth masks of MC-RISE (Hatakeyama et al., ACCV 2020, section 3): each hidden cell draws one of k fills.

    Unlike other perturbers it makes k masks for each image, for :class:`MCRISEScoring` and :class:`MCRISEStack` only.
    With a seed, the masks are those of xaitk-saliency's ``MCRISEGrid(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in [0, 1] that a cell is kept.
        k: number of fills.
        seed: of all draws; None draws a new one for each object.
        threads: kept for configurations. The engine uses torch's threads.

    Attributes:
        device: where masks are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run time.

    Raises:
        ValueError: when ``p1`` is not in [0, 1], or ``k`` is below 1.

    Example::

        >>> import numpy as np
        >>> MCRISEGrid(n=3, s=2, p1=0.5, k=2, seed=0)(np.ones((6, 6), np.uint8)).shape
        (2, 3, 6, 6)
    """

    device: str | None = None

    def __init__(self, n: int, s: int, p1: float, k: int, seed: int | None = None, threads: int | None = 4) -> None:
        self.n = n
        self.s = s
        self.p1 = check_p1(p1)
        self.k = check_k(k)
        self.seed = seed
        self.threads = threads
        self._seed = _drawn(seed)

    @property
    def grid(self) -> np.ndarray:
        """The small grids ``(k, n, s, s)``: 0 where a fill replaces a cell, 1 elsewhere."""
        import torch

        bound = self.masks([0.0] * self.k).bind(torch.zeros(1, self.s, self.s))
        return np.moveaxis(bound.codes(range(self.n))["grid"], 1, 0).astype(np.float64)

    def masks(self, fills: Sequence[float | Sequence[float]]) -> Masks:
        """The engine's masks, with k fills, of which the first is given to the engine by itself."""
        from monai_saliency.fills.constant import ConstantFill
        from monai_saliency.masks.mc_rise import MCRISEMasks

        return MCRISEMasks(self.n, [ConstantFill(each) for each in fills[1:]], self.s, self.p1, self._seed)

    def perturb(self, ref_image: np.ndarray) -> np.ndarray:
        """All masks at once.

        Args:
            ref_image: ``(H, W)`` or ``(H, W, C)``.

        Returns:
            ``(k, masks, H, W)`` in [0, 1]: 0 where a fill replaces a pixel, 1 elsewhere.
        """
        from monai_saliency.xaitk.fills import rendered_fills

        return rendered_fills(self.masks([0.0] * self.k), ref_image, self.device)


class RandomGrid(EnginePerturber):
    """Random smooth masks as :class:`RISEGrid` makes them, whose cells have one size, whatever the image's.

    With a seed, the masks are those of xaitk-saliency's ``RandomGrid(threads=0)``, for any number of threads.

    Args:
        n: number of masks.
        s: height and width of a cell, in pixels.
        p1: probability in [0, 1] that a cell is kept.
        seed: of all draws; None draws a new one for each object.
        threads: kept for configurations. The engine uses torch's threads.

    Raises:
        ValueError: when ``p1`` is not in [0, 1], or ``s`` is not two numbers.

    Example::

        >>> import numpy as np
        >>> RandomGrid(n=3, s=(2, 2), p1=0.5, seed=0)(np.ones((6, 6), np.uint8)).shape
        (3, 6, 6)
    """

    def __init__(
        self, n: int, s: tuple[int, int], p1: float, seed: int | None = None, threads: int | None = None
    ) -> None:
        self.n = n
        self.s = pair("s", s, int)
        self.p1 = check_p1(p1)
        self.seed = seed
        self.threads = threads
        self._seed = _drawn(seed)

    def masks(self, shape: Sequence[int]) -> Masks:
        from monai_saliency.masks.random_grid import RandomGridMasks

        return RandomGridMasks(self.n, self.s, self.p1, self._seed)


class SlidingRadial(EnginePerturber):
    """Discs and ellipses that slide over the image: each mask hides one. With ``sigma`` its edge fades (Greydanus et
    al., ICML 2018, equation 1).

    Args:
        radius: half axes, down and across, in pixels.
        stride: steps from centre to centre, down and across.
        sigma: standard deviations of the blur, down and across, in pixels; None for crisp edges.

    Example::

        >>> import numpy as np
        >>> SlidingRadial((1, 1), (2, 2))(np.ones((6, 6), np.uint8)).shape
        (9, 6, 6)
    """

    def __init__(
        self,
        radius: tuple[float, float] = (50, 50),
        stride: tuple[int, int] = (20, 20),
        sigma: tuple[float, float] | None = None,
    ) -> None:
        self.radius = pair("radius", radius, _number)
        self.stride = pair("stride", stride, int)
        self.sigma = pair("sigma", sigma, _number) if sigma else None
        self.mask_type = np.float32 if self.sigma else np.bool_

    def masks(self, shape: Sequence[int]) -> Masks:
        from monai_saliency.xaitk.array_masks import AnyRadials

        return AnyRadials(self.radius, self.stride, self.sigma)


class SlidingWindow(EnginePerturber):
    """Windows that slide over the image (Zeiler and Fergus, ECCV 2014, section 4.2): each mask hides one.

    Args:
        window_size: height and width of a window.
        stride: steps from window to window, down and across.

    Example::

        >>> import numpy as np
        >>> from monai_saliency.xaitk.plugins.perturb_image import SlidingWindow
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


def _number(value: float) -> float:
    """A number as it is: 50 stays 50 in a configuration."""
    return value


def _drawn(seed: int | None) -> int:
    """The seed, or a new one: an object without one has the same masks whenever it is asked."""
    return secrets.randbits(63) if seed is None else seed
