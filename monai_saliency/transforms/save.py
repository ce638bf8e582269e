"""Writing maps on the scan's own grid."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from nibabel.spatialimages import SpatialImage

from monai_saliency.errors import CaseError
from monai_saliency.files import atomic_path, load_scan
from monai_saliency.inferers import Explanation, case_name
from monai_saliency.report import plot_saliency

__all__ = ["SaveSaliencyD", "SaveSaliencyDict", "SaveSaliencyd"]


class SaveSaliencyd(MapTransform):
    """Writes a map as NIfTI, and a picture of it, beside no scan's but its own.

    For a case ``folder/stem`` the files are ``<output_dir>/folder/stem_<key>.nii.gz`` (float32, ``(*spatial)``, or
    ``(*spatial, K)`` for several maps, with the scan's own header: affine, sform and qform codes, units) and
    ``.png``. Each appears whole or not at all.

    Place it after ``Invertd``: a map that does not lie on the scan's own grid is refused. Shape and affine are all that
    can be checked: a step that moves voxels without recording it, such as slicing in a ``Lambdad``, goes unseen where
    an earlier step's inverse restores the scan's shape.

    Args:
        keys: the maps ``(K, *spatial)``.
        output_dir: the folder to write below.
        picture: whether to draw a picture.
        case_key: where an item holds its case's name.
        title_key: where an item holds the picture's title; the case's name where it holds none.
        allow_missing_keys: don't raise for a key that an item lacks.

    Adds:
        ``<key>_path``: where the map was written.

    Raises:
        CaseError: when the map's shape or affine is not the scan's.
    """

    def __init__(
        self,
        keys: KeysCollection,
        output_dir: str | Path,
        picture: bool = True,
        case_key: str = "case",
        title_key: str = "title",
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.output_dir = Path(output_dir)
        self.picture = picture
        self.case_key = case_key
        self.title_key = title_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            case = str(d[self.case_key])
            saliency: torch.Tensor = d[key]
            if not Path(case_name(saliency)).is_file():
                raise CaseError(
                    case,
                    f"the map {key!r} does not know the scan it belongs to: it must be a MetaTensor whose "
                    "`filename_or_obj` is the scan's file, as Saliencyd gives for a scan of LoadImaged",
                )
            scan = load_scan(case_name(saliency))
            self._check_grid(case, saliency, scan)
            maps = saliency.detach().cpu().numpy().astype(np.float32)
            path = self.output_dir / f"{case}_{key}.nii.gz"
            with atomic_path(path) as temporary:
                nib.save(_on_grid_of(scan, maps), temporary)
            if self.picture:
                with atomic_path(path.with_name(f"{Path(case).name}_{key}.png")) as temporary:
                    volume = np.asanyarray(scan.dataobj, dtype=np.float32)
                    plot_saliency(
                        volume if volume.ndim == maps.ndim - 1 else volume[..., 0],
                        maps,
                        scan.affine,
                        title=str(d.get(self.title_key, case)),
                        labels=_labels(d.get("explanation")),
                    ).savefig(temporary, dpi=100)
            d[f"{key}_path"] = str(path)
        return d

    @staticmethod
    def _check_grid(case: str, saliency: torch.Tensor, scan: SpatialImage) -> None:
        dims = saliency.ndim - 1
        affine = np.asarray(saliency.affine) if isinstance(saliency, MetaTensor) else np.eye(4)
        if tuple(saliency.shape[1:]) == tuple(scan.shape[:dims]) and np.allclose(
            affine, scan.affine, rtol=0, atol=1e-3
        ):
            return
        raise CaseError(
            case,
            f"the map of shape {tuple(saliency.shape[1:])} and affine {affine.round(3).tolist()} does not lie on the "
            f"scan's grid {tuple(scan.shape[:dims])}, {scan.affine.round(3).tolist()}, so it is not saved: invert it "
            "with Invertd(transform=<the preprocessing>, orig_keys=<the image>, nearest_interp=False) first",
        )


def _labels(explanation: Explanation | None) -> list[str] | None:
    """What to call each map, where there is one a channel: the picture's title names the rest."""
    if explanation is None or explanation.masks.channels is None:
        return None
    return [f"saliency of channel {channel} for {label}" for label, channel, _ in explanation.explained]


def _on_grid_of(scan: SpatialImage, maps: np.ndarray) -> nib.Nifti1Image:
    header = scan.header.copy() if isinstance(scan, nib.Nifti1Image) else None
    if header is not None:
        header.set_data_dtype(np.float32)
        header.set_slope_inter(1, 0)
        header["cal_min"] = header["cal_max"] = 0
    return nib.Nifti1Image(maps[0] if len(maps) == 1 else np.moveaxis(maps, 0, -1), scan.affine, header)


SaveSaliencyD = SaveSaliencyDict = SaveSaliencyd
