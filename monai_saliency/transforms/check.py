"""A check that refuses scans which cannot be explained, before time is spent on them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from monai.utils import MetaKeys

from monai_saliency.cases import case_name
from monai_saliency.errors import CaseError
from monai_saliency.storage.files import damage_of, load_scan
from monai_saliency.utils.arguments import whole_number

__all__ = ["CheckScand", "header_problem"]


class CheckScand(MapTransform):
    """Refuses scans that would give a wrong map or no map. Place it directly after ``EnsureChannelFirstd``.

    Args:
        keys: the keys of the images ``(C, *spatial)``.
        spatial_dims: number of spatial axes that the network expects, 2 or 3.
        allow_missing_keys: whether items may lack a key.

    Raises:
        CaseError: when called, for another number of spatial axes or channels, complex, NaN or infinite
            voxels, a ``.nii.gz`` whose checksum is wrong, an affine that is singular or not finite, or a NIfTI header
            of which MONAI reads another place of the voxels than the sform, on whose grid maps are saved.

    Example::

        >>> import torch
        >>> CheckScand("image", spatial_dims=3)({"image": torch.zeros(1, 4, 4), "case": "xray_7"})
        Traceback (most recent call last):
            ...
        monai_saliency.errors.CaseError: case xray_7: the scan has 2 spatial axes (4, 4), 3 are expected
    """

    only_checks = True

    def __init__(self, keys: KeysCollection, spatial_dims: int = 3, allow_missing_keys: bool = False) -> None:
        super().__init__(keys, allow_missing_keys)
        self.spatial_dims = whole_number("spatial_dims", spatial_dims, 2)

    def __call__(self, data: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
        for key in self.key_iterator(dict(data)):
            problem = self._problem(data[key], int(data.get("channels", 1)))
            if problem:
                raise CaseError(str(data.get("case", key)), problem)
        return data

    def _problem(self, image: torch.Tensor, channels: int) -> str | None:
        """The problem of an image ``(C, *spatial)`` in a sentence; None without one."""
        dims, count, shape = image.ndim - 1, len(image), tuple(image.shape[1:])
        if dims != self.spatial_dims:
            return f"the scan has {dims} spatial axes {shape}, {self.spatial_dims} are expected"
        if count != channels:
            return (
                f"the file is a {dims + 1}D series of {count} volumes or channels of shape {shape}, where {channels} "
                "is expected: split it into files, list its modalities in a dataset.json if they are channels of one "
                f"scan, or set --channels {count} for a network that takes so many"
            )
        problem = header_problem(image, dims)
        if problem is None and not bool(torch.isfinite(image).all()):
            wrong = int((~torch.isfinite(image)).sum())
            return f"{wrong} of its voxels are NaN or infinite: replace them in the file by the background's value"
        return problem


def header_problem(image: torch.Tensor, dims: int) -> str | None:
    """Why the header of the file of an image ``(C, *spatial)`` gives its voxels no place; None where it does."""
    path = Path(case_name(image))
    scan = load_scan(path) if path.name.lower().endswith((".nii", ".nii.gz")) and path.is_file() else None
    if image.is_complex() or (scan is not None and scan.get_data_dtype().kind == "c"):
        return "its voxels are complex numbers: save their magnitude, or the part that the network is for, as a scan"
    if scan is not None and path.suffix.lower() == ".gz" and (damage := damage_of(path)):
        return damage
    if not isinstance(image, MetaTensor):
        return None
    # MONAI's reader replaces affines that it does not accept.
    affine = np.asarray(image.affine if scan is None else scan.affine)
    axes = affine[:-1, :dims]
    sizes = np.linalg.norm(axes, axis=0)
    # Relative to the voxel sizes, so that small voxels are not taken for singular; false for NaN.
    if not np.isfinite(affine).all() or not np.linalg.det(axes.T @ axes) > 1e-12 * np.prod(sizes) ** 2:
        return (
            f"its affine {np.round(affine, 4).tolist()} is singular or not finite, so its voxels have no place in "
            "the scanner: correct the file's header"
        )
    read = np.asarray(image.meta.get(MetaKeys.ORIGINAL_AFFINE, affine))
    if scan is None or read.shape != affine.shape:
        return None
    corners = np.array([*product(*([0, size - 1] for size in (*scan.shape[:3], 1, 1)[:3]), [1])])
    apart = float(np.linalg.norm(corners @ (affine - read)[:3].T, axis=1).max())
    if apart <= 0.1 * min(sizes):
        return None
    # MONAI takes the qform for a sform that does not fit the voxel sizes that the header lists.
    return (
        f"its sform and the qform that MONAI reads put voxels up to {apart:.3g} mm apart, so its place in the scanner "
        "is not known: correct the file's header, in nibabel by `scan.set_qform(scan.affine)` if the sform is right"
    )
