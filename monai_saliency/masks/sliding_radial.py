"""Discs and balls that slide over the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.utils.arguments import (
    check_option,
    finite_numbers,
    per_axis,
    positive_numbers,
    voxels_of_mm,
    whole_numbers,
)
from monai_saliency.utils.boxes import Box, within

__all__ = ["SlidingRadialMasks"]


class SlidingRadialMasks(Masks):
    """Ellipses and ellipsoids that slide over the image, crisp or blurred, in 2D and 3D. Each mask hides one
    (xaitk-saliency's ``SlidingRadial``; with ``sigma`` the local perturbation of Greydanus et al., ICML 2018,
    equation 1).

    Centres c lie at every ``stride``-th voxel of each axis, from voxel 0 on; the last axis changes fastest. A voxel v
    is hidden where ``sum_a ((v_a - c_a) / radius_a)^2 < 1``. With ``sigma`` what is hidden is blurred by a Gaussian G,
    mirrored at the border and cut off at four standard deviations: ``M = 1 - (G * hidden) / max(G * hidden)``. In 2D
    these are the masks of ``SlidingRadial``, in the same order.

    Args:
        radius: half axes of the ellipsoid in ``unit``, above 0, one number or one per axis; by default a sixteenth of
            each axis of the image, at least one voxel.
        stride: distance between two centres in ``unit``, one number or one per axis; by default the radius, in whole
            voxels.
        sigma: standard deviation of the blur in ``unit``, at least 0, one number or one per axis; crisp by default.
        unit: unit of ``radius``, ``stride`` and ``sigma``, ``"voxel"`` or ``"mm"``. Strides are rounded to whole
            voxels, at least one.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when there is not one size per axis, when sizes are
            in mm and the voxel sizes are unknown, or when each mask would hide the whole image.

    Example::

        >>> import torch
        >>> from monai_saliency import SlidingRadialMasks
        >>> bound = SlidingRadialMasks(radius=2, stride=4).bind(torch.zeros(1, 5, 5))
        >>> len(bound), bound.render([3])[0, 0].int().tolist()[2:]  # the centre (4, 4), in the corner
        (4, [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    """

    shorter = "a larger radius or stride, for a coarser map"

    def __init__(
        self,
        radius: float | Sequence[float] | None = None,
        stride: float | Sequence[float] | None = None,
        sigma: float | Sequence[float] | None = None,
        unit: str = "voxel",
    ) -> None:
        self.unit = check_option("unit", unit, ("voxel", "mm"))
        if unit == "mm" and radius is None:
            raise ValueError("`unit` 'mm' needs a `radius`: the default, a sixteenth of each axis, is in voxels")
        if radius is not None:
            positive_numbers("radius", radius)
        if stride is not None and unit == "mm":
            positive_numbers("stride", stride)
        elif stride is not None:
            whole_numbers("stride", stride, 1)
        if sigma is not None:
            finite_numbers("sigma", sigma)
            if np.min(sigma) < 0:
                raise ValueError(f"`sigma` must be at least 0, the blur's standard deviation, got {sigma}")
        self.radius = radius
        self.stride = stride
        self.sigma = sigma

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundSlidingRadialMasks(self, image, spacing)


class _BoundSlidingRadialMasks(BoundMasks):
    """The ellipsoids of one image."""

    def __init__(self, masks: SlidingRadialMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(image)
        shape = self.spatial_shape
        in_mm = masks.unit == "mm"
        radius = [max(1.0, n / 16) for n in shape] if masks.radius is None else masks.radius
        radii = per_axis("radius", radius, shape)
        step: Any = radii if masks.stride is None else masks.stride
        strides = per_axis("stride", step, shape)
        sigmas = per_axis("sigma", 0.0 if masks.sigma is None else masks.sigma, shape)
        if in_mm:
            strides = voxels_of_mm(strides, spacing)
            edges = spacing or ()  # known, or this would have been refused
            radii, sigmas = (tuple(r / e for r, e in zip(each, edges, strict=True)) for each in (radii, sigmas))
        self.radii = tuple(map(float, radii))
        self.sigmas = tuple(map(float, sigmas))
        strides = tuple(max(1, round(each)) for each in strides)
        if sum(((n - 1) / r) ** 2 for n, r in zip(shape, self.radii, strict=True)) < 1:
            raise ValueError(
                f"`radius` {self.radii}, in voxels, hides the whole image of spatial shape {shape} from every centre, "
                "which cannot show where the evidence lies: use a smaller one"
            )
        self.centres = [np.arange(0, n, each) for n, each in zip(shape, strides, strict=True)]
        self.key = ("SlidingRadialMasks", self.radii, strides, self.sigmas, shape)
        self._extent = np.array([int(np.floor(r)) for r in self.radii])
        self._reach = np.array([int(4 * s + 0.5) for s in self.sigmas])
        along = [(np.arange(-e, e + 1) / r) ** 2 for e, r in zip(self._extent, self.radii, strict=True)]
        self._inside = torch.from_numpy(sum(np.ix_(*along)) < 1)
        blurred = any(self._reach)
        self._blurs = [_blur(n, s).to(self.dtype) for n, s in zip(shape, self.sigmas, strict=True)] if blurred else []

    def __len__(self) -> int:
        return int(np.prod([len(each) for each in self.centres]))

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``centre``, int ``(n, spatial_dims)``: the voxel in the middle of what each mask hides."""
        along = np.unravel_index(np.asarray(ids, dtype=int), [len(each) for each in self.centres])
        return {"centre": np.stack([each[i] for each, i in zip(self.centres, along, strict=True)], axis=-1)}

    def changed_boxes(self, ids: Sequence[Id]) -> list[Box]:
        return [self._changed(centre) for centre in self.codes(ids)["centre"]]

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`BoundMasks.restrict`. Two centres whose ellipsoids happen to agree in a small part count as
        different, unless both hide the whole box.
        """
        centres = self.codes(ids)["centre"]
        start, end = np.array([[side.start, side.stop - 1] for side in box]).T
        if any(self._reach):
            grown = self._extent + self._reach
            return ((centres + grown >= start) & (centres - grown <= end)).all(axis=1), centres
        near = np.clip(centres, start, end) - centres
        far = np.maximum(np.abs(start - centres), np.abs(end - centres))
        touches, covers = ((((each / self.radii) ** 2).sum(axis=1)) < 1 for each in (near, far))
        return touches, np.where(covers[:, None], -1, centres)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        return self._render_box(codes, tuple(slice(0, size) for size in self.spatial_shape), device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> torch.Tensor:
        sides = [side.stop - side.start for side in box]
        masks = torch.ones(len(codes["centre"]), *sides, dtype=self.dtype, device=device)
        for mask, centre in zip(masks, codes["centre"], strict=True):
            changed = self._changed(centre)
            common = tuple(
                slice(max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(changed, box, strict=True)
            )
            if all(side.start < side.stop for side in common):
                hidden = self._hidden(centre)[within(common, changed)]
                mask[within(common, box)] = 1 - hidden.to(device)
        return masks.unsqueeze(1)

    def _changed(self, centre: np.ndarray) -> Box:
        """The box that a mask changes."""
        grown = self._extent + self._reach
        ends = zip(centre - grown, centre + grown + 1, self.spatial_shape, strict=True)
        return tuple(slice(max(0, int(first)), min(size, int(stop))) for first, stop, size in ends)

    def _hidden(self, centre: np.ndarray) -> torch.Tensor:
        """How much is hidden, in [0, 1], in the box that a mask changes."""
        cut = tuple(
            slice(max(0, int(e - c)), int(min(2 * e + 1, n - c + e)))
            for c, e, n in zip(centre, self._extent, self.spatial_shape, strict=True)
        )
        hidden = self._inside[cut].to(self.dtype)
        if not any(self._reach):
            return hidden
        for axis, (side, blur) in enumerate(zip(self._changed(centre), self._blurs, strict=True)):
            first = max(0, int(centre[axis] - self._extent[axis]))
            weights = blur[side, first : first + hidden.shape[axis]]
            hidden = torch.tensordot(weights, hidden, dims=([1], [axis])).movedim(0, axis)
        return hidden / hidden.amax()


def _blur(size: int, sigma: float) -> torch.Tensor:
    """Matrix ``(size, size)`` that blurs a line of voxels, mirrored at both ends with its last voxel repeated."""
    reach = int(4 * sigma + 0.5)
    if not reach:
        return torch.eye(size, dtype=torch.float64)
    offsets = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    places = (np.arange(size)[:, None] + offsets) % (2 * size)
    places = np.where(places < size, places, 2 * size - 1 - places)
    weights = np.zeros((size, size))
    np.add.at(weights, (np.arange(size)[:, None], places), kernel / kernel.sum())
    return torch.from_numpy(weights)
