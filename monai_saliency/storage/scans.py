"""Read scans and photographs by MONAI's reader of each format, and check what a file's header says of its voxels.

NIfTI is read in mm, whatever unit its header counts in. NRRD and MetaImage are always read with ITK: pynrrd mistakes
spaces other than LPS that are written in short.
Photographs are always read with Pillow, so that they lie the same way whether ITK is installed or not.
"""

from __future__ import annotations

import functools
import gzip
import logging
import os
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import nibabel as nib
import numpy as np
import torch
from monai.data import ImageReader, ITKReader, MetaTensor, NibabelReader, PILReader
from monai.transforms import LoadImage, LoadImaged
from monai.utils import MetaKeys, SpaceKeys, ensure_tuple
from nibabel.spatialimages import SpatialImage

from monai_saliency.cases import case_name, image_file
from monai_saliency.errors import AdviceError
from monai_saliency.storage.dicom import holds_series, read_series, series_files
from monai_saliency.utils.affines import apart, convert_to_mm, file_affine, mm_per_unit
from monai_saliency.utils.arguments import require

__all__ = [
    "JPEG",
    "NIFTI",
    "TURNED",
    "ScanReader",
    "case_id",
    "check_readers",
    "format_of",
    "header_problem",
    "is_photograph",
    "load_image",
    "load_scan",
    "name_hash",
    "scan_loader",
    "scan_name",
    "scan_stem",
]

logger = logging.getLogger(__name__)

TURNED = "turned_by_exif"  # in the meta data of a photograph: whether it is turned, as its file asks viewers to do

_ORIENTATION = 274  # the tag of EXIF


@dataclass(frozen=True)
class Format:
    """A file format: its suffixes (longest first), and the package and extra that read it."""

    suffixes: tuple[str, ...]
    module: str
    extra: str
    is_photograph: bool = False


NIFTI = Format((".nii.gz", ".nii"), "nibabel", "")
JPEG = Format((".jpg", ".jpeg"), "PIL", "pillow", True)
FORMATS = (
    NIFTI,
    Format((".nrrd", ".nhdr"), "itk", "itk"),
    Format((".mha", ".mhd"), "itk", "itk"),
    Format((".png",), "PIL", "pillow", True),
    JPEG,
    Format((".tif", ".tiff"), "PIL", "pillow", True),
)


def format_of(path: str | Path) -> Format | None:
    """The format of a file by its suffix; None if the suffix is unknown."""
    name = Path(path).name.lower()
    for known in FORMATS:
        if name.endswith(known.suffixes):
            return known
    return None


def is_photograph(path: Any) -> bool:
    """Whether the format of a file is a photograph's."""
    known = format_of(path)
    return known is not None and known.is_photograph


def scan_stem(path: str | Path) -> str:
    """The file name of a scan without ``.nii.gz`` or another suffix."""
    name = Path(path).name
    for suffix in NIFTI.suffixes:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return Path(path).stem


def case_id(root: Path | None, image: Path) -> str:
    """The name of a case: the path of its scan below a folder, without its suffix; elsewhere its file's name, with a
    hash of its path, which keeps equal file names apart.
    """
    # Links are not followed: the target of a data manager's link has an arbitrary name.
    path = Path(os.path.abspath(image))
    folder = None if root is None else Path(os.path.abspath(root))
    if folder is not None and folder in path.parents:
        return (path.relative_to(folder).parent / scan_stem(path)).as_posix()
    return f"{scan_stem(path)}-{name_hash(str(path))}"


def scan_name(images: torch.Tensor, index: int = 0) -> str:
    """The name of a case without one: of its file, or its place in the batch ``(B, C, *spatial)``."""
    file = image_file(images, index)
    return case_name(images, index) if file is None else case_id(None, Path(file))


def name_hash(name: str) -> str:
    """Eight hexadecimal digits that tell names apart, also those that are not UTF-8."""
    return sha256(os.fsencode(name)).hexdigest()[:8]


