"""A check that refuses scans which cannot be explained, before time is spent on them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from monai.utils import MetaKeys
from nibabel.spatialimages import SpatialImage

from monai_saliency.cases import case_name
from monai_saliency.errors import CaseError
from monai_saliency.storage.files import load_scan
from monai_saliency.utils.arguments import whole_number

__all__ = ["CheckScanD", "CheckScanDict", "CheckScand", "header_problem"]


_COMPLEX = "its voxels are complex numbers: save their magnitude, or the part that the network is for, as a scan"


class CheckScand(MapTransform):
    """Refuses scans that would give a wrong map or no map. Place it directly after ``EnsureChannelFirstd``.

    Args:
        keys: the keys of the images ``(C, *spatial)``.
        spatial_dims: number of spatial axes that the network expects, 2 or 3.
        channels_key: the key of the number of channels that an item must have; 1 if the item does not have this key.
        case_key: the key of the case's name, for errors.
        allow_missing_keys: whether items may lack a key.

    Raises:
        CaseError: when called, for another number of spatial axes or channels, an empty axis, complex, NaN or infinite
            voxels, an affine that is singular or not finite, or a NIfTI header whose sform and qform name the same
            space (their codes are equal) and place the voxels differently. Where they name two spaces, as after a
            registration, the sform counts, unless MONAI has read the other one.

    Example::

        >>> import torch
        >>> CheckScand("image", spatial_dims=3)({"image": torch.zeros(1, 4, 4), "case": "xray_7"})
        Traceback (most recent call last):
            ...
        monai_saliency.errors.CaseError: case xray_7: the scan has 2 spatial axes (4, 4), 3 are expected
    """

    only_checks = True

    def __init__(
        self,
        keys: KeysCollection,
        spatial_dims: int = 3,
        channels_key: str = "channels",
        case_key: str = "case",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.spatial_dims = whole_number("spatial_dims", spatial_dims, 2)
        self.channels_key = channels_key
        self.case_key = case_key

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        for key in self.key_iterator(dict(data)):
            problem = self._problem(data[key], int(data.get(self.channels_key, 1)))
            if problem:
                name = data.get(self.case_key)
                raise CaseError(str(name if name is not None else key), problem)
        return data

    def _problem(self, image: torch.Tensor, channels: int) -> str | None:
        """The problem of an image ``(C, *spatial)`` in a sentence; None without one."""
        dims, shape = image.ndim - 1, tuple(image.shape[1:])
        if dims != self.spatial_dims:
            return f"the scan has {dims} spatial axes {shape}, {self.spatial_dims} are expected"
        if image.shape[0] < channels:
            return (
                f"the scan has {image.shape[0]} channels {shape}, {channels} are expected, one for each modality listed"
            )
        if image.shape[0] > channels and dims == 2:
            return (
                f"the image has {image.shape[0]} channels {shape}, {channels} expected: set --channels "
                f"{image.shape[0]} for a network that takes so many, or save the image with {channels}"
            )
        if image.shape[0] > channels:
            return (
                f"the file is a {dims + 1}D series of {image.shape[0]} volumes of shape {shape}, where {channels} is "
                "expected: split it into 3D files, or list its modalities in a dataset.json if they are channels of "
                "one scan"
            )
        if 0 in shape:
            return f"the scan's shape {shape} holds no voxel"
        if image.is_complex():
            return _COMPLEX
        problem = header_problem(image, dims)
        if problem is not None:
            return problem
        if not bool(torch.isfinite(image).all()):
            count = int((~torch.isfinite(image)).sum())
            return (
                f"{count} of its voxels are NaN or infinite: replace them in the file (for example by the background's "
                "value)"
            )
        return None


def header_problem(image: torch.Tensor, dims: int) -> str | None:
    """Why the header of the file of an image ``(C, *spatial)`` gives its voxels no place; None where it does."""
    scan = _file(image)
    if scan is not None and scan.get_data_dtype().kind == "c":
        return _COMPLEX
    # MONAI's reader replaces affines that it does not accept.
    own = image.affine if isinstance(image, MetaTensor) else None
    affine = own if scan is None or own is None else scan.affine
    affine = None if affine is None else np.asarray(affine)
    if affine is not None and (not np.isfinite(affine).all() or _singular(affine[:-1, :dims])):
        return (
            f"its affine {np.round(affine, 4).tolist()} is singular or not finite, so its voxels have no place in "
            "the scanner: correct the file's header"
        )
    return None if scan is None else _two_places(image, scan)


def _file(image: torch.Tensor) -> SpatialImage | None:
    """The NIfTI file that an image was loaded from; None where there is none."""
    path = Path(case_name(image))
    return load_scan(path) if path.name.lower().endswith((".nii", ".nii.gz")) and path.is_file() else None


def _two_places(image: torch.Tensor, scan: SpatialImage) -> str | None:
    """How a NIfTI header contradicts itself about the place of the voxels, in words; None if it does not."""
    if not isinstance(scan, nib.Nifti1Image):
        return None
    sform, sform_code = scan.get_sform(coded=True)
    qform, qform_code = scan.get_qform(coded=True)
    read = image.meta.get(MetaKeys.ORIGINAL_AFFINE) if isinstance(image, MetaTensor) else None
    if sform is not None and sform_code == qform_code:
        # A qform cannot hold shear: writers put the nearest one there that it can hold.
        nearest = scan.header.copy()
        nearest.set_qform(sform)
        apart = min(_apart(each, qform, scan.shape) for each in (sform, nearest.get_qform()))
    elif read is not None and np.shape(read) == (4, 4):
        apart = _apart(scan.affine, np.asarray(read), scan.shape)
    else:
        return None
    sizes = nib.affines.voxel_sizes(scan.affine)[: len(scan.shape)]
    if apart <= 0.1 * min(sizes):
        return None
    if not qform_code:
        # MONAI takes a qform that fits the voxel sizes for a sform that does not, also one whose code is 0.
        listed, found = ([round(float(each), 4) for each in both] for both in (scan.header.get_zooms()[:3], sizes))
        return (
            f"its header lists voxel sizes {listed} where its sform (code {sform_code}) has {found}, so MONAI reads "
            f"its voxels up to {apart:.3g} mm from where the sform puts them: correct the file's header, in nibabel by "
            "`scan.header.set_zooms(nibabel.affines.voxel_sizes(scan.affine))`"
        )
    return (
        f"its sform (code {sform_code}) and qform (code {qform_code}) put voxels up to {apart:.3g} mm apart, so its "
        "place in the scanner is not known: correct the file's header, such as by setting the wrong one's code to 0"
    )


def _apart(one: np.ndarray, other: np.ndarray, shape: Sequence[int]) -> float:
    """How far two affines ``(4, 4)`` put the same voxel apart at most, in mm: that is at a corner."""
    corners = np.array([[*corner, 1] for corner in product(*([0, size - 1] for size in (*shape[:3], 1, 1)[:3]))])
    return float(np.linalg.norm(corners @ (one - other)[:3].T, axis=1).max())


def _singular(axes: np.ndarray) -> bool:
    """Whether voxel axes, the columns of a matrix, are linearly dependent."""
    edges = np.linalg.norm(axes, axis=0)
    # The axes are divided by the voxel sizes, so that small voxels are not taken for singular.
    return bool((edges == 0).any()) or np.linalg.matrix_rank(axes / edges, tol=1e-6) < axes.shape[1]


CheckScanD = CheckScanDict = CheckScand
