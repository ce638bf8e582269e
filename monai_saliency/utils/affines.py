"""Where voxels lie: affines to scanner mm, voxel sizes, the unit of a file's header, and the way back to the scan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose
from monai.utils import MetaKeys

from monai_saliency.errors import CaseError

# By the code of `xyzt_units` in a NIfTI header: metres and micrometres. 2 means mm.
_MM_PER_UNIT = {1: 1000.0, 3: 0.001}


def image_spacing(images: torch.Tensor, index: int = 0) -> tuple[float, ...] | None:
    """The voxel sizes in mm, one per spatial axis, of one image of a batch; None where it has no affine."""
    affine = image_affine(images, index)
    if affine is None:
        return None
    sizes = nib.affines.voxel_sizes(affine)
    return tuple(sizes[: images.ndim - 2].tolist())


def image_affine(images: torch.Tensor, index: int = 0) -> np.ndarray | None:
    """The affine to scanner mm of one image of a batch; None where it has none, or one that cannot be inverted."""
    if not isinstance(images, MetaTensor):
        return None
    affine = affine_in_mm(images, index)
    return affine if np.linalg.det(affine) else None


def affine_in_mm(images: MetaTensor, index: int = 0) -> np.ndarray:
    """The affine ``(4, 4)`` to scanner mm of an image, or of one image of a batch; of two axes ``(3, 3)`` in places.

    MONAI's ``LoadImaged`` keeps the unit of the file.
    """
    affine = _numbers(images.affine)
    if affine.ndim == 3:
        affine = affine[index]
    if affine.shape == (3, 3):
        file = _numbers(images.meta.get(MetaKeys.ORIGINAL_AFFINE, ()))
        shape = _numbers(images.meta.get(MetaKeys.SPATIAL_SHAPE, ()))
        file, shape = (file[index] if file.ndim == 3 else file), (shape[index] if shape.ndim == 2 else shape)
        affine = _of_plane(affine, file, shape)
    affine[:-1] *= mm_per_unit(images.meta, index)
    return affine


def _numbers(value: Any) -> np.ndarray:
    """A copy of the numbers in meta data, of any type and device, float64."""
    return torch.as_tensor(value, dtype=torch.float64).numpy(force=True).copy()


def _of_plane(affine: np.ndarray, file: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """The affine of a plane from which MONAI's ``SqueezeDimd`` has taken an axis of the voxels and one of the scanner.

    Args:
        affine: what is left, ``(3, 3)``, after later steps.
        file: the file's affine ``(4, 4)``; of another shape if it is unknown.
        shape: the file's shape, with one axis of 1 voxel.

    Returns:
        the affine ``(4, 4)`` of the plane ``(X, Y, 1)``. As it was if there was no such axis, or if what is left is
        singular.
    """
    thin = np.flatnonzero(shape == 1)
    if file.shape != (4, 4) or shape.shape != (3,) or len(thin) != 1:
        return affine
    in_plane = np.delete(file, thin, axis=1)  # (4, 3)
    squeezed = np.delete(in_plane, thin, axis=0)  # (3, 3)
    if not np.allclose(affine, squeezed):
        if np.isclose(np.linalg.det(squeezed), 0):
            return affine
        in_plane = in_plane @ np.linalg.inv(squeezed) @ affine
    return np.insert(in_plane, 2, file[:, thin[0]], axis=1)


def mm_per_unit(meta: Mapping[str, Any], index: int = 0) -> float:
    """How many mm the unit of an affine is, by ``xyzt_units`` of a NIfTI header or of meta data; 1 where unknown."""
    codes = meta.get("xyzt_units", 0)
    if isinstance(codes, str):  # of ITK's reader, which gives mm
        return 1.0
    units = np.atleast_1d(_numbers(codes))
    return _MM_PER_UNIT.get(int(units[min(index, len(units) - 1)]) & 7, 1.0)


def file_affine(meta: Mapping[str, Any], otherwise: np.ndarray) -> np.ndarray:
    """The affine ``(4, 4)`` in mm with which an image's file was read, by its meta data; ``otherwise`` without one."""
    affine = _numbers(meta.get(MetaKeys.ORIGINAL_AFFINE, ()))
    if affine.shape != (4, 4):
        return otherwise
    affine[:3] *= mm_per_unit(meta)
    return affine


def convert_to_mm(meta: dict, file: str) -> None:
    """Convert the affines and voxel sizes in the meta data of a NIfTI file to mm, in place, with a warning."""
    unit = mm_per_unit(meta)
    if unit == 1:
        return
    warnings.warn(f"{file}: by its header (xyzt_units), 1 in its affine is {unit:g} mm: converted to mm", stacklevel=2)
    for key in (MetaKeys.AFFINE, MetaKeys.ORIGINAL_AFFINE):
        meta[key][:3] *= unit
    meta[MetaKeys.PIXDIM][1:4] *= unit
    meta["xyzt_units"] = np.array(2, np.uint8)  # mm


def apart(shape: Sequence[int], first: np.ndarray, second: np.ndarray) -> float:
    """How far apart two affines put a voxel of a shape, at most."""
    return float(np.linalg.norm(corners(shape, first) - corners(shape, second), axis=1).max())


def corners(shape: Sequence[int], affine: np.ndarray) -> np.ndarray:
    """Where an affine puts the corner voxels of a shape ``(8, 3)``, in mm."""
    last = [size - 1 for size in (*shape[:3], 1, 1)[:3]]
    return nib.affines.apply_affine(affine, list(product(*zip((0, 0, 0), last, strict=True))))


def steps_of(transform: Any) -> Iterator[Any]:
    """A transform, or the steps of nested ``Compose`` one by one. (``flatten`` makes new ones of some kinds.)"""
    if isinstance(transform, Compose):
        for step in transform.transforms:
            yield from steps_of(step)
    elif transform is not None:
        yield transform


def check_inversion(case: str, preprocessing: Any) -> None:
    """Refuse a preprocessing whose inverse does not bring voxels back to their place in the scan: MONAI (1.6) gives an
    image a wrong affine with ``Spacingd(recompute_affine=True)``.
    """
    for step in steps_of(preprocessing):
        if getattr(getattr(step, "spacing_transform", step), "recompute_affine", False):
            raise CaseError(
                case,
                "the preprocessing cannot be inverted, so the map would lie elsewhere: recompute_affine=True of "
                f"{type(step).__name__} gives the image a wrong affine. Leave it out",
            )
