"""Our masks as xaitk-saliency's ``PerturbImage``. Parameters are those of xaitk-saliency's classes.

With a seed the masks equal xaitk-saliency's of ``threads=0``, for any number of threads. Without one, an object draws
one and makes the same masks each time.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from smqtk_core.configuration import Configurable
from xaitk_saliency import PerturbImage

from monai_saliency.masks.base import Masks
from monai_saliency.masks.rise import RandomGridMasks, RISEMasks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks


class Configured(Configurable):
    """An object whose configuration is its constructor's arguments, each held as an attribute of the same name."""

    @classmethod
    def get_default_config(cls) -> dict[str, Any]:
        return _as_json(super().get_default_config())

    def get_config(self) -> dict[str, Any]:
        return _as_json({name: getattr(self, name) for name in self.get_default_config()})


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}


class _Perturber(Configured, PerturbImage):
    """Renders all masks of a family of this package, as the interface asks for them."""

    mask_type: type[np.generic] = np.float32

    def __post_init__(self) -> None:
        self._masks = self.masks()

    @abstractmethod
    def masks(self) -> Masks:
        """The family of masks."""

    def perturb(self, ref_image: np.ndarray) -> np.ndarray:
        """All masks ``(masks, H, W)`` in [0, 1] of an image ``(H, W)`` or ``(H, W, C)``: 1 keeps a pixel."""
        bound = self._masks.bind(torch.empty(1, *ref_image.shape[:2], dtype=torch.float64))
        masks = np.empty((len(bound), *ref_image.shape[:2]), dtype=self.mask_type)
        for chunk, rendered in bound.stream(range(len(bound))):
            masks[chunk] = rendered[:, 0].numpy()
        return masks


@dataclass(eq=False)
class RISEGrid(_Perturber):
    """Random smooth masks of RISE (Petsiuk et al., BMVC 2018, section 3.2).

    Args:
        n: number of masks.
        s: cells of the small grid along each axis.
        p1: probability in (0, 1] that a cell is kept.
        seed: of all draws; None draws one.
        threads: kept for configurations.
    """

    n: int
    s: int
    p1: float
    seed: int | None = None
    threads: int | None = 4

    def masks(self) -> Masks:
        return RISEMasks(self.n, self.s, self.p1, _drawn(self.seed))


@dataclass(eq=False)
class RandomGrid(_Perturber):
    """Random smooth masks with cells of one size ``s`` in pixels, whatever the image's size."""

    n: int
    s: tuple[int, int]
    p1: float
    seed: int | None = None
    threads: int | None = None

    def masks(self) -> Masks:
        return RandomGridMasks(self.n, self.s, self.p1, _drawn(self.seed))


@dataclass(eq=False)
class SlidingRadial(_Perturber):
    """Discs and ellipses that slide over the image: each mask hides one. With ``sigma`` its edge fades (Greydanus et
    al., ICML 2018, equation 1).
    """

    radius: tuple[float, float] = (50, 50)
    stride: tuple[int, int] = (20, 20)
    sigma: tuple[float, float] | None = None

    def masks(self) -> Masks:
        self.mask_type = np.float32 if self.sigma else np.bool_
        return SlidingRadialMasks(self.radius, self.stride, self.sigma or None)


@dataclass(eq=False)
class SlidingWindow(_Perturber):
    """Windows that slide over the image (Zeiler and Fergus, ECCV 2014, section 4.2): each mask hides one."""

    window_size: tuple[int, int] = (50, 50)
    stride: tuple[int, int] = (20, 20)

    mask_type = np.bool_

    def masks(self) -> Masks:
        return SlidingWindowMasks(self.window_size, self.stride)


def _drawn(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else seed
