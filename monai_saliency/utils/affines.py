"""Where voxels lie: affines to scanner mm, voxel sizes, and the unit of a file's header."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.utils import MetaKeys

__all__ = ["affine_in_mm", "apart", "convert_to_mm", "corners", "file_affine", "image_affine", "image_spacing"]
__all__ += ["mm_per_unit"]

# In meta data: where the file's voxels are, and how many.
_FILE = MetaKeys.ORIGINAL_AFFINE, MetaKeys.SPATIAL_SHAPE
# By the code of `xyzt_units` in a NIfTI header: metres and micrometres. 2 means mm.
_MM_PER_UNIT = {1: 1000.0, 3: 0.001}


def image_spacing(images: torch.Tensor, index: int = 0) -> tuple[float, ...] | None:
    """The voxel sizes in mm, one per spatial axis, of one image of a batch; None where it has no affine."""
    affine = image_affine(images, index)
    return None if affine is None else tuple(nib.affines.voxel_sizes(affine)[: images.ndim - 2].tolist())


def image_affine(images: torch.Tensor, index: int = 0) -> np.ndarray | None:
    """The affine to scanner mm of one image of a batch; None where it has none, or one that cannot be inverted."""
    affine = affine_in_mm(images, index) if isinstance(images, MetaTensor) else None
    return None if affine is None or np.linalg.det(affine) == 0 else affine


def affine_in_mm(images: MetaTensor, index: int = 0) -> np.ndarray:
    """The affine ``(4, 4)`` to scanner mm of an image, or of one image of a batch; of two axes ``(3, 3)`` in places.

    MONAI's ``LoadImaged`` keeps the unit of the file.
    """
    affine = (images.affine[index] if images.affine.ndim == 3 else images.affine).numpy(force=True).copy()
    if affine.shape == (3, 3):
        affine = _of_plane(affine, *(_item(images.meta.get(key, ()), index) for key in _FILE))
    affine[:-1] *= mm_per_unit(images.meta, index)
    return affine


def _item(value: Any, index: int) -> np.ndarray:
    """The affine ``(4, 4)`` or shape ``(3,)`` of a file, of one image or of an image of a batch."""
    found = torch.as_tensor(value, dtype=torch.float64).numpy(force=True)
    return found[index] if found.shape[1:] in ((4, 4), (3,)) else found


def _of_plane(affine: np.ndarray, file: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """The affine ``(4, 4)`` of a plane ``(X, Y, 1)`` from which MONAI's ``SqueezeDimd`` has taken an axis of the voxels
    and one of the scanner, ``(3, 3)``. As it is where there was no such axis, or what is left is singular.
    """
    thin = np.flatnonzero(shape == 1)
    if file.shape != (4, 4) or shape.shape != (3,) or len(thin) != 1:
        return affine
    columns = np.delete(file, thin, axis=1)
    left = np.delete(columns, thin, axis=0)
    if not np.allclose(affine, left):
        if np.isclose(np.linalg.det(left), 0):
            return affine
        columns = columns @ np.linalg.inv(left) @ affine
    return np.insert(columns, 2, file[:, thin[0]], axis=1)


def mm_per_unit(meta: Mapping[str, Any], index: int = 0) -> float:
    """How many mm the unit of an affine is, by ``xyzt_units`` of a NIfTI header or of meta data; 1 where unknown."""
    codes = meta.get("xyzt_units", 0)
    if isinstance(codes, str):  # of ITK's reader, which gives mm
        return 1.0
    units = torch.as_tensor(codes).reshape(-1)
    return _MM_PER_UNIT.get(int(units[min(index, len(units) - 1)]) & 7, 1.0)


def file_affine(meta: Mapping[str, Any], otherwise: np.ndarray) -> np.ndarray:
    """The affine ``(4, 4)`` in mm with which an image's file was read, by its meta data; ``otherwise`` without one."""
    affine = torch.as_tensor(meta.get(MetaKeys.ORIGINAL_AFFINE, ()), dtype=torch.float64).numpy(force=True).copy()
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
    return nib.affines.apply_affine(affine, [*product(*([0, size - 1] for size in (*shape[:3], 1, 1)[:3]))])
