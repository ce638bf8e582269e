"""Writing maps on the scan's own grid."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.data.utils import to_affine_nd
from monai.transforms import MapTransform
from monai.utils import MetaKeys

from monai_saliency.cases import case_name
from monai_saliency.errors import CaseError
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.storage.files import atomic_path, case_file, error_key
from monai_saliency.storage.label_maps import load_label, on_grid
from monai_saliency.storage.scans import TURNED, load_image, load_scan, scan_name
from monai_saliency.utils.affines import affine_in_mm
from monai_saliency.utils.arguments import a_path, check_option, flag, positive_numbers, require, written
from monai_saliency.visualize.legend import Legend, finite, legends_of
from monai_saliency.visualize.pictures import PICTURE_FORMATS, plot_saliency, save_picture
from monai_saliency.visualize.report.kept_scan import KeptScan, kept_path

logger = logging.getLogger(__name__)

#: where a case holds the image ``(C, *spatial)`` on whose grid its maps lie, if that is not the scan's
GRID_KEY = "saliency_grid"
#: where a case that was drawn, or kept for a report, holds its label map on the grid of its map, ``(*spatial)``
LABEL_KEY = "label_on_map"


@dataclass(frozen=True)
class _Grid:
    """The grid that a map must lie on."""

    name: str
    shape: tuple[int, ...]
    affine: np.ndarray
    voxels: Callable[[], np.ndarray]
    header: nib.Nifti1Header | None = None
    drawn: np.ndarray | None = None

    @property
    def drawn_affine(self) -> np.ndarray:
        """The affine of pictures: a photograph without one has rows that count downwards."""
        return self.affine if self.drawn is None else self.drawn

    def holds(self, saliency: torch.Tensor) -> bool:
        """Whether a map ``(K, *spatial)`` lies on this grid, to a thousandth of a voxel or the rounding of files."""
        shape = tuple(saliency.shape[1:])
        if shape != self.shape[: len(shape)]:
            return False
        affine = _affine(saliency)
        # A slice of its own, where MONAI keeps the affine of two axes.
        own = to_affine_nd(len(affine) - 1, self.affine)
        voxel = min(nib.affines.voxel_sizes(self.affine).min(), 1)
        rounding = 1e-6 * np.abs(self.affine).max()
        return np.allclose(affine, own, rtol=0, atol=max(1e-3 * voxel, rounding))


@dataclass(frozen=True)
class _Shown:
    """The maps ``(K, *spatial)`` of a case, their standard errors, and what is shown under them."""

    case: str
    key: str
    grid: _Grid
    maps: np.ndarray
    scan: np.ndarray
    error: np.ndarray | None
    label: np.ndarray | None
    legends: list[Legend]

    @property
    def gray(self) -> np.ndarray:
        """The scan ``(*spatial)``: the mean of a photograph's colours, or the first volume of a scan."""
        spatial = self.maps.shape[1:]
        if self.scan.ndim > len(spatial) and self.grid.header is None:
            return self.scan.mean(axis=-1)
        return self.scan.reshape(*spatial, -1)[..., 0]


def _affine(image: torch.Tensor) -> np.ndarray:
    """The affine ``(4, 4)`` in mm of an image, of two axes ``(3, 3)`` in places; the identity for a plain tensor."""
    return affine_in_mm(image) if isinstance(image, MetaTensor) else np.eye(4)


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
    """The grid that MONAI gives a file that nibabel cannot read, such as a photograph or a DICOM series."""
    meta = saliency.meta if isinstance(saliency, MetaTensor) else {}
    known = MetaKeys.ORIGINAL_AFFINE in meta
    affine = np.asarray(meta[MetaKeys.ORIGINAL_AFFINE], dtype=np.float64) if known else np.eye(4)

    def voxels() -> np.ndarray:
        turn = bool(meta.get(TURNED))  # the reader of another bundle does not turn photographs
        image = load_image(3, turn, image_only=True, ensure_channel_first=True)(path)
        found, own = np.moveaxis(image.numpy(), 0, -1), image.affine.numpy()
        if not known or image.ndim != 4 or np.allclose(affine, own):
            return found
        # Another reader of a DICOM series may have turned and swapped its axes.
        return nib.apply_orientation(found, nib.io_orientation(np.linalg.inv(affine) @ own))

    return _Grid(
        "the image's grid as MONAI reads it",
        tuple(np.asarray(meta.get(MetaKeys.SPATIAL_SHAPE, ())).astype(int).tolist()),
        affine,
        voxels,
        drawn=None if known else np.diag([1.0, -1.0, 1.0, 1.0]),
    )