def check_readers(paths: Iterable[str | Path]) -> None:
    """Refuse files whose reader is not installed."""
    for known in set(map(format_of, paths)):
        if known is not None:
            require(known.module, known.extra)


class ScanReader(ImageReader):
    """Reads NIfTI scans with MONAI's ``NibabelReader``, their affines in mm, NRRD and MetaImage scans with its
    ``ITKReader``, photographs with its ``PILReader``, and DICOM series.

    Args:
        channels: 1 or 3 for photographs in gray or in colours; None as they are.
        turn: whether photographs are turned by their EXIF orientation, as viewers do.
    """

    def __init__(self, channels: int | None = None, turn: bool = True) -> None:
        super().__init__()
        self.channels = channels
        self.turn = turn

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether all of these files are of a format that is read here."""
        names = ensure_tuple(filename)
        return all(format_of(name) is not None for name in names) or _is_series(names)

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> tuple[ImageReader, Any]:
        """Read files: MONAI's reader of their format, and its result; this reader and the volume for a series."""
        names = ensure_tuple(data)
        if _is_series(names):
            files = names if len(names) > 1 else series_files(names[0])
            if len({Path(file).parent for file in files}) > 1:  # the first file alone is known later on
                raise AdviceError("the files of the DICOM series lie in several folders: put them into one")
            return self, read_series(files)
        check_readers(names[:1])
        reader = self._reader(names[0])
        return reader, reader.read(data, **kwargs)

    def get_data(self, img: tuple[ImageReader, Any]) -> tuple[np.ndarray, dict]:
        """The voxels ``(*spatial)`` or ``(*spatial, channels)`` and the meta data of a result of :meth:`read`."""
        reader, content = img
        if isinstance(content, MetaTensor):
            return content.numpy(), _meta_of(content)
        data, meta = reader.get_data(content)
        if isinstance(reader, NibabelReader):
            convert_to_mm(meta, str(reader.filenames[0]))
        if isinstance(reader, PILReader):
            meta[TURNED] = self.turn
            if self.channels == 3 and data.ndim == 2:  # which Pillow would cut to 8 bits
                data = np.stack([data] * 3, axis=-1)
                meta[MetaKeys.ORIGINAL_CHANNEL_DIM] = -1
        return data, meta

    def _reader(self, name: Any) -> ImageReader:
        """MONAI's reader of a file's format."""
        if format_of(name) is NIFTI:
            return NibabelReader()
        return PILReader(converter=self._converted) if is_photograph(name) else ITKReader()

    def _converted(self, image: Any) -> Any:
        """A Pillow image in gray or in colours, turned as viewers show it."""
        if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:  # a camera's JPEG holds a preview too
            raise AdviceError(f"the file holds {image.n_frames} pictures, 1 is expected: split it into single pictures")
        if self.turn and image.getexif().get(_ORIENTATION) in range(2, 9):
            _say_turned(image.filename)
        # Else Pillow (13.0) maps a gray TIFF into memory by the shape that it has once it is turned, which load() does.
        image.filename = ""
        image.load()
        if self.turn:
            require("PIL.ImageOps", "pillow").exif_transpose(image, in_place=True)
        is_gray = image.mode in ("L", "I", "F") or image.mode.startswith("I;16")
        if self.channels not in (1, 3) or is_gray:
            return image
        has_colours = image.mode not in ("1", "LA", "La")
        return image.convert("RGB" if self.channels == 3 and has_colours else "L")


def _is_series(names: Sequence[Any]) -> bool:
    return bool(names) and format_of(names[0]) is None and holds_series(names[0])


def _meta_of(volume: MetaTensor) -> dict:
    """The meta data of a DICOM series' volume, as MONAI's readers give them."""
    affine = volume.affine.numpy()
    return {
        MetaKeys.SPACE: SpaceKeys.RAS,
        MetaKeys.AFFINE: affine,
        MetaKeys.ORIGINAL_AFFINE: affine.copy(),
        MetaKeys.SPATIAL_SHAPE: np.array(volume.shape),
        MetaKeys.ORIGINAL_CHANNEL_DIM: float("nan"),
    }


