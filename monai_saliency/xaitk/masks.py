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
from monai_saliency.utils.arguments import instance, whole_number
from monai_saliency.xaitk.arrays import image_of, real_tensor

__all__ = ["BoundArrayMasks", "PerturbImageMasks"]


class BoundArrayMasks(BoundMasks):
    """The masks of an array, for one image."""

    def __init__(self, image: torch.Tensor, array: np.ndarray, drawn: bool = False) -> None:
        super().__init__(image)
        self.array = array
        self.num_masks = len(array) if drawn else None

    @cached_property
    def key(self) -> tuple[Any, ...]:  # type: ignore[override]
        return ("ArrayMasks", self.array.shape, _hash(self.array))

    def __len__(self) -> int:
        return len(self.array)

    def codes(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """The masks themselves."""
        return {"mask": self.array[np.asarray(ids, dtype=int)]}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return real_tensor(codes["mask"]).to(device, self.dtype)[:, None]


class PerturbImageMasks(Masks):
    """Any ``PerturbImage`` of xaitk-saliency as masks.

    A perturber makes all masks of an image at once, and they stay in memory. The masks of a volume are those of its
    slices: each hides a part of one slice and keeps the rest. They are made for one slice at a time, again each time
    they are needed, so that memory holds the masks of one slice.

    Args:
        perturber: an object that makes masks.
        slices: for volumes the spatial axis, 0, 1 or 2, that is cut into slices. None refuses volumes.

    Raises:
        ValueError: for another object, and (from ``bind``) when it makes anything but masks ``(masks, H, W)`` in [0,
            1], or for a volume without ``slices``. For a volume the perturber must make the same masks each time.

    Example::

        >>> import torch
        >>> from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
        >>> from monai_saliency.xaitk import PerturbImageMasks
        >>> masks = PerturbImageMasks(SlidingRadial(radius=(3, 3), stride=(4, 4)))
        >>> masks.bind(torch.zeros(1, 8, 12)).render(range(6)).shape
        torch.Size([6, 1, 8, 12])
    """

    def __init__(self, perturber: PerturbImage, slices: int | None = None) -> None:
        self.perturber = instance("perturber", perturber, PerturbImage, "a PerturbImage of xaitk-saliency")
        if slices is not None and whole_number("slices", slices, 0) > 2:
            raise ValueError(f"`slices` must be the spatial axis 0, 1 or 2, got {slices}")
        self.slices = slices

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
        if image.ndim == 3:
            return BoundArrayMasks(image, self.made(image), self.p1 is not None)
        if self.slices is None:
            raise ValueError(
                f"{type(self.perturber).__name__} perturbs 2D images, got {tuple(image.shape)}: to perturb a volume "
                "slice by slice, name the axis that is cut (slices=2)"
            )
        return _SliceMasks(self, image, self.slices)

    def made(self, image: torch.Tensor) -> np.ndarray:
        """All masks ``(masks, H, W)`` of an image ``(C, H, W)``.

        Raises:
            ValueError: when they are not masks of this image.
        """
        array, name = np.asarray(self.perturber(image_of(image))), type(self.perturber).__name__
        shape = tuple(image.shape[1:])
        if array.ndim != 3 or array.shape[1:] != shape or not len(array) or array.dtype.kind not in "buif":
            raise ValueError(
                f"{name} must make masks (masks, {', '.join(map(str, shape))}), at least one, got {array.dtype} "
                f"{array.shape}"
                + ("; several masks for one image, as of colours, have no place here" if array.ndim == 4 else "")
            )
        lowest, highest = array.min(), array.max()
        if not 0 <= lowest <= highest <= 1:  # NaN is not
            raise ValueError(f"{name} must make masks in [0, 1], 1 where the image is kept, got [{lowest}, {highest}]")
        return array


class _SliceMasks(BoundMasks):
    """Masks of the slices of a volume, made again when they are needed."""

    def __init__(self, masks: PerturbImageMasks, image: torch.Tensor, axis: int) -> None:
        super().__init__(image)
        self.masks, self.axis, self.image = masks, axis, image
        self._held: tuple[int, np.ndarray] | None = None
        made = (masks.made(image.select(axis + 1, number)) for number in range(self.spatial_shape[axis]))
        counts, self._marks = zip(*((len(array), _hash(array)) for array in made), strict=True)
        self._starts = np.cumsum([0, *counts])
        self.num_masks = len(self) if masks.p1 is not None else None
        self.key = ("PerturbImageMasks", axis, self._marks, self.spatial_shape)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def codes(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """``slice``, int ``(n,)``, and ``mask`` ``(n, *slice)``, what it keeps of this slice."""
        chosen = np.asarray(ids, dtype=int)
        slices = np.searchsorted(self._starts, chosen, side="right") - 1
        places = zip(slices.tolist(), (chosen - self._starts[slices]).tolist(), strict=True)
        return {"slice": slices, "mask": np.stack([self._of_slice(number)[place] for number, place in places])}

    def _of_slice(self, number: int) -> np.ndarray:
        if self._held is None or self._held[0] != number:
            self._held = number, self.masks.made(self.image.select(self.axis + 1, number))
            if _hash(self._held[1]) != self._marks[number]:
                raise ValueError(
                    f"{type(self.masks.perturber).__name__} makes other masks when it is asked again, and masks of a "
                    "volume are made again to save memory: give it a seed, and threads=0"
                )
        return self._held[1]

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        masks = torch.ones(len(codes["slice"]), 1, *self.spatial_shape, dtype=self.dtype, device=device)
        for mask, number, kept in zip(masks, codes["slice"].tolist(), codes["mask"], strict=True):
            mask[0].select(self.axis, number).copy_(real_tensor(kept))
        return masks


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
