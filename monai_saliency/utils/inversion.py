"""The steps of a preprocessing, and whether their inverse leads back to the scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from monai.transforms import Compose

from monai_saliency.errors import CaseError

__all__ = ["MOVING", "check_inversion", "steps_of"]

#: where MONAI's transforms that move voxels are
MOVING = ("monai.transforms.spatial.", "monai.transforms.croppad.")


def steps_of(transform: Any) -> Iterator[Any]:
    """A transform, or the steps of nested ``Compose`` one by one. (``flatten`` makes new ones of some kinds.)"""
    if isinstance(transform, Compose):
        for step in transform.transforms:
            yield from steps_of(step)
    elif transform is not None:
        yield transform


def check_inversion(case: str, steps: Iterable[Any]) -> None:
    """Refuse a preprocessing whose inverse does not bring voxels back to their place in the scan.

    MONAI (1.6) gives an image a wrong affine with ``Spacingd(recompute_affine=True)``.

    Args:
        case: the case's name.
        steps: the transforms of the preprocessing.

    Raises:
        CaseError: when a step is such a one.
    """
    for step in steps:
        spacing = getattr(step, "spacing_transform", step)
        if getattr(spacing, "recompute_affine", False):
            raise CaseError(
                case,
                "the preprocessing cannot be inverted, so the map would lie elsewhere: recompute_affine=True of "
                f"{type(step).__name__} gives the image a wrong affine. Leave it out",
            )