def _image_grid(image: torch.Tensor) -> _Grid:
    """An image's own grid."""
    return _Grid(
        "the network's input",
        tuple(image.shape[1:]),
        to_affine_nd(3, _affine(image)),
        lambda: np.moveaxis(image.numpy(force=True), 0, -1).astype(np.float32),
    )


class SaveSaliencyd(MapTransform):
    """Writes maps as NIfTI files on the scan's own grid, and a picture of each.

    For an item whose ``case`` is ``folder/stem`` the files are ``<output_dir>/folder/stem_<key>.nii.gz`` and ``.png``
    (or ``.svg``). An item without a ``case`` gets the name of its scan's file, with a hash of the file's path.

    The NIfTI file is float32, ``(*spatial)`` or ``(*spatial, K)`` for several maps, with the scan's own header (affine,
    sform and qform codes, units). Its intent is ``estimate`` under the key's name, and ``cal_min`` and ``cal_max`` end
    at the largest absolute value: the window that viewers such as FSLeyes show at first. Give it a diverging colour map
    there. Each file is written completely or not at all. The item gets the key ``<key>_path`` with the path of the
    NIfTI file.

    Files of the case from an earlier run under these keys are removed, unless they are written again.

    Place it after ``Invertd``: a map whose shape or affine is not the scan's is refused. An item with an image under
    ``"saliency_grid"`` has its maps saved on the grid of this image instead of the scan's file. A step that moves
    voxels without recording it, such as a flip or an exchange of equal axes in a ``Lambdad``, is not noticed: use
    MONAI's own transforms, such as ``Flipd``. For a file that nibabel cannot read, such as a photograph, the grid is
    the one that MONAI gives it: the first axis counts the columns.

    Pictures of a cohort have one scale: the score's own range where the item has its ``"explanation"`` or the map is of
    :class:`Saliencyd`, and the target knows the range (1 for a probability), or ``scale``. Without either, each case
    has its own scale, with a note in the picture. A picture uses the standard error of the map (``"standard_error"``
    for ``"saliency"``, else ``"<key>_standard_error"``) if it lies on the same grid, else the explanation's noise.

    Args:
        keys: the keys of the maps ``(K, *spatial)``, in the score's unit.
        output_dir: the output folder.
        picture: whether to draw a picture too.
        allow_missing_keys: whether items may lack a key.
        scale: the largest absolute value of the pictures' colour bar, in the map's unit; see above.
        report: whether to keep, in ``views/`` below the output folder, what a report shows under the maps.
        picture_format: of the pictures, ``"png"`` or ``"svg"``.
        class_names: the names of classes for the report, by number or in order.

    Raises:
        ValueError: when ``scale`` is not a number above 0, ``picture_format`` is another one, or ``class_names`` is one
            text.
        CaseError: when called, if a map's shape or affine differs from the grid's, if it has become zero on the way,
            if the scan's file is unknown, or if the case's name leads out of the output folder.

    Example::

        >>> import numpy as np
        >>> import nibabel as nib
        >>> from monai.transforms import LoadImage
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     nib.save(nib.Nifti1Image(np.zeros((4, 5, 6)), np.eye(4)), f"{folder}/scan.nii.gz")
        ...     scan = LoadImage(ensure_channel_first=True)(f"{folder}/scan.nii.gz")
        ...     save = SaveSaliencyd("saliency", f"{folder}/maps", picture=False)
        ...     item = save({"saliency": scan + 1, "case": "scan"})
        ...     nib.load(item["saliency_path"]).shape
        (4, 5, 6)
    """

    __repr__ = written

    def __init__(
        self,
        keys: KeysCollection,
        output_dir: str | Path,
        picture: bool = True,
        allow_missing_keys: bool = False,
        scale: float | None = None,
        report: bool = False,
        picture_format: str = "png",
        class_names: Mapping[Any, str] | Sequence[str] | None = None,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.report = flag("report", report)
        positive_numbers("scale", 1 if scale is None else scale)
        self.scale = scale
        self.output_dir = a_path("output_dir", output_dir)
        self.picture = flag("picture", picture)
        if self.picture or self.report:
            require("matplotlib", "bundle")  # before a map is computed that cannot be drawn
        self.picture_format = check_option("picture_format", picture_format, PICTURE_FORMATS)
        names = class_names or {}
        if isinstance(names, str):
            raise ValueError(f"`class_names` must be names by class, such as {{0: healthy}}, or a list, got {names!r}")
        named = names.items() if isinstance(names, Mapping) else enumerate(names)
        self.class_names = {str(label): str(name) for label, name in named}

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        keys = [*self.key_iterator(d)]
        if not keys and "case" not in d:
            return d
        if keys:
            d.setdefault("case", scan_name(d[keys[0]]))
        case, written = str(d["case"]), []
        for key in keys:
            grid = self._grid(d, key)
            _check_place(case, d[key], grid)
            maps = d[key].detach().cpu().numpy().astype(np.float32)
            _check_kept(case, str(key), maps, d.get("explanation"))
            path = self._path(case, key, "nii.gz")
            with atomic_path(path) as temporary:
                nib.save(_on_grid(grid, maps, str(key)), temporary)
            d[f"{key}_path"] = str(path)
            written.append(path)
            if self.picture or self.report:
                shown = self._shown(d, key, grid, maps)
                d |= {} if shown.label is None else {LABEL_KEY: shown.label}
                if self.picture:
                    written.append(self._draw(shown, str(d.get("title", case)), _labels(d.get("explanation"))))
                if self.report:
                    self._keep(shown)
        self._remove(case, written)
        return d

    def _shown(self, data: Mapping[Hashable, Any], key: Hashable, grid: _Grid, maps: np.ndarray) -> _Shown:
        """A case's maps ``(K, *spatial)``, which lie on the grid, with what is shown of them."""
        case = str(data["case"])
        error = data.get(error_key(str(key)))
        errors = None
        if isinstance(error, torch.Tensor) and tuple(error.shape) == maps.shape and grid.holds(error):
            errors = error.numpy(force=True)
        # A map that is not on its scan may have been moved in a way that no affine records.
        label = None if GRID_KEY in data else _label(case, data.get("label"), grid, data[key])
        legends = legends_of(data.get("explanation"), maps, self.scale, data.get(f"{key}_legends", ""))
        return _Shown(case, str(key), grid, maps, grid.voxels(), errors, label, legends)

    def _draw(self, shown: _Shown, title: str, labels: list[str] | None) -> Path:
        """Draw the maps of a case, and return the file."""
        figure = plot_saliency(
            shown.gray,
            shown.maps,
            shown.grid.drawn_affine,
            title=title,
            labels=labels,
            standard_error=shown.error,
            label=shown.label,
            legends=shown.legends,
        )
        path = self._path(shown.case, shown.key, self.picture_format)
        with atomic_path(path) as temporary:
            save_picture(figure, temporary, self.picture_format)
        return path

    def _keep(self, shown: _Shown) -> None:
        """Keep what a report shows under the maps."""
        grid, maps, is_flat = shown.grid, shown.maps, shown.maps.ndim == 3
        is_colour = grid.header is None and is_flat and shown.scan.shape[2:] == (3,)
        kept = KeptScan.of(
            shown.case,
            shown.scan if is_colour else shown.gray,
            maps,
            grid.affine,
            shown.legends,
            shown.label,
            key=shown.key,
            layers=len(maps) if shown.error is None else 2 * len(maps),
            rows_down=bool(is_flat and grid.drawn_affine[1, 1] < 0),
            class_names=self.class_names,
        )
        kept.save(self.output_dir)

    def withdraw(self, case: str) -> None:
        """Remove a case's maps and pictures, which an earlier run may have written."""
        self._remove(case, ())
        _unlink(kept_path(self.output_dir, case))

    def _remove(self, case: str, written: Collection[Path]) -> None:
        """Remove files of a case that an earlier run has written, and this one has not."""
        for key in self.keys:
            for ending in ("nii.gz", *PICTURE_FORMATS):
                path = self._path(case, key, ending)
                if path not in written:
                    _unlink(path)

    def _path(self, case: str, key: Hashable, ending: str) -> Path:
        return case_file(self.output_dir, case, f"_{key}.{ending}")

    def _grid(self, data: Mapping[Hashable, Any], key: Hashable) -> _Grid:
        """The grid that a case's map must lie on."""
        if GRID_KEY in data:
            return _image_grid(data[GRID_KEY])
        if not Path(case_name(data[key])).exists():
            raise CaseError(
                str(data["case"]),
                f"the scan of the map {key!r} is not known: the map must be a MetaTensor whose `filename_or_obj` is "
                "the scan's file, as Saliencyd returns for a scan of LoadImaged with monai.data.set_track_meta(True)",
            )
        return _scan_grid(data[key])


def lies_on_scan(saliency: torch.Tensor) -> bool:
    """Whether a map ``(K, *spatial)`` lies on the grid of the scan's file in its meta data."""
    return Path(case_name(saliency)).exists() and _scan_grid(saliency).holds(saliency)


def _check_place(case: str, saliency: torch.Tensor, grid: _Grid) -> None:
    """Refuse a map ``(K, *spatial)`` that does not lie on a grid."""
    if not grid.holds(saliency):
        raise CaseError(
            case,
            f"the map of shape {tuple(saliency.shape[1:])}, affine {_affine(saliency).round(3).tolist()}, does "
            f"not lie on {grid.name} {grid.shape[: saliency.ndim - 1]}, {grid.affine.round(3).tolist()}, so it "
            "is not saved: invert it with Invertd(transform=<the preprocessing>, orig_keys=<the image>, "
            "nearest_interp=False) first",
        )


def _check_kept(case: str, key: str, maps: np.ndarray, explanation: Explanation | None) -> None:
    """Refuse maps ``(K, *spatial)`` that are zero now and were not when they were made."""
    if explanation is None or key.endswith((error_key("saliency"), "disagreement")):
        return
    for before, now in zip(explanation.saliency, maps, strict=False):
        if bool(before.any()) and not now.any():
            words = "what it shows lies outside of the scan, in padding, or the preprocessing's inverse has lost it"
            raise CaseError(case, f"a map that was not zero is zero on the scan, so it is not saved: {words}")


def _labels(explanation: Explanation | None) -> list[str] | None:
    """The labels of the maps in the picture, if each channel or fill has one; else the title is enough."""
    if explanation is None or explanation.masks is None or explanation.masks.channels is None:
        return None
    layer = explanation.masks.layer
    return [f"saliency of {layer} {place} for {label}" for label, place, _ in explanation.explained]


def _unlink(path: Path) -> None:
    """Remove an old file, if it is there and nobody has it open."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is of an earlier run, and cannot be removed: %s", path, error)


def _label(case: str, path: Any, grid: _Grid, saliency: torch.Tensor) -> np.ndarray | None:
    """A case's label on the grid of its map ``(*spatial)``; None without a readable label."""
    if not isinstance(path, (str, Path)) or not os.path.isfile(path):
        return None
    try:
        values, affine = load_label(path, saliency)
        return on_grid(values[0], affine, grid.shape[: saliency.ndim - 1], grid.affine)
    except Exception as error:  # a map must not be lost for its outline
        logger.warning(
            "case %s: its label %s cannot be used, so the picture does not outline it: %s", case, path, error
        )
        return None


def _on_grid(grid: _Grid, maps: np.ndarray, key: str) -> nib.Nifti1Image:
    """Maps ``(K, *spatial)`` as an image on a grid, with the scan's header where it is NIfTI."""
    header = grid.header or nib.Nifti1Header()
    # The scan's own, in its own unit.
    affine = grid.affine if grid.header is None else header.get_best_affine()
    image = nib.Nifti1Image(maps[0] if len(maps) == 1 else np.moveaxis(maps, 0, -1), affine, header)
    header = image.header
    header.set_data_dtype(np.float32)
    header.set_slope_inter(1, 0)
    if grid.header is None:
        header.set_xyzt_units("mm")
    known = finite(maps)
    header["cal_max"] = np.abs(known).max()
    header["cal_min"] = -header["cal_max"] if known.min() < 0 else 0
    header.set_intent("estimate", name=key.encode("ascii", "replace").decode()[:15])  # bytes that the header has
    return image
