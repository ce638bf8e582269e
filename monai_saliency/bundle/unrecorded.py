"""Steps of a preprocessing that move voxels and do not record it, so that no inverse takes a map back through them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import InvertibleTransform, Lambdad, MapTransform

from monai_saliency.utils.tensors import plain

__all__ = ["moves_unrecorded"]

_SPATIAL = "monai.transforms.spatial."
_TRIALS = 3


def moves_unrecorded(step: Any, key: Any, image: torch.Tensor) -> bool:
    """Whether a step moves or cuts voxels without recording it.

    MONAI's own steps are known. Any other one that has no inverse, such as a ``Lambdad``, is run on an image in which
    one voxel differs: if other voxels answer and this one does not, in most of three trials, the step moves voxels.

    Args:
        step: a step of a dictionary pipeline.
        key: the key of the image.
        image: ``(C, *spatial)``, as the whole preprocessing gave it.

    Returns:
        False also where it cannot be found out, as the step fails on this image.
    """
    own = type(step).__module__.startswith("monai.")
    has_inverse = isinstance(step, InvertibleTransform)
    # MONAI 1.6.1 does not call the `inv_func` of a Lambdad.
    if not isinstance(step, Lambdad) and (own or has_inverse):
        return own and not has_inverse and type(step).__module__.startswith(_SPATIAL)
    alone = copy.copy(step)
    if isinstance(alone, MapTransform):
        alone.allow_missing_keys = True

    def run(voxels: torch.Tensor) -> torch.Tensor:
        given = MetaTensor(voxels.clone())
        if isinstance(image, MetaTensor):
            given.copy_meta_from(image)
        return plain(torch.as_tensor(alone({key: given})[key])).flatten(1)

    voxels = plain(image).detach().cpu()
    try:
        return _moves(run, voxels)
    except Exception:  # a step may reject such an image, with any exception
        return False


def _moves(run: Any, voxels: torch.Tensor) -> bool:
    before = run(voxels)
    count = voxels[0].numel()
    if before.shape[1] != count:
        return True
    ends = (voxels.min() - 1, voxels.max() + 1)
    moved = 0
    for place in torch.randint(count, (_TRIALS,), generator=torch.Generator().manual_seed(0)).tolist():
        answers = torch.zeros(count, dtype=torch.bool)
        for end in ends:
            changed = voxels.clone()
            changed.flatten(1)[:, place] = end
            after = run(changed)
            answers |= ((after != before) & ~((after != after) & (before != before))).any(dim=0)
        moved += bool(answers.any()) and not bool(answers[place]) and int(answers.sum()) <= max(8, count // 10)
    return 2 * moved > _TRIALS
