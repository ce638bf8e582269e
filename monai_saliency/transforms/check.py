"""A check that refuses scans which cannot be explained, before time is spent on them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform

from monai_saliency.errors import CaseError
from monai_saliency.storage.scans import header_problem
from monai_saliency.utils.affines import mm_per_unit
from monai_saliency.utils.arguments import whole_number


class CheckScand(MapTransform):
    """Refuses scans that would give a wrong map or no map. Place it directly after ``EnsureChannelFirstd``.

    Args:
        keys: the keys of the images ``(C, *spatial)``.
        spatial_dims: number of spatial axes that the network expects, 2 or 3.
        allow_missing_keys: whether items may lack a key.

    Raises:
        CaseError: when called, for another number of spatial axes or channels, complex, NaN or infinite
            voxels, a ``.nii.gz`` whose checksum is wrong, an affine that is singular or not finite, a NIfTI header
            that MONAI reads differently from its sform (maps are saved on the grid of the sform), or an affine
            that was not read in mm.

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
                f"scan, or set --channels {count} if the network takes {count} channels"
            )
        problem = header_problem(image)
        if problem is None and isinstance(image, MetaTensor) and mm_per_unit(image.meta) != 1:
            return (
                f"by its header, 1 in its affine is {mm_per_unit(image.meta):g} mm, and later steps take it for 1 mm: "
                "load it by monai_saliency.storage.scans.scan_loader, which converts it, instead of LoadImaged"
            )
        if problem is None and not bool(torch.isfinite(image).all()):
            wrong = int((~torch.isfinite(image)).sum())
            return f"{wrong} of its voxels are NaN or infinite: replace them in the file by the background's value"
        return problem
