"""The formats of scans and photographs, and MONAI's reader of each.

NRRD and MetaImage are always read with ITK: pynrrd mistakes spaces other than LPS that are written in short.
Photographs are always read with Pillow, so that they lie the same way whether ITK is installed or not.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from monai.data import ImageReader, ITKReader, MetaTensor, PILReader
from monai.transforms import LoadImage, LoadImaged
from monai.utils import MetaKeys, OptionalImportError, SpaceKeys, ensure_tuple

from monai_saliency.errors import AdviceError
from monai_saliency.storage.dicom import holds_series, read_series, series_files
from monai_saliency.storage.files import load_scan
from monai_saliency.utils.arguments import require

__all__ = ["ScanReader", "check_readers", "format_of", "load_image", "load_label", "scan_loader", "scan_stem"]

# Where pydicom is installed, MONAI (1.6) reports for each of its loaders that a decoder on the GPU is missing.
warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader: nvImageCodec decoder plugin did not register")
logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Format:
    """A file format: its name in errors, its suffixes (longest first), and the package and extra that read it."""

    name: str
    suffixes: tuple[str, ...]
    module: str = ""
    extra: str = ""
    is_photograph: bool = False


NIFTI = Format("NIfTI scan", (".nii.gz", ".nii"))
FORMATS = (
    NIFTI,
    Format("NRRD scan", (".nrrd", ".nhdr"), "itk", "itk"),
    Format("MetaImage scan", (".mha", ".mhd"), "itk", "itk"),
    Format("PNG picture", (".png",), "PIL", "pillow", True),
    Format("JPEG picture", (".jpg", ".jpeg"), "PIL", "pillow", True),
    Format("TIFF picture", (".tif", ".tiff"), "PIL", "pillow", True),
)


def format_of(path: str | Path) -> Format | None:
    """The format of a file by its suffix; None where it is none of ours."""
    name = Path(path).name.lower()
    return next((each for each in FORMATS if name.endswith(each.suffixes)), None)


def scan_stem(path: str | Path) -> str:
    """The file name of a scan without ``.nii.gz`` or another suffix."""
    name = Path(path).name
    return next((name[: -len(suffix)] for suffix in NIFTI.suffixes if name.lower().endswith(suffix)), Path(path).stem)


def check_readers(paths: Iterable[str | Path]) -> None:
    """Refuse files whose reader is not installed."""
    for each in {format_of(path) for path in paths} - {None, NIFTI}:
        if importlib.util.find_spec(each.module) is None:  # type: ignore[union-attr]
            raise OptionalImportError(_missing(each))  # type: ignore[arg-type]


def _missing(file_format: Format) -> str:
    suffixes = " and ".join(f"*{suffix}" for suffix in file_format.suffixes)
    return (
        f"{suffixes} files are read with {file_format.module}, which is not installed: "
        f'pip install "monai-saliency[{file_format.extra}]"'
    )


class ScanReader(ImageReader):
    """Reads NRRD and MetaImage scans with MONAI's ``ITKReader``, photographs with its ``PILReader``."""

    def __init__(self, channels: int | None = None) -> None:
        super().__init__()
        self.channels = channels

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """Whether all of these files are of a format that is read here."""
        names = ensure_tuple(filename)
        return all(format_of(name) not in (None, NIFTI) for name in names) or _is_series(names)

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> tuple[ImageReader, Any]:
        """Read files: MONAI's reader of their format, and its result; this reader and the volume for a series."""
        names = ensure_tuple(data)
        if _is_series(names):
            return self, read_series(_one_folder(names if len(names) > 1 else series_files(names[0])))
        found = format_of(names[0])
        if found is None:
            raise ValueError(f"{data} is none of {', '.join(each.name for each in FORMATS[1:])}")
        require(found.module, found.extra)
        reader: ImageReader = PILReader(converter=self._converted) if found.is_photograph else ITKReader()
        return reader, reader.read(data, **kwargs)

    def get_data(self, img: tuple[ImageReader, Any]) -> tuple[np.ndarray, dict]:
        """The voxels ``(*spatial)`` or ``(*spatial, channels)`` and the meta data of a result of :meth:`read`."""
        reader, content = img
        if isinstance(content, MetaTensor):
            affine = content.affine.numpy()
            return content.numpy(), {
                MetaKeys.SPACE: SpaceKeys.RAS,
                MetaKeys.AFFINE: affine,
                MetaKeys.ORIGINAL_AFFINE: affine.copy(),
                MetaKeys.SPATIAL_SHAPE: np.array(content.shape),
                MetaKeys.ORIGINAL_CHANNEL_DIM: float("nan"),
            }
        data, meta = reader.get_data(content)
        if isinstance(reader, PILReader) and self.channels == 3 and data.ndim == 2:  # which Pillow would cut to 8 bits
            data = np.stack([data] * 3, axis=-1)
            meta[MetaKeys.ORIGINAL_CHANNEL_DIM] = -1
        return data, meta

    def _converted(self, image: Any) -> Any:
        """A Pillow image in gray or in colours."""
        if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:  # a camera's JPEG holds a preview too
            raise AdviceError(f"the file holds {image.n_frames} pictures, 1 is expected: split it into single pictures")
        image.load()  # a TIFF that lies on its side is turned here, and has its shape only then
        if self.channels not in (1, 3) or image.mode in ("L", "I", "F") or image.mode.startswith("I;16"):
            return image
        if image.mode in ("1", "LA", "La"):
            return image.convert("L")
        return image.convert("RGB" if self.channels == 3 else "L")


def _is_series(names: Sequence[Any]) -> bool:
    return bool(names) and format_of(names[0]) is None and holds_series(names[0])


def _one_folder(files: Sequence[Any]) -> Sequence[Any]:
    """Files of a series, whose first one alone is known later on."""
    folders = {Path(file).parent for file in files}
    if len(folders) > 1:
        raise AdviceError(
            f"the files of the DICOM series lie in {len(folders)} folders, 1 is expected: put them into one, or remove "
            "the copies"
        )
    return files


def load_image(channels: int | None = None, **settings: Any) -> LoadImage:
    """MONAI's ``LoadImage`` for all formats of this module; ``channels`` is an argument of :class:`ScanReader`."""
    loader = LoadImage(**settings)
    loader.register(ScanReader(channels))
    return loader


def scan_loader(keys: Any, channels: int | None = None, **settings: Any) -> LoadImaged:
    """MONAI's ``LoadImaged`` for all formats of this module.

    Example::

        preprocessing = Compose([scan_loader("image", dtype="float32"), EnsureChannelFirstd("image")])

    Args:
        keys: the keys of the files.
        channels: as for :class:`ScanReader`.
        settings: of ``LoadImaged``.
    """
    loader = LoadImaged(keys, **settings)
    loader.register(ScanReader(channels))
    return loader


def load_label(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """The voxels of a label map and where they lie, from a file of any format of this module."""
    try:
        label = load_scan(path)
    except nib.filebasedimages.ImageFileError:
        image = load_image(image_only=True, ensure_channel_first=True)(path)
        return image.numpy().any(axis=0), image.affine.numpy()
    return np.asanyarray(label.dataobj), label.affine