@functools.cache
def _say_turned(file: str) -> None:
    logger.warning("%s is turned by its EXIF orientation, as viewers show it", file)


def load_image(channels: int | None = None, turn: bool = True, **settings: Any) -> LoadImage:
    """MONAI's ``LoadImage`` for all formats of this module; for ``channels`` and ``turn`` see :class:`ScanReader`."""
    return _with_reader(LoadImage, ScanReader(channels, turn), **settings)


def scan_loader(keys: Any, channels: int | None = None, **settings: Any) -> LoadImaged:
    """MONAI's ``LoadImaged`` for all formats of this module; ``channels`` is an argument of :class:`ScanReader`.

    Example::

        preprocessing = Compose([scan_loader("image", dtype="float32"), EnsureChannelFirstd("image")])
    """
    return _with_reader(LoadImaged, ScanReader(channels), keys=keys, **settings)


def _with_reader(kind: Any, reader: ScanReader, **settings: Any) -> Any:
    """A loader of MONAI with our reader."""
    # Where pydicom is installed, MONAI (1.6) reports for each of its loaders that a decoder on the GPU is missing.
    warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader: nvImageCodec decoder plugin did not register")
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    loader = kind(**settings)
    loader.register(reader)
    return loader


def damage_of(path: str | Path) -> str:
    """Why a gzip file is not as it was written, in words; "" where it is, or is no gzip file. Its checksum, which
    nibabel does not reach, lies at its end.
    """
    if Path(path).suffix.lower() != ".gz":
        return ""
    try:
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error) as error:
        return f"its file {path} is damaged ({error}): copy it again, or make it anew"
    return ""


def load_scan(path: str | Path) -> SpatialImage:
    """A scan or label map with its header, and its affine in mm. Its voxels are read when they are used."""
    scan = cast(SpatialImage, nib.load(path))
    if isinstance(scan, nib.Nifti1Pair):
        scan.affine[:3] *= mm_per_unit(dict(scan.header))
    return scan


def header_problem(image: torch.Tensor) -> str | None:
    """Why the file of a scan or label map ``(C, *spatial)`` is damaged or gives its voxels no place; None otherwise."""
    path = Path(case_name(image))
    scan = load_scan(path) if format_of(path) is NIFTI and path.is_file() else None
    if image.is_complex() or (scan is not None and scan.get_data_dtype().kind == "c"):
        return "its voxels are complex numbers: save their magnitude, or the part that the network is for, as a scan"
    if scan is not None and (damage := damage_of(path)):
        return damage
    if not isinstance(image, MetaTensor):
        return None
    # MONAI's reader replaces affines that it does not accept.
    affine = np.asarray(image.affine if scan is None else scan.affine)
    axes = affine[:-1, : min(image.ndim - 1, 3)]
    sizes = np.linalg.norm(axes, axis=0)
    # Relative to the voxel sizes, so that small voxels are not taken for singular; false for NaN.
    if not np.isfinite(affine).all() or not np.linalg.det(axes.T @ axes) > 1e-12 * np.prod(sizes) ** 2:
        return (
            f"its affine {np.round(affine, 4).tolist()} is singular or not finite, so its voxels have no place in "
            "the scanner: correct the file's header"
        )
    # MONAI takes the qform for a sform that does not fit the voxel sizes that the header lists.
    off = 0.0 if scan is None else apart(scan.shape, affine, file_affine(image.meta, affine))
    if off > 0.1 * min(sizes):
        return (
            f"its sform and the qform that MONAI reads put voxels up to {off:.3g} mm apart, so its place in the "
            "scanner is not known: correct the file's header, in nibabel by `scan.set_qform(scan.affine)` if the "
            "sform is right"
        )
    return None
