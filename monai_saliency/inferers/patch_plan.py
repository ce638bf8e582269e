"""Which patches a sliding-window inferer cuts, which of them masks change, and how many forwards that makes.

All of this is told before any patch is run. Positions and padding are MONAI's own
(:func:`monai.inferers.utils.sliding_window_inference`). What runs them is in :mod:`monai_saliency.inferers.patches`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from monai.inferers import SliceInferer, SlidingWindowInferer, SlidingWindowInfererAdapt

from monai_saliency.masks.base import BoundMasks
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.monai_private import tree_leaves
from monai_saliency.utils.patch_grid import PatchGrid

if TYPE_CHECKING:
    from monai_saliency.inferers.inferer import PerturbationInferer

__all__ = ["PatchPlan", "find_touches", "find_trims", "plan", "refusal"]

_EXACT_CALLS = (SlidingWindowInferer.__call__, SlidingWindowInfererAdapt.__call__, SliceInferer.__call__)


@dataclass(frozen=True)
class PatchPlan:
    """How many forwards an explanation needs, counted in patches.

    Attributes:
        patches: of one image.
        forwards: with remembered patches, those of the unperturbed image among them.
        plain: when every mask runs all patches.
    """

    patches: int
    forwards: int
    plain: int

    @property
    def gain(self) -> float:
        """How many times fewer."""
        return self.plain / self.forwards


def plan(
    explain: PerturbationInferer,
    image: torch.Tensor,
    labels: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    reach: torch.Tensor | None = None,
) -> PatchPlan:
    """Count what explaining would cost, running nothing.

    Args:
        explain: what explains, with a sliding-window inferer inside.
        image: ``(C, *spatial)``; for windows its shape is enough (a tensor on the ``meta`` device).
        labels: its label map ``(1, *spatial)``, for masks of regions.
        spacing: voxel sizes in mm, for masks whose sizes are in mm.
        reach: the voxels that the target reads, bool ``(*spatial)``; None for all.

    Returns:
        the counts, with memory for all outputs.

    Raises:
        ValueError: when whole images would be run.
    """
    masks = explain.masks.bind(image, labels=labels, spacing=spacing)
    reason = refusal(explain, image, masks, (), {})
    if reason:
        raise ValueError(f"no patches are remembered: {reason}")
    assert isinstance(explain.inferer, SlidingWindowInferer)
    grid = PatchGrid(explain.inferer, image.shape[1:])
    touches = find_touches(masks, grid, find_trims(grid, reach))
    forwards = len(grid.boxes) + int((touches[:, 0] == touches[:, 2]).sum())
    return PatchPlan(len(grid.boxes), forwards, len(grid.boxes) * (len(masks) + 1))


def refusal(
    settings: PerturbationInferer, image: torch.Tensor, masks: BoundMasks, args: Any, kwargs: Any
) -> str | None:
    """Why remembered patches might not give the scores of whole images, if so."""
    inferer = settings.inferer
    kind = type(inferer)
    if not isinstance(inferer, SlidingWindowInferer):
        return f"{kind.__name__} is no SlidingWindowInferer"
    if kind.__call__ not in _EXACT_CALLS or (
        isinstance(inferer, SliceInferer) and type(inferer).network_wrapper is not SliceInferer.network_wrapper
    ):
        return f"{kind.__name__} runs the network in a way of its own"
    voxels = math.prod(image.shape[1:])
    adapts = isinstance(inferer, SlidingWindowInfererAdapt) and image.is_cuda
    if inferer.buffer_steps or (adapts and inferer.cpu_thresh is not None and voxels > inferer.cpu_thresh):
        return "the inferer stitches through buffers (`buffer_steps`)"
    if inferer.with_coord:
        return "the network reads where a patch lies (`with_coord`)"
    if type(settings.inputs) is not TensorInput:
        return f"the network takes several inputs ({type(settings.inputs).__name__})"
    if callable(settings.output) or isinstance(settings.output, (list, tuple)):
        return f"the target reads {settings.output} of the network's output"
    known = {"device", "buffer_steps", "buffer_dim"} & set(kwargs)
    if known:
        return f"the inferer is called with {sorted(known)}"
    if any(getattr(leaf, "ndim", 0) for leaf in tree_leaves((args, kwargs))):
        return "an argument of the network is an array, which may hold something for each patch of a batch"
    if image.dtype not in (torch.float32, torch.float64):
        return f"images of {image.dtype} are blended too coarsely"
    try:
        grid = PatchGrid(inferer, image.shape[1:])
    except ValueError as error:
        return str(error)
    weights = inferer.roi_weight_map
    if weights is not None and weights.shape not in (grid.roi_size, (1, 1, *grid.roi_size)):
        return f"`roi_weight_map` has shape {tuple(weights.shape)}, patches have {grid.roi_size}"
    if masks.restrict(range(1), grid.boxes[0]) is None:
        return (
            f"{type(settings.masks).__name__} do not tell what they hide inside a patch (masks such as RISE's change "
            "every patch); windows and regions do"
        )
    return None


def find_trims(grid: PatchGrid, reach: torch.Tensor | None) -> dict[int, Box]:
    """For each patch with voxels that the target reads, the smallest box around these."""
    if reach is None:
        return dict(enumerate(grid.boxes))
    voxels = reach.numpy(force=True)
    trims = {}
    for patch, box in enumerate(grid.boxes):
        inside = voxels[box]
        sides = []
        for axis, side in enumerate(box):
            found = inside.any(axis=tuple(a for a in range(inside.ndim) if a != axis)).nonzero()[0]
            if not len(found):
                break
            sides.append(slice(side.start + int(found[0]), side.start + int(found[-1]) + 1))
        else:
            trims[patch] = tuple(sides)
    return trims


def find_touches(masks: BoundMasks, grid: PatchGrid, patches: Iterable[int]) -> np.ndarray:
    """Which masks change which patches: rows (mask, patch, first mask that changes it in the same way), ascending."""
    rows = [np.empty((0, 3), dtype=int)]
    for patch in patches:
        restricted = masks.restrict(range(len(masks)), grid.boxes[patch])
        assert restricted is not None
        changed = restricted[0].nonzero()[0]
        if len(changed):
            _, first, same = np.unique(restricted[1][changed], axis=0, return_index=True, return_inverse=True)
            rows.append(np.stack([changed, np.full_like(changed, patch), changed[first][same.ravel()]], axis=1))
    touches = np.concatenate(rows)
    return touches[np.lexsort((touches[:, 1], touches[:, 0]))]
