"""nnU-Net's reader of photographs as a MONAI reader."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from monai.data import ImageReader
from monai.transforms import LoadImaged
from monai.utils import MetaKeys, ensure_tuple

from monai_saliency.errors import AdviceError
from monai_saliency.storage.formats import format_of
from monai_saliency.utils.optional_imports import require

__all__ = ["NNUNetPhotographReader", "nnunet_photograph_loader"]


#: a tag of a TIFF
_ORIENTATION = 274


class NNUNetPhotographReader(ImageReader):
    """Reads photographs with nnU-Net's own ``NaturalImage2DIO``, so that a network gets the numbers it was trained on.

    As with MONAI's reader of photographs, the first axis counts the columns, and there is no affine. Colours become
    channels in the order of the file, an alpha channel becomes the fourth. Channels of several files follow each other.

    Raises:
        OptionalImportError: when nnU-Net is not installed. It gives the pip command.
        ValueError: when called, for files of one case that differ in size or in their number of colours, and for a TIFF
            that viewers turn.
    """

    def __init__(self) -> None:
        super().__init__()
        require("nnunetv2", extra="nnunet")
        # A cache keeps what these versions read.
        self.versions = [version(package) for package in ("nnunetv2", "scikit-image")]

    def verify_suffix(self, filename: Sequence[Any] | Any) -> bool:
        """True: other files get nnU-Net's own error."""
        return True

    def read(self, data: Sequence[Any] | Any, **kwargs: Any) -> np.ndarray:
        """Read the files of one case.

        Returns:
            nnU-Net's array ``(C, 1, rows, columns)``, float32.
        """
        files = [str(file) for file in ensure_tuple(data)]
        for file in files:
            _check_upright(file)
        module = require("nnunetv2.imageio.natural_image_reader_writer", extra="nnunet")
        try:
            array: np.ndarray = module.NaturalImage2DIO().read_images(files)[0]
        except RuntimeError as error:
            if str(error):
                raise
            raise AdviceError(
                f"its {len(files)} files differ in size or in their number of colours, which nnU-Net refuses: save "
                "them alike"
            ) from error
        return array

    def get_data(self, img: np.ndarray) -> tuple[np.ndarray, dict]:
        """The pixels ``(columns, rows, C)`` of what :meth:`read` gave, and the meta data."""
        data = np.ascontiguousarray(img[:, 0].transpose(2, 1, 0))
        return data, {MetaKeys.SPATIAL_SHAPE: np.asarray(data.shape[:2]), MetaKeys.ORIGINAL_CHANNEL_DIM: -1}


def _check_upright(file: str) -> None:
    """Refuse a TIFF that viewers, and Pillow for the picture of a map, turn by its tag, which nnU-Net ignores."""
    found = format_of(file)
    if found is None or ".tif" not in found.suffixes:
        return
    with require("PIL.Image", "pillow").open(file) as image:
        orientation = image.getexif().get(_ORIENTATION, 1)
    if orientation != 1:
        raise AdviceError(
            f"{file} lies on its side: its tag `Orientation` is {orientation}, by which viewers turn it and nnU-Net "
            "does not. Save it upright, if the model was trained on such pictures"
        )


def nnunet_photograph_loader(keys: Any, **settings: Any) -> LoadImaged:
    """MONAI's ``LoadImaged`` for photographs of an nnU-Net model.

    Args:
        keys: the keys of the files.
        settings: of ``LoadImaged``.
    """
    loader = LoadImaged(keys, **settings)
    loader.register(NNUNetPhotographReader())
    return loader
