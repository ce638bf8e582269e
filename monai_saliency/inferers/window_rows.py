"""Perturbed images that stay in the batch: where each mask hides a small window, the next ones change only windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.utils.boxes import voxels_of
from monai_saliency.utils.monai_private import tensor_version
from monai_saliency.utils.tensors import to_device

__all__ = ["WindowRows", "hidden_voxels"]

# A larger share of the image is written faster as a whole: voxels at given places take many times as long each.
_SMALL = 1 / 32
# So many places are found at once, 8 MB, and no more than the image has voxels.
_AHEAD = 2**20


@dataclass(frozen=True)
class _Places:
    """Which voxels the rows [start, stop) of a case hide: int64 ``(stop - start, voxels)``, on the device."""

    state: CaseState
    start: int
    stop: int
    voxels: torch.Tensor


class WindowRows:
    """Writes perturbed images to a batch, without what it already holds.

    A batch of windows holds the image but for the windows. So the next batch needs two writes: the image into the
    windows of the batch before, and the fill into the new ones. The rows equal those of :meth:`CaseState.perturb` to
    the bit. All rows are written where the batch may hold something else: after another case, after any change in
    place that torch counts, and always for a network that was seen to change its input uncounted, as through NumPy.

    Example::

        >>> import torch
        >>> from monai_saliency import SlidingWindowMasks
        >>> bound = SlidingWindowMasks(1, 1).bind(torch.zeros(1, 8, 8))
        >>> hidden_voxels(bound, range(9, 11)).tolist()  # windows of one voxel, in rows of eight
        [[9], [10]]
    """

    def __init__(self) -> None:
        self._trusted: list[CaseState] = []
        self._places: _Places | None = None
        # What the batch holds: whose rows, which voxels of each are hidden, and its version when it was written.
        self._holds: tuple[CaseState, torch.Tensor, int] | None = None

    def forget(self) -> None:
        """The next batch is another tensor."""
        self._holds = None

    def write(self, state: CaseState, start: int, stop: int, out: torch.Tensor) -> None:
        """Write rows [start, stop) of a case, all of masks.

        Args:
            state: the case.
            start: the first row.
            stop: the last row + 1.
            out: the whole batch ``(stop - start, C + H, *spatial)``: perturbed images, and held channels behind them.
        """
        before, self._holds = self._holds, None
        voxels = self._voxels(state, start, stop) if state in self._trusted else None
        if voxels is None or before is None or before[0] is not state or before[2] != tensor_version(out):
            state.perturb(start, stop, out=out)
        else:
            _copy(state.case.image, before[1], out)
            _copy(state.fill, voxels, out)
        if voxels is not None:
            self._holds = state, voxels, tensor_version(out)

    def trust(self, state: CaseState, seen: torch.Tensor) -> None:
        """Compare the first rows of a case, which the network has seen, with what was written. Where they are equal,
        the network leaves its input as it is, and rows of this case may stay in the batch.

        Args:
            state: the case.
            seen: its first rows, in the batch: the unperturbed image, and masks behind it.
        """
        count, image = len(seen), state.case.image
        hidden = hidden_voxels(state.masks, state.masks_of(1, count)) if count > 1 and state.is_finite else None
        if hidden is None:
            return
        rows = seen[:, : len(image)].flatten(2)
        same = rows == image.flatten(1)
        places = to_device(hidden, seen.device)[:, None].expand(-1, len(image), -1)
        fill = state.fill.flatten(1).expand(count - 1, -1, -1).gather(2, places)
        same[1:].scatter_(2, places, rows[1:].gather(2, places) == fill)
        held = seen[:, len(image) :]
        if bool(same.all()) and torch.equal(held, state.held.expand_as(held)):
            self._trusted.append(state)

    def _voxels(self, state: CaseState, start: int, stop: int) -> torch.Tensor | None:
        """What the rows hide, as :func:`hidden_voxels` finds it for many rows at once."""
        known = self._places
        if known is None or known.state is not state or start < known.start or stop > known.stop:
            found = hidden_voxels(state.masks, state.masks_of(start, stop))
            if found is None:
                return None
            most = min(_AHEAD, math.prod(state.masks.spatial_shape))
            end = min(state.num_rows, start + most // found.shape[1])
            more = hidden_voxels(state.masks, state.masks_of(start, end)) if end > stop else None
            found, end = (found, stop) if more is None else (more, end)
            known = self._places = _Places(state, start, end, to_device(found, state.case.image.device))
        return known.voxels[start - known.start : stop - known.start]


def hidden_voxels(masks: BoundMasks, ids: Sequence[Id]) -> np.ndarray | None:
    """The voxels that each mask hides, where it hides one small window.

    Args:
        masks: the masks of an image.
        ids: n masks.

    Returns:
        int64 ``(n, voxels)``, places in an image whose spatial axes are one; a window that the border cuts has some of
        its voxels more than once. None where masks do anything else, or a window is empty or large.
    """
    if masks.channels is not None or type(masks).perturb is not BoundMasks.perturb:
        return None
    boxes = masks.hidden_boxes(ids)
    found = voxels_of(boxes, masks.spatial_shape, int(_SMALL * math.prod(masks.spatial_shape))) if boxes else None
    return None if found is None else found[0]


def _copy(values: torch.Tensor, voxels: torch.Tensor, batch: torch.Tensor) -> None:
    """Copy some voxels ``(n, v)`` of an image ``(C, *spatial)`` into the rows of a batch."""
    count, channels = len(batch), len(values)
    places = voxels[:, None].expand(-1, channels, -1)
    images = batch[:, :channels].view(count, channels, -1)
    images.scatter_(2, places, values.flatten(1).expand(count, -1, -1).gather(2, places))
