"""Cases: one image under explanation, its name, its file, its voxel sizes and its label map."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, InvertibleTransform
from monai.transforms.traits import RandomizableTrait
from monai.utils import ImageMetaKey, MetaKeys, TraceKeys

from monai_saliency.errors import CaseError
from monai_saliency.utils.arguments import written

__all__ = ["MOVING", "Case", "Number", "affine_in_mm", "case_name", "check_inversion", "convert_to_mm", "file_affine"]
__all__ += ["image_affine", "image_file", "image_spacing", "mm_per_unit", "with_own_meta"]

#: where MONAI's transforms that move voxels are
MOVING = ("monai.transforms.spatial.", "monai.transforms.croppad.")
_PROBE = 64  # voxels an axis: a whole CT takes 12 s
# In meta data: where the file's voxels are, and how many.
_FILE = MetaKeys.ORIGINAL_AFFINE, MetaKeys.SPATIAL_SHAPE
# By the code of `xyzt_units` in a NIfTI header: metres and micrometres. 2 means mm.
_MM_PER_UNIT = {1: 1000.0, 3: 0.001}


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
        labels: its label map ``(1, *spatial)`` on the image's grid, None without one.
        spacing: voxel sizes in mm, one per spatial axis, None where they are unknown.
        file: the file that the image was loaded from, None where it is unknown.
        prediction: what an evaluator's network gave for this image ``(1, ...)``, before any postprocessing: what is
            explained must be this. None where it is not known.
        affine: from voxels to scanner mm, ``(4, 4)`` or ``(3, 3)``; None where it is unknown.

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

    @staticmethod
    def of(images: torch.Tensor, index: int = 0, **given: Any) -> Case:
        """The case of one image of a batch, as far as the batch's meta data describe it.

        Args:
            images: ``(B, C, *spatial)``. A plain tensor gives neither file nor spacing.
            index: which image of the batch.
            given: attributes that are known better than by meta data, such as ``name`` and ``labels``.
        """
        images = with_own_meta(images)
        known: dict[str, Any] = {"name": case_name(images, index), "index": index}
        known |= {"spacing": image_spacing(images, index), "file": image_file(images, index)}
        known |= {"affine": image_affine(images, index)}
        return Case(**known | given)

    def with_image(self, image: torch.Tensor, index: int, images: torch.Tensor) -> Case:
        """The same case with its image ``(C, *spatial)``, which is image ``index`` of ``images``.

        Voxel sizes, file and affine are read from the meta data of ``images`` where they are not given.
        """
        spacing = self.spacing if self.spacing is not None else image_spacing(images, index)
        file = self.file if self.file is not None else image_file(images, index)
        affine = self.affine if self.affine is not None else image_affine(images, index)
        return replace(self, image=image, index=index, spacing=spacing, file=file, affine=affine)


def cases_of(
    images: torch.Tensor, labels: Any = None, spacing: Sequence[Any] | None = None, names: Sequence[str] | None = None
) -> list[Case]:
    """The cases of a batch ``(B, C, *spatial)``, of what is known of them.

    Args:
        images: their meta data give what is not given here.
        labels: label maps ``(B, 1, *spatial)``, or a list of B label maps ``(1, *spatial)``.
        spacing: voxel sizes in mm, one per spatial axis, of all images, or a list of B of them.
        names: B names.
    """
    count = len(images)
    sizes = [spacing] * count if spacing is None or isinstance(spacing[0], (int, float)) else spacing
    given = {"labels": labels, "spacing": sizes, "name": [names] if isinstance(names, str) else names}
    for name, values in given.items():
        if values is not None and len(values) != count:
            raise ValueError(f"`{name}` must have one entry for each of {count} images, got {len(values)}")
    known = {name: values for name, values in given.items() if values is not None}
    each = [{name: values[i] for name, values in known.items() if values[i] is not None} for i in range(count)]
    return [Case.of(images, i, **values) for i, values in enumerate(each)]


def case_name(images: torch.Tensor, index: int = 0) -> str:
    """A name for one image of a batch: its file where the meta data has one, else its place in the batch."""
    return image_file(images, index) or f"image {index} of the batch"


def image_file(images: torch.Tensor, index: int = 0) -> str | None:
    """The file that one image of a batch was loaded from; None where the meta data has none."""
    names = images.meta.get(ImageMetaKey.FILENAME_OR_OBJ) if isinstance(images, MetaTensor) else None
    if isinstance(names, (list, tuple)) and index < len(names):
        names = names[index]
    return names if isinstance(names, str) and names else None


def image_spacing(images: torch.Tensor, index: int = 0) -> tuple[float, ...] | None:
    """The voxel sizes in mm, one per spatial axis, of one image of a batch; None where it has no affine."""
    affine = image_affine(images, index)
    return None if affine is None else tuple(nib.affines.voxel_sizes(affine)[: images.ndim - 2].tolist())


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


def image_affine(images: torch.Tensor, index: int = 0) -> np.ndarray | None:
    """The affine to scanner mm of one image of a batch; None where it has none, or one that cannot be inverted."""
    affine = affine_in_mm(images, index) if isinstance(images, MetaTensor) else None
    return None if affine is None or np.linalg.det(affine) == 0 else affine


def affine_in_mm(images: MetaTensor, index: int = 0) -> np.ndarray:
    """The affine ``(4, 4)`` to scanner mm of an image, or of one image of a batch; of two axes ``(3, 3)`` in places.

    MONAI's ``LoadImaged`` keeps the unit of the file.
    """
    affine = (images.affine[index] if images.affine.ndim == 3 else images.affine).numpy(force=True).copy()
    if affine.shape == (3, 3):
        affine = _of_plane(affine, *(_item(images.meta.get(key, ()), index) for key in _FILE))
    affine[:-1] *= mm_per_unit(images.meta, index)
    return affine


def _item(value: Any, index: int) -> np.ndarray:
    """The affine ``(4, 4)`` or shape ``(3,)`` of a file, of one image or of an image of a batch."""
    found = torch.as_tensor(value, dtype=torch.float64).numpy(force=True)
    return found[index] if found.shape[1:] in ((4, 4), (3,)) else found


def _of_plane(affine: np.ndarray, file: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """The affine ``(4, 4)`` of a plane ``(X, Y, 1)`` from which MONAI's ``SqueezeDimd`` has taken an axis of the voxels
    and one of the scanner, ``(3, 3)``. As it is where there was no such axis, or what is left is singular.
    """
    thin = np.flatnonzero(shape == 1)
    if file.shape != (4, 4) or shape.shape != (3,) or len(thin) != 1:
        return affine
    columns = np.delete(file, thin, axis=1)
    left = np.delete(columns, thin, axis=0)
    if not np.allclose(affine, left):
        if np.isclose(np.linalg.det(left), 0):
            return affine
        columns = columns @ np.linalg.inv(left) @ affine
    return np.insert(columns, 2, file[:, thin[0]], axis=1)


def mm_per_unit(meta: Mapping[str, Any], index: int = 0) -> float:
    """How many mm the unit of an affine is, by ``xyzt_units`` of a NIfTI header or of meta data; 1 where unknown."""
    codes = meta.get("xyzt_units", 0)
    if isinstance(codes, str):  # of ITK's reader, which gives mm
        return 1.0
    units = torch.as_tensor(codes).reshape(-1)
    return _MM_PER_UNIT.get(int(units[min(index, len(units) - 1)]) & 7, 1.0)


def file_affine(meta: Mapping[str, Any], otherwise: np.ndarray) -> np.ndarray:
    """The affine ``(4, 4)`` in mm with which an image's file was read, by its meta data; ``otherwise`` without one."""
    affine = torch.as_tensor(meta.get(MetaKeys.ORIGINAL_AFFINE, ()), dtype=torch.float64).numpy(force=True).copy()
    if affine.shape != (4, 4):
        return otherwise
    affine[:3] *= mm_per_unit(meta)
    return affine


