"""Label maps from files: where they lie, and on which voxels of an image."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.data.utils import to_affine_nd
from monai.utils import MetaKeys
from scipy import ndimage
from scipy.spatial import distance

from monai_saliency.cases import case_name
from monai_saliency.errors import AdviceError
from monai_saliency.storage.scans import JPEG, format_of, header_problem, is_photograph, load_image
from monai_saliency.utils.affines import affine_in_mm, apart, corners, file_affine
from monai_saliency.utils.tensors import checked_label

__all__ = ["label_problem", "load_label", "on_grid", "on_image"]

_NEAR = 0.1  # voxels: labels that lie within it lie on the image


def load_label(path: str | Path, scan: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A label map from a file of any format of this module, checked as a scan is.

    Args:
        path: the file.
        scan: an image or map ``(C, *spatial)`` of the labelled scan, for its file's shape and affine. Photographs have
            no place in mm, so a label map is stretched over a photograph, with a warning.

    Returns:
        its voxels ``(1, x, y, z)`` and their affine ``(4, 4)`` to scanner mm.

    Raises:
        AdviceError: when its header gives its voxels no place, or it has another aspect than its photograph.
        ValueError: when it has several channels or other values.
    """
    label = load_image(image_only=True, ensure_channel_first=True, dtype=None)(path)
    if problem := header_problem(label):
        raise AdviceError(problem)
    values = label.numpy()
    if format_of(path) is JPEG and len(kinds := np.unique(values)) > 2:
        raise AdviceError(f"it holds {len(kinds)} labels, and JPEG has made some of them: save it as a PNG, unpacked")
    values = values.reshape(len(values), *_three_axes(values.shape[1:]))
    checked_label(np.nan_to_num(values), values.shape[1:])
    affine = to_affine_nd(3, affine_in_mm(label))
    if isinstance(scan, MetaTensor) and MetaKeys.SPATIAL_SHAPE in scan.meta:
        file_shape = _three_axes(_file_shape(scan))
        if is_photograph(path) or is_photograph(case_name(scan)):
            affine = file_affine(scan.meta, np.eye(4)) @ _stretched(str(path), values.shape[1:], file_shape)
        elif values.shape[1:] == file_shape:
            _warn_if_elsewhere(path, affine, scan)
    return values, affine


def _three_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape of two or three axes as one of three."""
    return (*shape, 1, 1)[:3]


def _file_shape(scan: MetaTensor) -> list[int]:
    """The spatial shape of the file that a scan was loaded from."""
    return np.asarray(scan.meta[MetaKeys.SPATIAL_SHAPE]).astype(int).tolist()


def _warn_if_elsewhere(path: str | Path, affine: np.ndarray, scan: MetaTensor) -> None:
    """Warn of a label map that has its scan's shape and lies elsewhere in the scanner."""
    own, shape = file_affine(scan.meta, np.eye(4)), _file_shape(scan)
    # Its axes may be turned, so each corner is compared with the nearest one.
    off = distance.cdist(corners(shape, own), corners(shape, affine)).min(axis=0).max()
    if off > _NEAR * min(nib.affines.voxel_sizes(own)):
        warnings.warn(
            f"the label map {path} has the shape of its scan {case_name(scan)} and another affine, "
            f"{affine.round(3).tolist()} instead of {own.round(3).tolist()}: its corners are up to {off:.3g} mm from "
            "the scan's. Correct its header if a tool has dropped the affine",
            stacklevel=2,
        )


def _stretched(path: str, shape: Sequence[int], scan_shape: Sequence[int]) -> np.ndarray:
    """The affine ``(4, 4)`` from the pixels of a photograph's label map, stretched over it, to the photograph's.

    Args:
        path: the label map, for errors.
        shape: of the label map, ``(x, y, z)``.
        scan_shape: of the photograph, ``(x, y, 1)``.
    """
    if path.endswith((".npy", ".npz")):  # NumPy counts rows first, a photograph's map columns
        raise AdviceError("it does not say whether its first axis counts rows or columns: save it as a PNG")
    size, scan_size = _size(shape), _size(scan_shape)
    scale = np.divide(scan_shape, shape)
    smallest = min(*shape[:2], *scan_shape[:2])
    other_aspect = abs(scale[0] / scale[1] - 1) > 1 / smallest  # both have whole numbers of pixels
    if scale[2] != 1 or other_aspect:
        raise AdviceError(f"it has {size} pixels, its scan {scan_size}, another aspect: save it at the scan's size")
    if size != scan_size:
        warnings.warn(f"the label map {path} of {size} pixels is stretched to its scan's {scan_size}", stacklevel=2)
    affine = np.diag([*scale, 1.0])
    affine[:3, 3] = (scale - 1) / 2  # outer edges meet, not the centres of the outer pixels
    return affine


