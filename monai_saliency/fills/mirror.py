"""The other side of the midplane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.fills.base import CaseFill
from monai_saliency.utils.arguments import whole_number

# The midplane is looked for in this share of the image's size on each side of its middle.
_NEAR_THE_MIDDLE = 0.1
_VOXELS = 2**20


class MirrorFill(CaseFill):
    """The image, mirrored at the midplane: for anatomy that is the same on the left and the right, such as the brain.

    The midplane is the plane, at most a tenth of the size from the middle, about which the image is most symmetric
    (least mean squared difference). A hidden voxel takes the value of its counterpart on the other side. What is as
    abnormal there does not show. Beyond the image's border the voxel at the border is repeated.

    Args:
        axis: the spatial axis from left to right, from 0. By default the one that the image's affine turns most nearly
            to the x axis of the scanner (at most 45 degrees off).

    Raises:
        ValueError: for an axis out of range, and from :meth:`bind`, when ``axis`` is not given and the image has no
            affine or no axis from left to right, such as a sagittal slice.

    Example::

        >>> import torch
        >>> from monai_saliency.cases import Case
        >>> image = torch.tensor([[[1.0, 2.0, 9.0, 3.0, 1.0]]])
        >>> MirrorFill(axis=1).bind(Case("a", image))(image[None]).tolist()
        [[[[1.0, 3.0, 9.0, 2.0, 1.0]]]]
    """

    def __init__(self, axis: int | None = None) -> None:
        self.axis = None if axis is None else whole_number("axis", axis, 0)

    def bind(self, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
        dims = case.image.ndim - 1
        axis = _left_right(case.affine, dims) if self.axis is None else self.axis
        if axis >= dims:
            raise ValueError(f"`axis` must be below {dims}, the number of spatial axes, got {axis}")
        total = _most_symmetric(case.image, axis)
        return lambda images: _mirrored(images, axis + 2, total)


def _left_right(affine: np.ndarray | None, dims: int) -> int:
    """The spatial axis from left to right."""
    if affine is None:
        raise ValueError(
            "MirrorFill needs the image's affine to know left and right: explain a MetaTensor (LoadImaged makes one), "
            "or give `axis`"
        )
    along_x = np.abs(affine[0, :dims]) / np.linalg.norm(affine[:-1, :dims], axis=0)
    if along_x.max() < np.sqrt(0.5):
        raise ValueError(
            "by its affine no axis of the image goes from left to right: take another fill, or give `axis`"
        )
    return int(along_x.argmax())


def _mirrored(images: torch.Tensor, axis: int, total: int) -> torch.Tensor:
    """Voxel i along an axis takes the value of voxel ``total - i``."""
    size = images.shape[axis]
    return images.index_select(axis, (total - torch.arange(size, device=images.device)).clamp(0, size - 1))


def _most_symmetric(image: torch.Tensor, axis: int) -> int:
    """Twice the place of the plane about which an image ``(C, *spatial)`` is most symmetric."""
    size = image.shape[axis + 1]
    rows = image.movedim(axis + 1, -1).reshape(-1, size)
    step = rows.numel() // _VOXELS | 1
    rows = rows[::step].double().nan_to_num(0, 0, 0)

    def asymmetry(total: int) -> tuple[float, int]:
        from_the_middle = abs(total - (size - 1))
        difference = rows - _mirrored(rows, 1, total)
        return float(difference.square().mean()), from_the_middle

    reach = int(2 * _NEAR_THE_MIDDLE * size)
    return min(range(size - 1 - reach, size + reach), key=asymmetry)
