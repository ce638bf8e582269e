"""Cases: one image under explanation, its name, its file, its voxel sizes and its label map."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor
from monai.utils import ImageMetaKey

from monai_saliency.errors import CaseError
from monai_saliency.utils.affines import image_affine, image_spacing
from monai_saliency.utils.arguments import written
from monai_saliency.utils.tensors import Box, everywhere, plain, shape_in_words

__all__ = ["Case", "Number", "case_name", "cases_of", "image_file", "with_own_meta"]


class Number(NamedTuple):
    """A number of a case that masks hide: its value, and the baseline that is in its place where it is hidden."""

    value: float
    baseline: float


@dataclass(frozen=True)
class Case:
    """One image under explanation.

    Whoever asks for an explanation gives cases without an image; the inferer adds the image and its place in the batch.

    Attributes:
        name: the case's name in errors, tables and files.
        image: ``(C, *spatial)``, unperturbed, in the network's input space; empty until the inferer adds it.
        index: its place in the batch.
        labels: its label map ``(1, *spatial)`` on the image's grid, or, for targets of regions, with as many channels
            as the network's output; None without one.
        spacing: voxel sizes in mm, one per spatial axis, None where they are unknown.
        file: the file that the image was loaded from, None where it is unknown.
        prediction: what an evaluator's network gave for this image ``(1, ...)``, before any postprocessing: what is
            explained must be this. None where it is not known.
        affine: from voxels to scanner mm, ``(4, 4)`` or ``(3, 3)``; None where it is unknown.
        within: the part of the image that is perturbed, and has a map: a mask ``(1, *spatial)``, not 0 there, or a box
            ``(start, end)`` in voxels, as MONAI's ``generate_spatial_bounding_box`` gives it. Masks are 1 everywhere
            else, and the map and its standard error are 0. None, the default, for the whole image.

    Example::

        >>> import torch
        >>> case = Case("patient_7", labels=torch.ones(1, 4, 4, 4, dtype=torch.int64), spacing=(0.8, 0.8, 2.5))
        >>> case.name, case.spacing
        ('patient_7', (0.8, 0.8, 2.5))
    """

    __repr__ = written

    name: str
    image: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    index: int = 0
    labels: torch.Tensor | None = None
    spacing: Sequence[float] | None = None
    file: str | None = None
    prediction: Any = None
    affine: np.ndarray | None = None
    within: Any = None

    def __post_init__(self) -> None:
        if self.spacing is not None:  # may be an array or a tensor
            object.__setattr__(self, "spacing", tuple(map(float, self.spacing)))

    @staticmethod
    def of(images: torch.Tensor, index: int = 0, **given: Any) -> Case:
        """The case of one image of a batch, as far as the batch's meta data describe it.

        Args:
            images: ``(B, C, *spatial)``. A plain tensor gives neither file nor spacing.
            index: which image of the batch.
            given: attributes that are known better than by meta data, such as ``name`` and ``labels``.
        """
        images = with_own_meta(images)
        known = {"name": case_name(images, index), "index": index, **_of_meta(images, index)}
        return Case(**known | given)

    def with_image(self, image: torch.Tensor, index: int, images: torch.Tensor) -> Case:
        """The same case with its image ``(C, *spatial)``, which is image ``index`` of ``images``.

        Voxel sizes, file and affine are read from the meta data of ``images`` where they are not given. ``within`` is
        bool ``(1, *spatial)`` then.
        """
        missing = {name: value for name, value in _of_meta(images, index).items() if getattr(self, name) is None}
        within = None if self.within is None else self._part(image)
        return replace(self, image=image, index=index, within=within, **missing)

    def _part(self, image: torch.Tensor) -> torch.Tensor:
        """The voxels of ``within``, bool ``(1, *spatial)``."""
        part, shape = plain(self.within), (1, *image.shape[1:])
        if _is_box(part) and len(part[0]) == len(part[1]) == image.ndim - 1:
            box: Box = tuple(map(slice, *np.clip(part, 0, None).tolist()))
            part = torch.zeros(shape)
            part[everywhere(box)] = 1
        if not isinstance(part, (torch.Tensor, np.ndarray)) or part.shape != shape:
            words = f"`within` must be a mask {shape} on the image's grid, or a box (start, end) in its voxels"
            raise CaseError(self.name, f"{words}, got {part if _is_box(part) else shape_in_words(part)}")
        part = torch.as_tensor(part, device=image.device)
        if not torch.equal(part, part.round() if part.is_floating_point() else part):
            raise CaseError(self.name, "`within` has values between whole numbers: resample it by mode='nearest'")
        if not bool(part.any()):
            raise CaseError(self.name, "`within` has no voxel of the image, so there is nothing to explain")
        return part != 0


def _of_meta(images: torch.Tensor, index: int) -> dict[str, Any]:
    """The attributes of a case that the meta data of a batch describe; None for what they do not have."""
    return {
        "spacing": image_spacing(images, index),
        "file": image_file(images, index),
        "affine": image_affine(images, index),
    }


def _is_box(within: Any) -> bool:
    """Whether a part of an image is given as a box: where it starts and where it ends along each axis."""
    return isinstance(within, (list, tuple)) and len(within) == 2 and all(np.ndim(side) == 1 for side in within)


def cases_of(
    images: torch.Tensor,
    labels: Any = None,
    spacing: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    within: Any = None,
) -> list[Case]:
    """The cases of a batch ``(B, C, *spatial)``, of what is known of them.

    Args:
        images: their meta data give what is not given here.
        labels: label maps ``(B, 1, *spatial)``, or a list of B label maps ``(1, *spatial)``.
        spacing: voxel sizes in mm, one per spatial axis, of all images, or a list of B of them.
        names: B names.
        within: of each image the part that is perturbed: masks ``(B, 1, *spatial)``, a list of B masks or boxes, or one
            mask ``(1, *spatial)`` or box for all.
    """
    count = len(images)
    if _is_box(within) or (hasattr(within, "shape") and len(within.shape) == images.ndim - 1):
        within = [within] * count
    if spacing is not None and spacing[0] is not None and np.ndim(spacing[0]) == 0:
        spacing = [spacing] * count
    given: dict[str, Any] = {"labels": labels, "spacing": spacing, "names": names, "within": within}
    given = {name: values for name, values in given.items() if values is not None}
    for name, values in given.items():
        if len(values) != count:
            raise ValueError(f"`{name}` must have one entry for each of {count} images, got {len(values)}")
    if names is not None:
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"`names` must be a text for each image, got {names!r}")
        given["name"] = given.pop("names")
    cases = []
    for index in range(count):
        known = {name: values[index] for name, values in given.items()}
        cases.append(Case.of(images, index, **known))
    return cases


def case_name(images: torch.Tensor, index: int = 0) -> str:
    """A name for one image of a batch: its file where the meta data has one, else its place in the batch."""
    return image_file(images, index) or f"image {index} of the batch"


def image_file(images: torch.Tensor, index: int = 0) -> str | None:
    """The file that one image of a batch was loaded from; None where the meta data has none."""
    names = images.meta.get(ImageMetaKey.FILENAME_OR_OBJ) if isinstance(images, MetaTensor) else None
    if isinstance(names, (list, tuple)) and index < len(names):
        names = names[index]
    return names if isinstance(names, str) and names else None


def with_own_meta(images: torch.Tensor) -> torch.Tensor:
    """Images ``(B, ...)``; without meta data, and with a warning, if these are of the first image alone, as
    ``torch.stack`` leaves them.
    """
    count = len(images)
    if not isinstance(images, MetaTensor) or count == 1 or (images.is_batch and len(images.affine) == count):
        return images
    warnings.warn(
        f"a batch of {count} images has the affine and file of the first one only, as torch.stack leaves them. "
        "They are not used, so the maps have no affine: collate images by monai.data.list_data_collate",
        stacklevel=2,
    )
    return images.as_tensor()