def _size(shape: Sequence[int]) -> str:
    """A shape ``(x, y, z)`` in words, without a third axis of one voxel."""
    sizes = shape if shape[2] > 1 else shape[:2]
    return " x ".join(map(str, sizes))


def on_grid(values: np.ndarray, affine: np.ndarray, shape: Sequence[int], grid: np.ndarray) -> np.ndarray:
    """A label map ``(x, y, z)``, nearest neighbour, at the voxels of a grid of 2 or 3 axes; 0 outside of it."""
    to_label = np.linalg.inv(affine) @ to_affine_nd(3, grid)
    if len(shape) == 2 and values.shape[2] == 1:  # one plane
        to_label[2] = 0
    grid_shape = _three_axes(shape)
    if values.shape != grid_shape or not np.allclose(to_label, np.eye(4), rtol=0, atol=1e-5):
        values = ndimage.affine_transform(values, to_label, output_shape=grid_shape, order=0, mode="grid-constant")
    return values.reshape(shape)


def on_image(values: np.ndarray, affine: np.ndarray, image: torch.Tensor) -> np.ndarray:
    """As :func:`on_grid`, at the voxels of an image ``(C, *spatial)``. AdviceError where its affine is wrong."""
    if not isinstance(image, MetaTensor):
        raise AdviceError("the preprocessed image has no affine: keep its meta data (track_meta)")
    if image.affine.shape == (3, 3) and min(values.shape) > 1:
        raise AdviceError("it is a volume, and of the image, a plane, it is not known which: give its plane")
    grid = affine_in_mm(image)
    if np.isclose(np.linalg.det(grid), 0):
        raise AdviceError(
            "the image has lost where its plane lies, since SqueezeDimd drops an axis of the affine: save the scan as "
            "a file of two axes, or load the label map with the image, by the same steps"
        )
    return on_grid(values, affine, image.shape[1:], grid)


def label_problem(label: torch.Tensor, image: torch.Tensor) -> str | None:
    """Why a label map ``(1, *spatial)`` that others have loaded does not lie on an image ``(C, *spatial)`` voxel by
    voxel; None where it does, or where that is not known.
    """
    shape = label.shape[1:]
    problem = header_problem(label)
    if problem or shape != image.shape[1:] or not (_has_file_affine(label) and _has_file_affine(image)):
        return problem
    own, its = to_affine_nd(3, affine_in_mm(label)), to_affine_nd(3, affine_in_mm(image))
    off = apart(shape, own, its)
    if off <= _NEAR * min(nib.affines.voxel_sizes(its)):
        return None
    words = (
        f"its affine {own.round(3).tolist()} puts voxels up to {off:.3g} mm from the voxels of the preprocessed image"
    )
    if apart(shape, _to_file(label, own), _to_file(image, its)) > _NEAR:
        return f"{words}, {its.round(3).tolist()}: give the label's key to each step of the image that moves voxels"
    warnings.warn(
        f"the label map {case_name(label)}: {words}. It is used voxel by voxel; correct its header if a tool has "
        "dropped the affine",
        stacklevel=2,
    )
    return None


def _has_file_affine(image: torch.Tensor) -> TypeGuard[MetaTensor]:
    """Whether the meta data of an image have the affine of its file."""
    return isinstance(image, MetaTensor) and MetaKeys.ORIGINAL_AFFINE in image.meta


def _to_file(image: MetaTensor, affine: np.ndarray) -> np.ndarray:
    """The affine ``(4, 4)`` from the voxels of an image to the voxels of its file."""
    return np.linalg.pinv(file_affine(image.meta, affine)) @ affine
