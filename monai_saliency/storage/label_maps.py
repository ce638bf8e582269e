"""Label maps from files: where they lie, and on which voxels of an image."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.data.utils import to_affine_nd
from monai.utils import MetaKeys, TraceKeys
from scipy import ndimage
from scipy.spatial import distance

from monai_saliency.cases import case_name
from monai_saliency.errors import AdviceError
from monai_saliency.storage.scans import (
    JPEG,
    NIFTI,
    TURNED,
    exif_turn,
    format_of,
    header_problem,
    is_photograph,
    load_image,
)
from monai_saliency.utils.affines import affine_in_mm, apart, corners, file_affine

__all__ = ["label_problem", "load_label", "on_grid", "on_image"]


def load_label(path: str | Path, scan: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A label map from a file of any format of this module, checked as a scan is.

    Args:
        path: the file.
        scan: an image or map ``(C, *spatial)`` of the labelled scan, for its file's shape and affine. Photographs have
            no place in mm, so a label map is stretched over a photograph, with a warning.

    Returns:
        its voxels ``(C, x, y, z)`` and their affine ``(4, 4)`` to scanner mm.

    Raises:
        AdviceError: when its header gives its voxels no place, or it has another aspect than its photograph.
    """
    label = load_image(image_only=True, ensure_channel_first=True, dtype=None)(path)
    if problem := header_problem(label):
        raise AdviceError(problem)
    values, affine = label.numpy(), to_affine_nd(3, affine_in_mm(label))
    values = values.reshape(len(values), *[*values.shape[1:], 1, 1][:3])
    if format_of(path) is JPEG and len(kinds := np.unique(values)) > 2:
        raise AdviceError(f"it holds {len(kinds)} labels, and JPEG has made some of them: save it as a PNG, unpacked")
    if isinstance(scan, MetaTensor) and MetaKeys.SPATIAL_SHAPE in scan.meta:
        affine = _placed(str(path), values.shape[1:], affine, scan)
    return values, affine


def _placed(path: str, shape: tuple[int, ...], affine: np.ndarray, scan: MetaTensor) -> np.ndarray:
    """The affine of a label map ``(x, y, z)`` on its scan."""
    own, file = file_affine(scan.meta, np.eye(4)), case_name(scan)
    whole = tuple([*np.asarray(scan.meta[MetaKeys.SPATIAL_SHAPE]).astype(int).tolist(), 1, 1][:3])
    if is_photograph(path) or is_photograph(file):
        if path.endswith((".npy", ".npz")):  # NumPy counts rows first, a photograph's map columns
            raise AdviceError("it does not say whether its first axis counts rows or columns: save it as a PNG")
        _warn_turned(path, file, whole, bool(scan.meta.get(TURNED)))
        return own @ _stretched(path, shape, whole)
    # Its axes may be turned, so each corner is compared with the nearest one.
    off = distance.cdist(corners(whole, own), corners(whole, affine)).min(axis=0).max()
    if shape == whole and off > 0.1 * min(nib.affines.voxel_sizes(own)):
        warnings.warn(
            f"the label map {path} has the shape of its scan {file} and another affine, {affine.round(3).tolist()} "
            f"instead of {own.round(3).tolist()}: its corners are up to {off:.3g} mm from the scan's. Correct its "
            "header if a tool has dropped the affine",
            stacklevel=2,
        )
    return affine


def _warn_turned(path: str, file: str, whole: tuple[int, ...], is_turned: bool) -> None:
    """Warn of a label map that may have been drawn on a picture before or after its EXIF orientation was applied."""
    turns = exif_turn(file), exif_turn(path)
    keeps_shape = max(turns) < 5 or whole[0] == whole[1]
    if turns[0] != turns[1] and keeps_shape:
        as_read = "turned, as viewers show it" if is_turned else "as it is stored, which viewers do not show"
        warnings.warn(
            f"{file} has the EXIF orientation {turns[0]}, its label map {path} has {turns[1]}: the label is laid on "
            f"the picture {as_read}. If it was drawn on the other one, its regions lie wrong: save both without EXIF "
            "orientation (PIL.ImageOps.exif_transpose)",
            stacklevel=2,
        )


