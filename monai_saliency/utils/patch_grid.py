"""Where a sliding-window inferer cuts its patches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product

import numpy as np
from monai.data.utils import dense_patch_slices
from monai.inferers import SliceInferer, SlidingWindowInferer
from monai.utils import ensure_tuple_rep, fall_back_tuple

from monai_saliency.utils.monai_private import scan_interval
from monai_saliency.utils.tensors import Box

__all__ = ["PatchGrid"]


class PatchGrid:
    """Where a sliding-window inferer cuts its patches, for one spatial shape. An inferer with a rule of its own has a
    method ``starts(shape)``: where they begin along each axis.
    """

    def __init__(self, inferer: SlidingWindowInferer, spatial_shape: Sequence[int]) -> None:
        dims = len(spatial_shape)
        roi_size = inferer.roi_size
        if isinstance(inferer, SliceInferer):
            roi_size = list(inferer.orig_roi_size)
            if dims != 3 or len(roi_size) != 2 or inferer.spatial_dim > 2:
                raise ValueError(
                    f"SliceInferer needs a 3D image and a 2D `roi_size`, got {spatial_shape} and {roi_size}"
                )
            roi_size.insert(inferer.spatial_dim, 1)
        overlap = ensure_tuple_rep(inferer.overlap, dims)
        if not all(0 <= o < 1 for o in overlap):
            raise ValueError(f"`overlap` must be in [0, 1), got {overlap}")
        self.roi_size = tuple(int(size) for size in fall_back_tuple(ensure_tuple_rep(roi_size, dims), spatial_shape))
        padded = tuple(max(sizes) for sizes in zip(spatial_shape, self.roi_size, strict=True))
        before = [(size - own) // 2 for size, own in zip(padded, spatial_shape, strict=True)]
        self.pad: list[int] = []
        for size, own, half in reversed(list(zip(padded, spatial_shape, before, strict=True))):
            self.pad += [half, size - own - half]
        if hasattr(inferer, "starts"):
            starts = inferer.starts(padded)
            self.step = tuple(
                max((after - before for before, after in pairwise(axis)), default=size)
                for axis, size in zip(starts, self.roi_size, strict=True)
            )
            patches = [
                tuple(slice(start, start + size) for start, size in zip(corner, self.roi_size, strict=True))
                for corner in product(*starts)
            ]
        else:
            self.step = scan_interval(padded, self.roi_size, dims, overlap)
            patches = dense_patch_slices(padded, self.roi_size, self.step)
        self.cuts: list[Box] = list(patches)
        self.inside: Box = tuple(slice(half, half + own) for half, own in zip(before, spatial_shape, strict=True))
        # Along a padded axis there is one patch, which holds the whole image.
        is_padded = [own < roi for own, roi in zip(spatial_shape, self.roi_size, strict=True)]
        self.crop = tuple(
            inner if pads else slice(0, roi)
            for inner, pads, roi in zip(self.inside, is_padded, self.roi_size, strict=True)
        )
        self.boxes: list[Box] = [
            tuple(
                slice(0, own) if pads else slice(int(side.start), int(side.stop))
                for side, pads, own in zip(patch, is_padded, spatial_shape, strict=True)
            )
            for patch in self.cuts
        ]

    @property
    def middle(self) -> int:
        """The patch nearest to the middle of the image, where its content is, rather than background."""
        middles = np.array([[side.start + side.stop for side in box] for box in self.boxes])
        return int(np.abs(middles - (middles.min(0) + middles.max(0)) / 2).sum(1).argmin())

    def window(self, divide: int = 1, times: int = 1) -> list[int]:
        """The edges in voxels of a window that is some steps from patch to patch long, divided; at most the image."""
        # The step of a patch that is larger than the image is larger than the image too.
        shape = (side.stop - side.start for side in self.inside)
        return [min(-(-step * times // divide), n) for step, n in zip(self.step, shape, strict=True)]

    def predictions(self, window: Sequence[int]) -> float:
        """Cost of hiding windows side by side, in predictions of the image, the unperturbed one included, if outputs of
        patches are remembered.
        """
        cost = 1.0
        for axis, edge in enumerate(window):
            sides = {(box[axis].start, box[axis].stop) for box in self.boxes}
            # Windows that a patch touches along this axis; the patches along other axes are the same for each.
            touched = [-(-stop // edge) - start // edge for start, stop in sides]
            cost *= sum(touched) / len(touched)
        return 1 + cost

    def share_touched(self, ends: Sequence[Iterable[int]]) -> float:
        """The largest share of the patches that one window touches."""
        share = 1.0
        for axis, along in enumerate(ends):
            sides = {(box[axis].start, box[axis].stop) for box in self.boxes}
            touched = [sum(start < last and stop > first for start, stop in sides) for first, last in pairwise(along)]
            share *= max(touched) / len(sides)
        return share
