"""Discs and balls that slide over the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, Masks, Spacing
from monai_saliency.masks.sizes import check_sizes, check_unit, in_voxels, overlap
from monai_saliency.utils.arguments import finite_numbers, per_axis, positive_numbers
from monai_saliency.utils.tensors import Box, within


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
        stride: distance between two centres in ``unit``, one number or one per axis, in whole voxels, at least one; by
            default the radius.
        sigma: standard deviation of the blur in ``unit``, at least 0, one number or one per axis; crisp by default.
        unit: unit of all three, ``"voxel"`` or ``"mm"``.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when there is not one size per axis, or when
            sizes are in mm and the voxel sizes are unknown.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import SlidingRadialMasks
        >>> bound = SlidingRadialMasks(radius=2, stride=4).bind(torch.zeros(1, 5, 5))
        >>> len(bound), bound.render([3])[0, 0].int().tolist()[2:]  # the centre (4, 4), in the corner
        (4, [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    """

    def __init__(
        self,
        radius: float | Sequence[float] | None = None,
        stride: float | Sequence[float] | None = None,
        sigma: float | Sequence[float] | None = None,
        unit: str = "voxel",
    ) -> None:
        self.unit = check_unit(unit, "radius", radius)
        check_sizes(unit, stride=stride)
        if radius is not None:
            positive_numbers("radius", radius)
        if sigma is not None:
            finite_numbers("sigma", sigma, 0)
        self.radius = radius
        self.stride = stride
        self.sigma = sigma

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return _BoundSlidingRadialMasks(self, image, spacing)


class _BoundSlidingRadialMasks(BoundMasks):
    """The ellipsoids of one image."""

    def __init__(self, masks: SlidingRadialMasks, image: Tensor, spacing: Spacing) -> None:
        super().__init__(image)
        shape = self.spatial_shape
        radius: Any = [max(1.0, n / 16) for n in shape] if masks.radius is None else masks.radius
        step = in_voxels("stride", radius if masks.stride is None else masks.stride, masks.unit, shape, spacing)
        edges = np.array(spacing if spacing is not None and masks.unit == "mm" else [1.0] * len(shape))
        self.radii = np.array(per_axis("radius", radius, len(shape))) / edges
        self.sigmas = np.array(per_axis("sigma", 0.0 if masks.sigma is None else masks.sigma, len(shape))) / edges
        strides = tuple(max(1, round(each)) for each in step)
        self.centres = [np.arange(0, n, each) for n, each in zip(shape, strides, strict=True)]
        self.key = ("SlidingRadialMasks", tuple(self.radii.tolist()), strides, tuple(self.sigmas.tolist()), shape)
        #: how far from its centre a mask changes voxels, with the blur that is cut off at four standard deviations
        self._reach = self.radii.astype(int) + (4 * self.sigmas + 0.5).astype(int)

    def __len__(self) -> int:
        return int(np.prod([len(each) for each in self.centres]))

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``centre``, int ``(n, spatial_dims)``: the voxel in the middle of what each mask hides."""
        along = np.unravel_index(np.asarray(ids, dtype=int), [len(each) for each in self.centres])
        return {"centre": np.stack([each[i] for each, i in zip(self.centres, along, strict=True)], axis=-1)}

    def changed_boxes(self, ids: Ids) -> list[Box]:
        return [self._changed(centre) for centre in self.codes(ids)["centre"]]

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        centres = self.codes(ids)["centre"]
        start, end = np.array([[side.start, side.stop - 1] for side in box]).T
        return ((centres + self._reach >= start) & (centres - self._reach <= end)).all(axis=1), centres

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        sides = [side.stop - side.start for side in box]
        masks = torch.ones(len(codes["centre"]), *sides, dtype=self.dtype, device=device)
        for mask, centre in zip(masks, codes["centre"], strict=True):
            changed = self._changed(centre)
            common = overlap(changed, box)
            kept = 1 - torch.from_numpy(self._hidden(centre, changed)[within(common, changed)])
            mask[within(common, box)] = kept.to(device, self.dtype)
        return masks.unsqueeze(1)

    def _changed(self, centre: np.ndarray) -> Box:
        """The box that a mask changes."""
        ends = zip(centre - self._reach, centre + self._reach + 1, self.spatial_shape, strict=True)
        return tuple(slice(max(0, int(first)), min(size, int(stop))) for first, stop, size in ends)

    def _hidden(self, centre: np.ndarray, box: Box) -> np.ndarray:
        """How much is hidden, in [0, 1], in the box that a mask changes."""
        sides = zip(box, centre, self.radii, strict=True)
        along = [((np.arange(side.start, side.stop) - at) / radius) ** 2 for side, at, radius in sides]
        hidden = np.asarray(sum(np.ix_(*along)) < 1, dtype=float)
        # Inside the image, what is mirrored at the end of this box is zero there.
        blurred = gaussian_filter(hidden, self.sigmas, mode="reflect", truncate=4.0) if self.sigmas.any() else hidden
        return np.asarray(blurred / blurred.max())
