"""Where a sliding-window inferer cuts its patches."""

from __future__ import annotations

import math
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
        self.shape = tuple(spatial_shape)
        self.roi_size = _roi_size(inferer, self.shape)
        padded = [max(own, roi) for own, roi in zip(self.shape, self.roi_size, strict=True)]
        before = [(size - own) // 2 for size, own in zip(padded, self.shape, strict=True)]
        self.inside: Box = tuple(slice(half, half + own) for half, own in zip(before, self.shape, strict=True))
        #: as ``torch.nn.functional.pad`` takes it: before and after each axis, the last axis first
        self.pad: list[int] = []
        for size, inner in zip(reversed(padded), reversed(self.inside), strict=True):
            self.pad += [inner.start, size - inner.stop]
        self.step: tuple[int, ...]
        self.cuts: list[Box]
        if hasattr(inferer, "starts"):
            self.step, self.cuts = _given_cuts(inferer.starts(padded), self.roi_size)
        else:
            self.step = scan_interval(padded, self.roi_size, len(padded), _overlap(inferer, len(padded)))
            self.cuts = list(dense_patch_slices(padded, self.roi_size, self.step))
        #: the part of a patch that is on the image: all of it, but along padded axes
        self.crop = tuple(
            slice(half, half + min(own, roi)) for half, own, roi in zip(before, self.shape, self.roi_size, strict=True)
        )
        self.boxes = [self._on_image(cut) for cut in self.cuts]

    def _on_image(self, cut: Box) -> Box:
        """The part of a patch in the padded image that is on the image, in the image's coordinates."""
        box = []
        for side, inner in zip(cut, self.inside, strict=True):
            start, stop = max(side.start, inner.start), min(side.stop, inner.stop)
            box.append(slice(int(start - inner.start), int(stop - inner.start)))
        return tuple(box)

    @property
    def middle(self) -> int:
        """The patch nearest to the middle of the image, where its content is, rather than background."""
        middles = []  # twice the middle of each patch
        for box in self.boxes:
            middles.append([side.start + side.stop for side in box])
        along = np.array(middles)
        off = np.abs(along - (along.min(axis=0) + along.max(axis=0)) / 2)
        return int(off.sum(axis=1).argmin())

    def window(self, divide: int = 1, times: int = 1) -> list[int]:
        """The edges in voxels of a window that is some steps from patch to patch long, divided; at most the image."""
        # The step of a patch that is larger than the image is larger than the image too.
        edges = [math.ceil(step * times / divide) for step in self.step]
        return [min(edge, own) for edge, own in zip(edges, self.shape, strict=True)]

    def predictions(self, window: Sequence[int]) -> float:
        """Cost of hiding windows side by side, in predictions of the image, the unperturbed one included, if outputs of
        patches are remembered.
        """
        cost = 1.0
        for axis, edge in enumerate(window):
            # Windows that a patch touches along this axis; the patches along other axes are the same for each.
            touched = [math.ceil(stop / edge) - start // edge for start, stop in self._sides(axis)]
            cost *= sum(touched) / len(touched)
        return 1 + cost

    def share_touched(self, ends: Sequence[Iterable[int]]) -> float:
        """The largest share of the patches that one window touches, of windows between such ends along each axis."""
        share = 1.0
        for axis, along in enumerate(ends):
            sides = self._sides(axis)
            most = 0
            for first, last in pairwise(along):
                most = max(most, sum(start < last and stop > first for start, stop in sides))
            share *= most / len(sides)
        return share

    def _sides(self, axis: int) -> set[tuple[int, int]]:
        """Where patches start and stop along an axis."""
        return {(box[axis].start, box[axis].stop) for box in self.boxes}


def _roi_size(inferer: SlidingWindowInferer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The size of a patch in voxels."""
    roi_size = inferer.roi_size
    if isinstance(inferer, SliceInferer):
        roi_size = list(inferer.orig_roi_size)
        if len(shape) != 3 or len(roi_size) != 2 or inferer.spatial_dim > 2:
            raise ValueError(f"SliceInferer needs a 3D image and a 2D `roi_size`, got {shape} and {roi_size}")
        roi_size.insert(inferer.spatial_dim, 1)
    return tuple(int(size) for size in fall_back_tuple(ensure_tuple_rep(roi_size, len(shape)), shape))


def _overlap(inferer: SlidingWindowInferer, dims: int) -> tuple[float, ...]:
    """The share of a patch along each axis that the next patch has too."""
    overlap = ensure_tuple_rep(inferer.overlap, dims)
    if not all(0 <= share < 1 for share in overlap):
        raise ValueError(f"`overlap` must be in [0, 1), got {overlap}")
    return overlap


def _given_cuts(starts: Sequence[Sequence[int]], roi_size: Sequence[int]) -> tuple[tuple[int, ...], list[Box]]:
    """The largest step along each axis, and the patches, of an inferer that says where patches start along each."""
    steps, sides = [], []
    for along, size in zip(starts, roi_size, strict=True):
        steps.append(max((after - before for before, after in pairwise(along)), default=size))
        sides.append([slice(start, start + size) for start in along])
    return tuple(steps), list(product(*sides))
