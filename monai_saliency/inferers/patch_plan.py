"""Which patches masks change, how many forwards that makes, and when remembered patches are exact.

Nothing is run here. :mod:`monai_saliency.inferers.patches` runs the patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from monai.inferers import SliceInferer, SlidingWindowInferer, SlidingWindowInfererAdapt

from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.networks.outputs import OutputPath
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.monai_private import tree_leaves
from monai_saliency.utils.patch_grid import PatchGrid

__all__ = ["PatchPlan", "find_touches", "find_trims", "plan", "refusal", "sliding_inferer"]

_EXACT = (SlidingWindowInferer, SlidingWindowInfererAdapt, SliceInferer, NNUNetInferer)
_EXACT_CALLS = tuple(kind.__call__ for kind in _EXACT)


@dataclass(frozen=True)
class PatchPlan:
    """How many forwards an explanation needs, counted in patches."""

    patches: int
    forwards: int
    plain: int

    @property
    def gain(self) -> float:
        """How many times fewer forwards remembered patches need."""
        return self.plain / self.forwards


def plan(
    masks: Masks,
    inferer: SlidingWindowInferer,
    image: torch.Tensor,
    labels: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    reach: torch.Tensor | None = None,
) -> PatchPlan:
    """Count the patch forwards of an explanation before anything is run."""
    bound = masks.bind(image, labels=labels, spacing=spacing)
    if bound.in_rounds:
        raise ValueError(f"{type(masks).__name__} choose later masks by earlier scores, so their forwards are unknown")
    reason = refusal(Forward(inferer, TensorInput(), _no_network), bound, image)
    if reason:
        raise ValueError(f"no patches are remembered: {reason}")
    grid = PatchGrid(inferer, image.shape[1:])
    touches = find_touches(bound, grid, find_trims(grid, reach), range(len(bound)))
    forwards = len(grid.boxes) + int((touches[:, 0] == touches[:, 2]).sum())
    return PatchPlan(len(grid.boxes), forwards, len(grid.boxes) * (len(bound) + 1))


def _no_network(patches: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a plan runs nothing")


def sliding_inferer(inferer: Any) -> SlidingWindowInferer | None:
    """An inferer that cuts patches; None for any other, such as a wrapper around one."""
    return inferer if isinstance(inferer, SlidingWindowInferer) else None


def refusal(forward: Forward, masks: BoundMasks, image: torch.Tensor, output: OutputPath | None = None) -> str | None:
    """Why remembered patches might not give the scores of whole images; None where they do."""
    inferer = forward.inferer
    if not isinstance(inferer, SlidingWindowInferer):
        return f"{type(inferer).__name__} is not a SlidingWindowInferer (if it only calls one, give that one)"
    reason = _refused_inferer(inferer, image) or _refused_call(forward, output)
    if reason:
        return reason
    if image.dtype not in (torch.float32, torch.float64):
        return f"images of {image.dtype} are blended too coarsely"
    try:
        grid = PatchGrid(inferer, image.shape[1:])
    except ValueError as error:
        return str(error)
    weights = inferer.roi_weight_map
    if weights is not None and weights.shape not in (grid.roi_size, (1, 1, *grid.roi_size)):
        return f"`roi_weight_map` has shape {tuple(weights.shape)}, patches have {grid.roi_size}"
    if masks.restrict(masks.first_round()[:1], grid.boxes[0]) is None:
        return (
            f"{masks.key[0].removeprefix('_Bound')} do not tell what they hide inside a patch (masks such as RISE's "
            "change every patch); windows and regions do"
        )
    return None


def _refused_inferer(inferer: SlidingWindowInferer, image: torch.Tensor) -> str | None:
    kind = type(inferer)
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
    return None


def _refused_call(forward: Forward, output: OutputPath | None) -> str | None:
    if type(forward.inputs) is not TensorInput:
        return f"the network takes several inputs ({type(forward.inputs).__name__})"
    if callable(output) or isinstance(output, (list, tuple)):
        return f"the target reads {output} of the network's output"
    known = {"device", "buffer_steps", "buffer_dim", "condition"} & set(forward.kwargs)
    if known:
        return f"the inferer is called with {sorted(known)}"
    patches = int(forward.inferer.sw_batch_size)  # type: ignore[attr-defined]
    rows = [leaf.shape[0] for leaf in tree_leaves((forward.args, forward.kwargs)) if getattr(leaf, "ndim", 0)]
    # One row, or more rows than a batch has patches, cannot be one for each patch.
    if any(1 < count <= patches for count in rows):
        return "an argument of the network is an array, which may hold something for each patch of a batch"
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


def find_touches(masks: BoundMasks, grid: PatchGrid, patches: Iterable[int], ids: Sequence[Id]) -> np.ndarray:
    """Which masks change which patches."""
    rows = [np.empty((0, 3), dtype=int)]
    for patch in patches:
        restricted = masks.restrict(ids, grid.boxes[patch])
        assert restricted is not None
        changed = restricted[0].nonzero()[0]
        if len(changed):
            _, first, same = np.unique(restricted[1][changed], axis=0, return_index=True, return_inverse=True)
            rows.append(np.stack([changed, np.full_like(changed, patch), changed[first][same.ravel()]], axis=1))
    touches = np.concatenate(rows)
    return touches[np.lexsort((touches[:, 1], touches[:, 0]))]
