"""Writing maps on the scan's own grid."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import LoadImage, MapTransform
from monai.utils import MetaKeys

from monai_saliency.cases import case_name
from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import Explanation
from monai_saliency.storage.files import atomic_path, load_scan
from monai_saliency.visualize.pictures import plot_saliency

__all__ = ["SaveSaliencyD", "SaveSaliencyDict", "SaveSaliencyd"]


@dataclass(frozen=True)
class _Grid:
    """The grid that a map must lie on.

    Attributes:
        name: what errors call it.
        shape: ``(*spatial)``, followed by other axes where the scan has more.
        affine: ``(4, 4)``, voxel to scanner mm.
        voxels: gives the image to draw under the map, ``(*spatial)`` with or without channels after.
        header: of the scan, where it is NIfTI.
        drawn: the affine to draw by, where it differs: photographs count their rows downwards.
    """

    name: str
    shape: tuple[int, ...]
    affine: np.ndarray
    voxels: Callable[[], np.ndarray]
    header: nib.Nifti1Header | None = None
    drawn: np.ndarray | None = None

    def holds(self, saliency: torch.Tensor) -> bool:
        """Whether a map ``(K, *spatial)`` lies on it."""
        shape = tuple(saliency.shape[1:])
        return shape == self.shape[: len(shape)] and np.allclose(_affine(saliency), self.affine, rtol=0, atol=1e-3)


def _affine(image: torch.Tensor) -> np.ndarray:
    return image.affine.numpy(force=True) if isinstance(image, MetaTensor) else np.eye(4)


def _scan_grid(saliency: torch.Tensor) -> _Grid:
    """The grid of the scan's file."""
    path = case_name(saliency)
    try:
        scan = load_scan(path)
    except nib.filebasedimages.ImageFileError:
        return _loaded_grid(saliency, path)
    header = scan.header.copy() if isinstance(scan, nib.Nifti1Image) else None
    return _Grid(
        "the scan's grid", scan.shape, scan.affine, lambda: np.asanyarray(scan.dataobj, dtype=np.float32), header
    )


def _loaded_grid(saliency: torch.Tensor, path: str) -> _Grid:
    """The grid on which MONAI reads a file that nibabel does not: a photograph, a DICOM series, ..."""
    meta = saliency.meta if isinstance(saliency, MetaTensor) else {}
    known = MetaKeys.ORIGINAL_AFFINE in meta

    def voxels() -> np.ndarray:
        return np.moveaxis(LoadImage(image_only=True, ensure_channel_first=True)(path).numpy(), 0, -1)

    return _Grid(
        "the image's grid as MONAI reads it",
        tuple(np.asarray(meta.get(MetaKeys.SPATIAL_SHAPE, ())).astype(int).tolist()),
        np.asarray(meta[MetaKeys.ORIGINAL_AFFINE], dtype=np.float64) if known else np.eye(4),
        voxels,
        drawn=None if known else np.diag([1.0, -1.0, 1.0, 1.0]),
    )


def _image_grid(image: torch.Tensor) -> _Grid:
    """An image's own grid."""
    return _Grid(
        "the network's input",
        tuple(image.shape[1:]),
        _affine(image),
        lambda: np.moveaxis(image.numpy(force=True), 0, -1).astype(np.float32),
    )


