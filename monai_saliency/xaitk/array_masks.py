"""Masks that somebody else made: arrays, xaitk-saliency's perturbers, and windows of any size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from xaitk_saliency import PerturbImage

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.utils.arguments import instance, whole_number
from monai_saliency.xaitk.images import image_of

__all__ = ["AnyRadials", "AnyWindows", "ArrayMasks", "BoundFillMasks", "PerturbImageMasks"]


class AnyWindows(SlidingWindowMasks):
    """Sliding windows that may be larger than the image, as xaitk-saliency allows them."""

    must_fit = False


class AnyRadials(SlidingRadialMasks):
    """Sliding ellipses that may hide the whole image, as xaitk-saliency allows them."""

    must_fit = False


class ArrayMasks(Masks):
    """Masks that are there already.

    All are in memory at once, as long as their owner keeps them.

    Args:
        array: ``(masks, *spatial)``, numbers in [0, 1]: 1 keeps the image, 0 hides it.

    Raises:
        ValueError: for an array without masks (and from ``bind`` when the image has another shape).
    """

    def __init__(self, array: np.ndarray) -> None:
        array = np.asarray(array)
        if array.ndim < 3 or not len(array):
            raise ValueError(f"masks have the axes (masks, H, W), at least one mask, got shape {array.shape}")
        self.array = array

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        if tuple(image.shape[1:]) != self.array.shape[1:]:
            raise ValueError(f"masks of {self.array.shape[1:]} do not fit an image of {tuple(image.shape[1:])}")
        return BoundArrayMasks(image, self.array)


class BoundArrayMasks(BoundMasks):
    """The masks of an array ``(masks, *spatial)``, for one image.

    Attributes:
        num_masks: how many, where they were drawn at random; otherwise None.
    """

    def __init__(self, image: torch.Tensor, array: np.ndarray, drawn: bool = False) -> None:
        super().__init__(image)
        self.array = array
        self.num_masks = len(array) if drawn else None

    @cached_property
    def key(self) -> tuple[Any, ...]:  # type: ignore[override]
        return ("ArrayMasks", self.array.shape, _hash(self.array))

    def __len__(self) -> int:
        return len(self.array)

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The masks themselves."""
        if isinstance(indices, range) and indices.step == 1:  # without a copy
            return {"mask": self.array[indices.start : indices.stop]}
        return {"mask": self.array[np.asarray(indices, dtype=int)]}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        # A copy: whoever renders masks may write to them.
        return _tensor(codes["mask"]).to(device, self.dtype, copy=True)[:, None]


class BoundFillMasks(BoundMasks):
    """Masks of several fills, of an array ``(fills, masks, *spatial)``, for one image."""

    layer = "fill"

    def __init__(self, image: torch.Tensor, array: np.ndarray) -> None:
        super().__init__(image)
        self.each = [BoundArrayMasks(image, of_fill) for of_fill in array]
        self.channels = len(array)

    @cached_property
    def key(self) -> tuple[Any, ...]:  # type: ignore[override]
        return ("BoundFillMasks", *(each.key for each in self.each))

    def __len__(self) -> int:
        return len(self.each[0])

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The masks themselves, ``(n, fills, *spatial)``."""
        return {"mask": np.stack([each.codes(indices)["mask"] for each in self.each], axis=1)}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return _tensor(codes["mask"]).to(device, self.dtype, copy=True)


class PerturbImageMasks(Masks):
    """Any ``PerturbImage`` of xaitk-saliency as masks.

    A perturber makes all masks of an image at once, and they are held, as it made them: one byte a voxel and mask where
    they are true or false, four or eight otherwise. The masks of a volume are those of its slices, each of which hides
    a part of one slice and keeps the rest. They are made for one slice at a time, again each time they are needed, so
    that memory holds the masks of one slice; a perturber that makes others each time is refused (give it a seed, and
    ``threads=0``).

    Args:
        perturber: an object that makes masks.
        slices: for volumes the spatial axis, 0, 1 or 2, that is cut into slices. None refuses volumes.

    Raises:
        ValueError: for another object, and (from ``bind``) when it makes anything but masks ``(masks, H, W)`` in [0,
            1], or for a volume without ``slices``.

    Example::

        >>> import torch
        >>> from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
        >>> from monai_saliency.xaitk import PerturbImageMasks
        >>> masks = PerturbImageMasks(SlidingRadial(radius=(3, 3), stride=(4, 4)))
        >>> masks.bind(torch.zeros(1, 8, 12)).render(range(6)).shape
        torch.Size([6, 1, 8, 12])
    """

    shorter = "a perturber that makes fewer masks"

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
        drawn = self.p1 is not None
        if image.ndim == 3:
            return BoundArrayMasks(image, self.made(image), drawn)
        if self.slices is None:
            raise ValueError(
                f"{type(self.perturber).__name__} perturbs 2D images, got {tuple(image.shape)}: to perturb a volume "
                "slice by slice, name the axis that is cut (slices=2)"
            )
        return _SliceMasks(self, image, self.slices, drawn)

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
    """Masks of slices of a volume, made again when they are needed."""

    def __init__(self, masks: PerturbImageMasks, image: torch.Tensor, axis: int, drawn: bool) -> None:
        super().__init__(image)
        self.masks, self.axis = masks, axis
        self.image = image
        self._held: tuple[int, np.ndarray] | None = None
        self._marks: list[str] = []
        counts = []
        for number in range(self.spatial_shape[axis]):
            array = masks.made(image.select(axis + 1, number))
            self._marks.append(_hash(array))
            counts.append(len(array))
        self._stops = np.cumsum(counts)
        self.num_masks = int(self._stops[-1]) if drawn else None
        self.key = ("PerturbImageMasks", axis, tuple(self._marks), self.spatial_shape)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """``slice``, int ``(n,)``, and ``mask`` ``(n, *slice)``, what it keeps of this slice."""
        chosen = np.asarray(indices, dtype=int)
        slices = np.searchsorted(self._stops, chosen, side="right")
        starts = np.concatenate([[0], self._stops])
        places = zip(slices.tolist(), (chosen - starts[slices]).tolist(), strict=True)
        masks = [self._of_slice(number)[place] for number, place in places]
        return {"slice": slices, "mask": np.stack(masks)}

    def _of_slice(self, number: int) -> np.ndarray:
        held = self._held
        if held is None or held[0] != number:
            array = self.masks.made(self.image.select(self.axis + 1, number))
            if _hash(array) != self._marks[number]:
                raise ValueError(
                    f"{type(self.masks.perturber).__name__} makes other masks when it is asked again, and masks of a "
                    "volume are made again to save memory: give it a seed, and threads=0"
                )
            held = self._held = number, array
        return held[1]

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        masks = torch.ones(len(codes["slice"]), 1, *self.spatial_shape, dtype=self.dtype, device=device)
        for mask, number, kept in zip(masks, codes["slice"].tolist(), codes["mask"], strict=True):
            mask[0].select(self.axis, number).copy_(_tensor(kept))
        return masks


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of an array, of any real type and layout."""
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))
