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


class PatchGrid:
    """Where a sliding-window inferer cuts its patches, for one spatial shape. An inferer with a rule of its own has a
    method ``starts(shape)``: where they begin along each axis.

    Attributes:
        shape: the spatial shape of the image.
        roi_size: the size of a patch in voxels.
        pad: what is added to an image that is smaller than a patch, as ``torch.nn.functional.pad`` takes it.
        inside: where the image is in the padded one.
        step: the distance from patch to patch along each axis, at the most.
        cuts: the patches of the padded image.
        crop: the part of a patch that is on the image.
        ends: where each patch starts and stops on the image ``(patches, axes, 2)``.
        boxes: the same as boxes.
    """

    def __init__(self, inferer: SlidingWindowInferer, spatial_shape: Sequence[int]) -> None:
        self.shape = tuple(spatial_shape)
        self.roi_size = _roi_size(inferer, self.shape)
        shape = np.array(self.shape)
        roi_size = np.array(self.roi_size)
        padded = np.maximum(shape, roi_size)
        before = (padded - shape) // 2
        after = padded - shape - before
        by_axis = np.stack([before, after], axis=1)
        self.pad: list[int] = by_axis[::-1].flatten().tolist()
        self.inside = _box(before, before + shape)
        self.crop = _box(before, before + np.minimum(shape, roi_size))
        self.step, self.cuts = _cuts(inferer, padded.tolist(), self.roi_size)
        ends = np.array([_ends(cut) for cut in self.cuts])
        self.ends = np.clip(ends - before[:, None], 0, shape[:, None])
        self.boxes = [_box(*ends.T) for ends in self.ends]

    def window(self, divide: int = 1, times: int = 1) -> list[int]:
        """The edges in voxels of a window that is some steps from patch to patch long, divided; at most the image."""
        # The step of a patch that is larger than the image is larger than the image too.
        edges = -(-np.array(self.step) * times // divide)
        return np.minimum(edges, self.shape).tolist()

    def predictions(self, window: Sequence[int]) -> float:
        """Cost of hiding windows side by side, in predictions of the image, the unperturbed one included, if outputs of
        patches are remembered.
        """
        cost = 1.0
        for axis, edge in enumerate(window):
            start, stop = self._sides(axis)
            # Windows that a patch touches along this axis; the patches along other axes are the same for each.
            touched = -(-stop // edge) - start // edge
            cost *= float(touched.mean())
        return 1 + cost

    def share_touched(self, ends: Sequence[Iterable[int]]) -> float:
        """The largest share of the patches that one window touches, of windows between such ends along each axis."""
        share = 1.0
        for axis, along in enumerate(ends):
            start, stop = self._sides(axis)
            touched = [np.mean((start < last) & (stop > first)) for first, last in pairwise(along)]
            share *= float(max(touched))
        return share

    def _sides(self, axis: int) -> np.ndarray:
        """Where patches start and stop along an axis, ``(2, n)``: each place once."""
        return np.unique(self.ends[:, axis], axis=0).T


def _box(starts: np.ndarray, stops: np.ndarray) -> Box:
    """A box between its lower corner and its upper corner."""
    return tuple(slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True))


def _ends(box: Box) -> list[tuple[int, int]]:
    """Where a box starts and stops along each axis."""
    return [(side.start, side.stop) for side in box]


def _roi_size(inferer: SlidingWindowInferer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The size of a patch in voxels."""
    roi_size = inferer.roi_size
    if isinstance(inferer, SliceInferer):
        roi_size = list(inferer.orig_roi_size)
        roi_size.insert(inferer.spatial_dim, 1)
    return tuple(int(size) for size in fall_back_tuple(ensure_tuple_rep(roi_size, len(shape)), shape))


def _cuts(
    inferer: SlidingWindowInferer, padded: Sequence[int], roi_size: Sequence[int]
) -> tuple[tuple[int, ...], list[Box]]:
    """The steps from patch to patch along each axis, at the most, and the patches of a padded shape."""
    if hasattr(inferer, "starts"):
        return _cuts_from(inferer.starts(padded), roi_size)
    overlap = ensure_tuple_rep(inferer.overlap, len(padded))
    steps = scan_interval(padded, roi_size, len(padded), overlap)
    return steps, list(dense_patch_slices(padded, roi_size, steps))


def _cuts_from(starts: Sequence[Sequence[int]], roi_size: Sequence[int]) -> tuple[tuple[int, ...], list[Box]]:
    """As :func:`_cuts`, for patches that begin at given places along each axis."""
    steps = []
    for along, size in zip(starts, roi_size, strict=True):
        longest = max(np.diff(along), default=size)
        steps.append(int(longest))
    cuts = []
    for corner in product(*starts):
        lower = np.array(corner)
        cuts.append(_box(lower, lower + roi_size))
    return tuple(steps), cuts