def convert_to_mm(meta: dict, file: str) -> None:
    """Convert the affines and voxel sizes in the meta data of a NIfTI file to mm, in place, with a warning."""
    unit = mm_per_unit(meta)
    if unit == 1:
        return
    warnings.warn(f"{file}: by its header (xyzt_units), 1 in its affine is {unit:g} mm: converted to mm", stacklevel=2)
    for key in (MetaKeys.AFFINE, MetaKeys.ORIGINAL_AFFINE):
        meta[key][:3] *= unit
    meta[MetaKeys.PIXDIM][1:4] *= unit
    meta["xyzt_units"] = np.array(2, np.uint8)  # mm


def steps_of(transform: Any) -> Iterator[Any]:
    """A transform, or the steps of nested ``Compose`` one by one. (``flatten`` makes new ones of some kinds.)"""
    if isinstance(transform, Compose):
        for step in transform.transforms:
            yield from steps_of(step)
    elif transform is not None:
        yield transform


def check_inversion(case: str, image: Any, steps: Iterable[tuple[Any, Any]]) -> None:
    """Refuse a preprocessing whose inverse does not bring voxels back to their place in the scan.

    A ramp of the scan's affine and shape, but at most 64 voxels an axis, goes through MONAI's steps that move voxels,
    and back. It must come back to one voxel of the network's input. Steps that a ramp alone cannot pass, such as a crop
    around a label, are left out.

    Args:
        case: the case's name.
        image: the network's input ``(C, *spatial)``. Without recorded transforms nothing is checked.
        steps: the transforms of the preprocessing in order, each with its key of the image.

    Raises:
        CaseError: when it does not come back.
    """
    operations = getattr(image, "applied_operations", [])
    if not operations or MetaKeys.ORIGINAL_AFFINE not in image.meta:
        return
    ramp = torch.ones(1, *(min(int(size), _PROBE) for size in operations[0][TraceKeys.ORIG_SIZE]))
    spans = range(1, ramp.ndim)  # unequal, so that the errors of two axes do not cancel out
    for span, size in zip(spans, ramp.shape[1:], strict=True):
        ramp += torch.linspace(0, span, size).reshape(-1, *[1] * (len(spans) - span))
    try:
        moved, back = _there_and_back(MetaTensor(ramp, torch.as_tensor(image.meta[MetaKeys.ORIGINAL_AFFINE])), steps)
    except Exception:  # whoever inverts the map will meet it, and report it
        return
    apart = (back - ramp)[back > 0.999].abs()  # elsewhere is what was cropped
    off = float(apart[:: max(1, len(apart) // 100_000)].median()) if len(apart) else sum(spans)
    if moved.numel() and off > sum(span / size for span, size in zip(spans, moved.shape[1:], strict=True)):
        raise CaseError(
            case,
            "the preprocessing cannot be inverted: a test image that went through it and back is off by "
            f"{off / sum(spans):.0%} of the scan's size, and so would be the map. Look for a step that gives the image "
            "a wrong affine, such as Spacingd(recompute_affine=True) of MONAI 1.6",
        )


def _there_and_back(image: MetaTensor, steps: Iterable[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """An image after the steps that move voxels, and then after their inverse."""
    done: list[tuple[Any, Any]] = []
    for step, key in steps:
        moves = isinstance(step, InvertibleTransform) and type(step).__module__.startswith(MOVING)
        if moves and not isinstance(step, RandomizableTrait) and key in getattr(step, "keys", ()):
            alone: Any = copy.copy(step)
            alone.allow_missing_keys = True
            with suppress(Exception):
                image = alone({key: image})[key]
                done.append((alone, key))
    back = image
    for alone, key in reversed(done):
        back = alone.inverse({key: back})[key]
    return image.as_tensor(), back.as_tensor()