def _stretched(path: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> np.ndarray:
    """The voxels ``(4, 4)`` of a picture of shape ``whole`` under the voxels of its label map."""
    sizes = [" x ".join(map(str, each[: 2 if each[2] == 1 else 3])) for each in (shape, whole)]
    across, down, through = scale = np.divide(whole, shape)
    # Both have whole numbers of pixels.
    if through != 1 or abs(across / down - 1) > 1 / min(*shape[:2], *whole[:2]):
        raise AdviceError(f"it has {sizes[0]} pixels, its scan {sizes[1]}, another aspect: save it at the scan's size")
    if shape != whole:
        warnings.warn(f"the label map {path} of {sizes[0]} pixels is stretched to its scan's {sizes[1]}", stacklevel=2)
    return np.diag([*scale, 1.0]) + np.pad((scale - 1)[:, None] / 2, ((0, 1), (3, 0)))


def on_grid(values: np.ndarray, affine: np.ndarray, shape: Sequence[int], grid: np.ndarray) -> np.ndarray:
    """A label map ``(x, y, z)``, nearest neighbour, at the voxels of a grid of 2 or 3 axes; 0 outside of it."""
    to_label = np.linalg.inv(affine) @ to_affine_nd(3, grid)
    if len(shape) == 2 and values.shape[2] == 1:  # one plane
        to_label[2] = 0
    if values.shape == (*shape, 1)[:3] and np.allclose(to_label, np.eye(4), rtol=0, atol=1e-5):
        return values.reshape(shape)
    how: dict[str, Any] = {"output_shape": (*shape, 1)[:3], "order": 0, "mode": "grid-constant"}
    return ndimage.affine_transform(values, to_label, **how).reshape(shape)


def on_image(values: np.ndarray, affine: np.ndarray, image: torch.Tensor) -> np.ndarray:
    """As :func:`on_grid`, at the voxels of an image ``(C, *spatial)``. AdviceError where its affine is wrong."""
    if not isinstance(image, MetaTensor):
        raise AdviceError("the preprocessed image has no affine: keep its meta data (track_meta)")
    sizes = (each.get(TraceKeys.ORIG_SIZE) for each in image.applied_operations if isinstance(each, dict))
    first, file = [*map(int, next(filter(None, sizes), image.shape[1:]))], case_name(image)
    whole = np.asarray(image.meta.get(MetaKeys.SPATIAL_SHAPE, first)).astype(int).tolist()
    if first != whole and sorted(first) == sorted(whole) and (is_photograph(file) or format_of(file) is NIFTI):
        raise AdviceError(
            f"the scan's axes {tuple(whole)} were swapped to {tuple(first)} and its affine was not, as by Transposed "
            "or reverse_indexing=False: leave that out, or load the label map with the image, by the same steps"
        )
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
    shape, both = label.shape[1:], [each for each in (label, image) if isinstance(each, MetaTensor)]
    problem = header_problem(label)
    if problem or shape != image.shape[1:] or sum(MetaKeys.ORIGINAL_AFFINE in each.meta for each in both) < 2:
        return problem
    own, its = (to_affine_nd(3, affine_in_mm(each)) for each in both)
    off = apart(shape, own, its)
    if off <= 0.1 * min(nib.affines.voxel_sizes(its)):
        return None
    words = (
        f"its affine {own.round(3).tolist()} puts voxels up to {off:.3g} mm from the voxels of the preprocessed image"
    )
    # From these voxels to the voxels of the files.
    moves = [np.linalg.pinv(file_affine(each.meta, at)) @ at for each, at in zip(both, (own, its), strict=True)]
    if apart(shape, *moves) > 0.1:
        return f"{words}, {its.round(3).tolist()}: give the label's key to each step of the image that moves voxels"
    warnings.warn(
        f"the label map {case_name(label)}: {words}. It is used voxel by voxel; correct its header if a tool has "
        "dropped the affine",
        stacklevel=2,
    )
    return None
