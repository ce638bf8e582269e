"""Case: one image under explanation, what it is called, where it came from, and its voxel sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import nibabel as nib
import torch
from monai.data import MetaTensor
from monai.utils import ImageMetaKey

__all__ = ["Case", "case_name", "image_spacing", "source_file"]


@dataclass(frozen=True)
class Case:
    """One image under explanation.

    Attributes:
        name: what errors call it, the file's name where there is one.
        image: ``(C, *spatial)``, unperturbed, in the network's input space.
        index: its place in the batch that was given.
        labels: its label map ``(1, *spatial)``, where it has one.
        spacing: voxel sizes in mm, one per spatial axis, where they are known.
        source: the file that it was loaded from, where it is known.
    """

    name: str
    image: torch.Tensor
    index: int = 0
    labels: torch.Tensor | None = None
    spacing: Sequence[float] | None = None
    source: str | None = None


def case_name(images: torch.Tensor, index: int = 0) -> str:
    """What to call one image of a batch: its file where its meta data names one, else its place."""
    return source_file(images, index) or f"image {index} of the batch"


def source_file(images: torch.Tensor, index: int = 0) -> str | None:
    """The file that one image of a batch was loaded from, where its meta data names one."""
    names = images.meta.get(ImageMetaKey.FILENAME_OR_OBJ) if isinstance(images, MetaTensor) else None
    if isinstance(names, (list, tuple)) and index < len(names):
        names = names[index]
    return names if isinstance(names, str) and names else None


def image_spacing(images: torch.Tensor, index: int = 0) -> tuple[float, ...] | None:
    """The voxel sizes in mm, one per spatial axis, of one image of a batch; None where it has no affine."""
    if not isinstance(images, MetaTensor):
        return None
    affine = images.affine[index] if images.affine.ndim == 3 else images.affine
    return tuple(nib.affines.voxel_sizes(affine.numpy(force=True))[: images.ndim - 2].tolist())
