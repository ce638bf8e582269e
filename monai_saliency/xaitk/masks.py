"""Masks that somebody else made: arrays, and xaitk-saliency's perturbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from xaitk_saliency import PerturbImage

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.utils.arguments import instance
from monai_saliency.xaitk.arrays import image_of, real_tensor


class BoundArrayMasks(BoundMasks):
    """The masks of an array, for one image."""

    def __init__(self, image: torch.Tensor, array: np.ndarray, drawn: bool = False) -> None:
        super().__init__(image)
        self.array = array
        self.num_masks = len(array) if drawn else None

    @cached_property
    def key(self) -> tuple[Any, ...]:  # type: ignore[override]
        digest = hashlib.sha256(np.ascontiguousarray(self.array).data).hexdigest()
        return ("ArrayMasks", self.array.shape, digest)

    def __len__(self) -> int:
        return len(self.array)

    def codes(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """The masks themselves."""
        return {"mask": self.array[np.asarray(ids, dtype=int)]}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return real_tensor(codes["mask"]).to(device, self.dtype)[:, None]


class PerturbImageMasks(Masks):
    """Any ``PerturbImage`` of xaitk-saliency as masks.

    A perturber makes all masks ``(masks, H, W)`` in [0, 1] of a 2D image at once, and they stay in memory.

    Raises:
        ValueError: for another object, and (from ``bind``) for a volume, and when it makes anything else.

    Example::

        >>> import torch
        >>> from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
        >>> from monai_saliency.xaitk import PerturbImageMasks
        >>> masks = PerturbImageMasks(SlidingRadial(radius=(3, 3), stride=(4, 4)))
        >>> masks.bind(torch.zeros(1, 8, 12)).render(range(6)).shape
        torch.Size([6, 1, 8, 12])
    """

    def __init__(self, perturber: PerturbImage) -> None:
        self.perturber = instance("perturber", perturber, PerturbImage, "a PerturbImage of xaitk-saliency")

    @property
    def p1(self) -> float | None:
        """The probability that random masks keep a cell; None for other masks."""
        return getattr(self.perturber, "p1", None)

    @property
    def num_masks(self) -> int | None:
        """The number of random masks; None for other masks."""
        return None if self.p1 is None else getattr(self.perturber, "n", None)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        array = np.asarray(self.perturber(image_of(image)))
        name, shape = type(self.perturber).__name__, tuple(image.shape[1:])
        is_stack = array.ndim == 3 and array.shape[1:] == shape and len(array) > 0
        if not is_stack or array.dtype.kind not in "buif":
            sizes = ", ".join(map(str, shape))
            raise ValueError(
                f"{name} must make masks (masks, {sizes}), at least one and the same for all channels, got "
                f"{array.dtype} {array.shape}"
            )
        lowest, highest = array.min(), array.max()
        if not 0 <= lowest <= highest <= 1:  # NaN is not
            raise ValueError(f"{name} must make masks in [0, 1], 1 where the image is kept, got [{lowest}, {highest}]")
        return BoundArrayMasks(image, array, self.p1 is not None)