class SaveSaliencyd(MapTransform):
    """Writes a map as NIfTI, and a picture of it, beside no scan's but its own.

    For a case ``folder/stem`` the files are ``<output_dir>/folder/stem_<key>.nii.gz`` (float32, ``(*spatial)``, or
    ``(*spatial, K)`` for several maps, with the scan's own header: affine, sform and qform codes, units) and
    ``.png``. Each appears whole or not at all.

    Place it after ``Invertd``: a map that does not lie on the scan's own grid is refused. Shape and affine are all that
    can be checked: a step that moves voxels without recording it, such as slicing in a ``Lambdad``, goes unseen where
    an earlier step's inverse restores the scan's shape.

    Of a file that nibabel does not read, such as a photograph, the grid is that on which MONAI reads it: the first axis
    counts its columns.

    Args:
        keys: the maps ``(K, *spatial)``.
        output_dir: the folder to write below.
        picture: whether to draw a picture.
        case_key: where an item holds its case's name.
        title_key: where an item holds the picture's title; the case's name where it holds none.
        grid_key: where an item holds the image ``(C, *spatial)`` on whose grid its map is saved, where that is not the
            scan's file's.
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
        grid_key: Hashable | None = None,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.grid_key = grid_key
        self.output_dir = Path(output_dir)
        self.picture = picture
        self.case_key = case_key
        self.title_key = title_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            case = str(d[self.case_key])
            saliency: torch.Tensor = d[key]
            grid = self._grid(case, key, saliency) if self.grid_key is None else _image_grid(d[self.grid_key])
            if not grid.holds(saliency):
                raise CaseError(
                    case,
                    f"the map of shape {tuple(saliency.shape[1:])}, affine {_affine(saliency).round(3).tolist()}, does "
                    f"not lie on {grid.name} {grid.shape[: saliency.ndim - 1]}, {grid.affine.round(3).tolist()}, so it "
                    "is not saved: invert it with Invertd(transform=<the preprocessing>, orig_keys=<the image>, "
                    "nearest_interp=False) first",
                )
            maps = saliency.detach().cpu().numpy().astype(np.float32)
            path = self.output_dir / f"{case}_{key}.nii.gz"
            with atomic_path(path) as temporary:
                nib.save(_on_grid(grid, maps), temporary)
            if self.picture:
                with atomic_path(path.with_name(f"{Path(case).name}_{key}.png")) as temporary:
                    plot_saliency(
                        _gray(grid.voxels(), maps.ndim - 1, grid.header is None),
                        maps,
                        grid.affine if grid.drawn is None else grid.drawn,
                        title=str(d.get(self.title_key, case)),
                        labels=_labels(d.get("explanation")),
                    ).savefig(temporary, dpi=100)
            d[f"{key}_path"] = str(path)
        return d

    def lies_on_scan(self, saliency: torch.Tensor) -> bool:
        """Whether a map ``(K, *spatial)`` lies on the grid of the scan that it names."""
        return Path(case_name(saliency)).exists() and _scan_grid(saliency).holds(saliency)

    @staticmethod
    def _grid(case: str, key: Hashable, saliency: torch.Tensor) -> _Grid:
        if not Path(case_name(saliency)).exists():
            raise CaseError(
                case,
                f"the map {key!r} does not know the scan it belongs to: it must be a MetaTensor whose "
                "`filename_or_obj` is the scan's file, as Saliencyd gives for a scan of LoadImaged",
            )
        return _scan_grid(saliency)


def _labels(explanation: Explanation | None) -> list[str] | None:
    """What to call each map, where there is one a channel: the picture's title names the rest."""
    if explanation is None or explanation.masks.channels is None:
        return None
    return [f"saliency of channel {channel} for {label}" for label, channel, _ in explanation.explained]


def _gray(voxels: np.ndarray, dims: int, colours: bool) -> np.ndarray:
    """One value a voxel: of a photograph the mean of its colours, of a scan its first volume."""
    if voxels.ndim == dims:
        return voxels
    return voxels.mean(axis=-1) if colours else voxels.reshape(*voxels.shape[:dims], -1)[..., 0]


def _on_grid(grid: _Grid, maps: np.ndarray) -> nib.Nifti1Image:
    if grid.header is not None:
        grid.header.set_data_dtype(np.float32)
        grid.header.set_slope_inter(1, 0)
        grid.header["cal_min"] = grid.header["cal_max"] = 0
    return nib.Nifti1Image(maps[0] if len(maps) == 1 else np.moveaxis(maps, 0, -1), grid.affine, grid.header)


SaveSaliencyD = SaveSaliencyDict = SaveSaliencyd
