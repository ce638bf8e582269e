"""Whether a preprocessing leads back: an image that goes through its steps and their inverse returns to its place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, InvertibleTransform
from monai.transforms.traits import RandomizableTrait
from monai.utils import MetaKeys, TraceKeys

from monai_saliency.errors import CaseError

__all__ = ["MOVING", "check_inversion", "steps_of"]

#: where MONAI's transforms that move voxels are
MOVING = ("monai.transforms.spatial.", "monai.transforms.croppad.")
_PROBE = 64  # voxels an axis: a whole CT takes 12 s


def steps_of(transform: Any) -> Iterator[Any]:
    """A transform, or the steps of nested ``Compose`` one by one. (``flatten`` makes new ones of some kinds.)"""
    if isinstance(transform, Compose):
        for step in transform.transforms:
            yield from steps_of(step)
    elif transform is not None:
        yield transform


def check_inversion(case: str, image: Any, steps: Iterable[tuple[Any, Any]]) -> None:
    """Refuse a preprocessing whose inverse does not bring voxels back to their place in the scan.

    A ramp of the scan's affine and shape, but at most 64 voxels an axis, goes through MONAI's steps that move voxels,
    and back. It must come back to one voxel of the network's input. Steps that a ramp alone cannot pass, such as a crop
    around a label, are left out.

    Args:
        case: the case's name.
        image: the network's input ``(C, *spatial)``. Without recorded transforms nothing is checked.
        steps: the transforms of the preprocessing in order, each with its key of the image.

    Raises:
        CaseError: when it does not come back.
    """
    operations = getattr(image, "applied_operations", [])
    if not operations or MetaKeys.ORIGINAL_AFFINE not in image.meta:
        return
    ramp = torch.ones(1, *(min(int(size), _PROBE) for size in operations[0][TraceKeys.ORIG_SIZE]))
    spans = range(1, ramp.ndim)  # unequal, so that the errors of two axes do not cancel out
    for span, size in zip(spans, ramp.shape[1:], strict=True):
        ramp += torch.linspace(0, span, size).reshape(-1, *[1] * (len(spans) - span))
    try:
        moved, back = _there_and_back(MetaTensor(ramp, torch.as_tensor(image.meta[MetaKeys.ORIGINAL_AFFINE])), steps)
    except Exception:  # whoever inverts the map will meet it, and report it
        return
    apart = (back - ramp)[back > 0.999].abs()  # elsewhere is what was cropped
    off = float(apart[:: max(1, len(apart) // 100_000)].median()) if len(apart) else sum(spans)
    if moved.numel() and off > sum(span / size for span, size in zip(spans, moved.shape[1:], strict=True)):
        raise CaseError(
            case,
            "the preprocessing cannot be inverted: a test image that went through it and back is off by "
            f"{off / sum(spans):.0%} of the scan's size, and so would be the map. Look for a step that gives the image "
            "a wrong affine, such as Spacingd(recompute_affine=True) of MONAI 1.6",
        )


def _there_and_back(image: MetaTensor, steps: Iterable[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """An image after the steps that move voxels, and then after their inverse."""
    done: list[tuple[Any, Any]] = []
    for step, key in steps:
        moves = isinstance(step, InvertibleTransform) and type(step).__module__.startswith(MOVING)
        if moves and not isinstance(step, RandomizableTrait) and key in getattr(step, "keys", ()):
            alone: Any = copy.copy(step)
            alone.allow_missing_keys = True
            with suppress(Exception):
                image = alone({key: image})[key]
                done.append((alone, key))
    back = image
    for alone, key in reversed(done):
        back = alone.inverse({key: back})[key]
    return image.as_tensor(), back.as_tensor()
