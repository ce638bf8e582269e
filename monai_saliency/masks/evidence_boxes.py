"""Boxes that hold most of the evidence that windows found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monai_saliency.masks.hierarchical import BoundHierarchicalMasks
from monai_saliency.utils.boxes import Box

__all__ = ["EvidenceBoxes"]

# A box with at least this share of the evidence of the strongest one is looked at too.
_SECOND = 0.25
# A larger box is taken where it holds more evidence by this factor.
_LARGER = 1.5
# Without this share of all evidence in the boxes, nothing stands out.
_CONCENTRATED = 0.5
# A box is not larger than this share of the image.
_SMALL = 1 / 8
# The inner part of a box, of its cells along each axis: what is found lies about its middle.
_INNER = 0.6


class EvidenceBoxes:
    """Numbered boxes of a few sizes. Each begins where a window of the last level begins, or ends with the image.

    Args:
        windows: whose evidence the boxes hold.
        cells: of a box along each axis. A cell is a window of the last level, or of a level before in a larger box.
        further: the shape of one more size of box, which is not searched for evidence.

    Attributes:
        shapes: of each size of box: those that are searched for evidence, ``further``, and the inner parts of the
            first ones.
        further: which of them ``further`` is.
    """

    def __init__(self, windows: BoundHierarchicalMasks, cells: int, further: Sequence[int]) -> None:
        self.windows, self.spatial_shape = windows, windows.spatial_shape
        edges = [[int(axis[1]) for axis in level] for level in reversed(windows.bounds)]
        found = [tuple(min(cells * e, n) for e, n in zip(each, self.spatial_shape, strict=True)) for each in edges]
        most = _SMALL * np.prod(self.spatial_shape)
        searched = [shape for shape in dict.fromkeys(found) if np.prod(shape) <= most]
        share = np.ceil(_INNER * cells) / cells
        inner = [tuple(int(np.ceil(share * edge)) for edge in shape) for shape in searched]
        self.further = len(searched)
        self.shapes = [*searched, tuple(further), *inner]
        self._steps = edges[0]
        self._corners = [-(-n // step) for n, step in zip(self.spatial_shape, self._steps, strict=True)]
        self._of_a_size = int(np.prod(self._corners))

    def __len__(self) -> int:
        return len(self.shapes) * self._of_a_size

    def size(self, number: int) -> int:
        """Which of :attr:`shapes` a box has."""
        return number // self._of_a_size

    def box(self, number: int) -> Box:
        """One slice for each axis, inside the image."""
        size, corner = divmod(number, self._of_a_size)
        places = np.unravel_index(corner, self._corners)
        sides = zip(places, self._steps, self.shapes[size], self.spatial_shape, strict=True)
        first = [(min(int(at) * step, n - edge), edge) for at, step, edge, n in sides]
        return tuple(slice(a, a + edge) for a, edge in first)

    def about(self, centre: Sequence[float] | np.ndarray, size: int) -> int:
        """The number of the box of a size whose middle is nearest to a place in the image, in voxels."""
        sides = zip(centre, self._steps, self._corners, self.shapes[size], strict=True)
        places = [int(np.clip(round((c - edge / 2) / step), 0, count - 1)) for c, step, count, edge in sides]
        return size * self._of_a_size + int(np.ravel_multi_index(places, self._corners))

    def inner(self, number: int) -> int:
        """The number of the inner part of a box; the box itself where it is one of ``further``."""
        size = self.size(number)
        if size >= self.further:
            return number
        middle = [(side.start + side.stop) / 2 for side in self.box(number)]
        return self.about(middle, self.further + 1 + size)

    def find(self, evidence: np.ndarray, most: int) -> list[int]:
        """Each box with evidence, the strongest first; none where nothing stands out.

        Args:
            evidence: what the windows took from one score, for each window of the last level.
            most: how many boxes there may be. With more that are as strong, nothing stands out.
        """
        left = evidence.clip(min=0)
        least, total = 0.0, left.sum()
        found: list[int] = []
        while left.sum() > 0 and self.further:
            number, mass = self.strongest(left)
            if mass < least:
                break
            if len(found) == most:  # and as much elsewhere
                return []
            found.append(number)
            least = least or _SECOND * mass
            left = self.beyond(left, [number])
        return found if total - left.sum() >= _CONCENTRATED * total > 0 else []

    def outside(self, evidence: np.ndarray, numbers: Sequence[int]) -> float:
        """How much evidence lies outside of some boxes."""
        return float(self.beyond(evidence, numbers).sum())

    def beyond(self, evidence: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
        """The evidence that lies outside of some boxes, for each window of the last level."""
        left = np.ones(())
        for number in numbers:
            left = left * (1 - self._share_inside(self.box(number)))
        return evidence * left

    def strongest(self, left: np.ndarray) -> tuple[int, float]:
        """The box that holds most evidence, and how much; a larger one where that holds much more.

        Args:
            left: evidence, above 0 somewhere, for each window of the last level.
        """
        best: tuple[int, float] | None = None
        for size, shape in enumerate(self.shapes[: self.further]):
            centre = self._best_window(left, shape)
            for _ in range(3):
                centre = self._centre(left * self._share_inside(self._around(centre, shape)))
            number = self.about(centre, size)
            mass = float((left * self._share_inside(self.box(number))).sum())
            if best is not None and mass < _LARGER * best[1]:
                break
            best = number, mass
        assert best is not None
        return best

    def _best_window(self, left: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The middle of the window of the last level around which a box holds most, in voxels."""
        held = left
        for axis, (bounds, edge) in enumerate(zip(self.windows.bounds[-1], shape, strict=True)):
            middle = (bounds[:-1] + bounds[1:]) / 2
            near = np.abs(middle[:, None] - middle[None]) < edge / 2
            held = np.moveaxis(np.tensordot(near.astype(float), held, axes=(1, axis)), 0, axis)
        place = np.unravel_index(int(np.argmax(np.where(left > 0, held, -1))), held.shape)
        middles = [(b[:-1] + b[1:]) / 2 for b in self.windows.bounds[-1]]
        return np.array([middle[at] for middle, at in zip(middles, place, strict=True)])

    def _centre(self, left: np.ndarray) -> np.ndarray:
        """The centre of what is there, in voxels."""
        found = []
        for axis, bounds in enumerate(self.windows.bounds[-1]):
            along = left.sum(axis=tuple(other for other in range(left.ndim) if other != axis))
            found.append(along @ ((bounds[:-1] + bounds[1:]) / 2) / along.sum())
        return np.array(found)

    def _around(self, centre: np.ndarray, shape: Sequence[int]) -> Box:
        """The box about a centre, inside the image, wherever it begins."""
        sides = zip(centre, shape, self.spatial_shape, strict=True)
        first = [(int(np.clip(round(c - edge / 2), 0, n - edge)), edge) for c, edge, n in sides]
        return tuple(slice(a, a + edge) for a, edge in first)

    def _share_inside(self, box: Box) -> np.ndarray:
        """The share of each window of the last level that lies inside a box."""
        found = np.ones(())
        for bounds, side in zip(self.windows.bounds[-1], box, strict=True):
            common = np.minimum(bounds[1:], side.stop) - np.maximum(bounds[:-1], side.start)
            found = found[..., None] * (common.clip(min=0) / np.diff(bounds))
        return found
