"""Comparing the maps that two runs made of one cohort: ``python -m monai_saliency compare A B``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nibabel.filebasedimages import ImageFileError

from monai_saliency.storage.files import load_scan

__all__ = ["CaseComparison", "Comparison", "compare", "find_maps", "read_map"]

_SUFFIX = "_saliency.nii.gz"


def find_maps(folder: str | Path) -> dict[str, Path]:
    """The maps below an output folder, in it or in folders of its own, by case.

    Raises:
        ValueError: when there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the output folder of a run")
    found = sorted(path.relative_to(folder) for path in folder.rglob(f"*{_SUFFIX}"))
    # What begins with a dot is still being written, or was when its run was killed.
    maps = [path for path in found if not any(part.startswith(".") for part in path.parts)]
    return {path.as_posix().removesuffix(_SUFFIX): folder / path for path in maps}


def read_map(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """A map's voxels ``(*spatial)`` or ``(*spatial, K)``, and its affine ``(4, 4)``.

    Raises:
        ValueError: when the file cannot be read.
    """
    try:
        scan = load_scan(path)
        return np.asanyarray(scan.dataobj), scan.affine
    except (OSError, EOFError, ImageFileError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is no map that can be read ({error}): remove it, and run again") from error


@dataclass(frozen=True)
class CaseComparison:
    """How the two maps of one case differ.

    Attributes:
        case: its name.
        difference: the largest difference of two voxels, relative to the largest absolute value of the first map;
            infinite where the maps have different shapes, or where one is no number and the other is.
        same_voxels: whether all bytes of all voxels are equal.
        same_affine: whether the affines are.
    """

    case: str
    difference: float
    same_voxels: bool
    same_affine: bool


@dataclass(frozen=True)
class Comparison:
    """How the maps of two output folders differ.

    Attributes:
        both: the cases that have a map in both.
        only_first: the names of those that have one in the first folder only.
        only_second: likewise.
    """

    both: Sequence[CaseComparison]
    only_first: Sequence[str]
    only_second: Sequence[str]

    @property
    def worst(self) -> CaseComparison:
        """The case of the largest difference."""
        return max(self.both, key=lambda case: case.difference)

    def agrees(self, tolerance: float = 1e-6) -> bool:
        """Whether both have maps of the same cases, in the same places, that differ by no more than ``tolerance``."""
        placed = all(case.same_affine for case in self.both)
        return not self.only_first and not self.only_second and placed and self.worst.difference <= tolerance

    def __str__(self) -> str:
        lines = [f"cases in both: {len(self.both)}"]
        for which, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                lines.append(f"only in the {which}: {len(names)} ({', '.join(names[:5])}{', ...' * (len(names) > 5)})")
        if self.both:
            worst = self.worst
            moved = [case.case for case in self.both if not case.same_affine]
            lines += [
                f"largest difference: {worst.difference:.3g} of the map's largest absolute value, of case {worst.case}",
                f"voxel bytes equal: {'yes' if all(case.same_voxels for case in self.both) else 'no'}",
                f"affines equal: {f'no, of {len(moved)} cases, the first is {moved[0]}' if moved else 'yes'}",
            ]
        return "\n".join(lines)


def compare(first: str | Path, second: str | Path) -> Comparison:
    """Compare the maps below two output folders, of our bundle or of the overlay ``explain``, case by case.

    Args:
        first: a folder.
        second: another.

    Raises:
        ValueError: when one of them holds no maps, or a map cannot be read.
    """
    maps = []
    for folder in (first, second):
        maps.append(find_maps(folder))
        if not maps[-1]:
            raise ValueError(f"{folder} holds no maps (*{_SUFFIX}): give the output folder of a run")
    ours, theirs = maps
    return Comparison(
        [_compare(case, ours[case], theirs[case]) for case in ours if case in theirs],
        [case for case in ours if case not in theirs],
        [case for case in theirs if case not in ours],
    )


def _compare(case: str, first: Path, second: Path) -> CaseComparison:
    (ours, our_affine), (theirs, their_affine) = read_map(first), read_map(second)
    same = ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    return CaseComparison(
        case, 0.0 if same else _difference(ours, theirs), same, np.array_equal(our_affine, their_affine)
    )


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    if first.shape != second.shape:
        return float("inf")
    ours, theirs = first.astype(np.float64), second.astype(np.float64)
    # Infinities of one sign are equal, and so are two that are no numbers.
    unequal = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    if not unequal.any():
        return 0.0
    largest = np.abs(ours).max()
    difference = np.abs(ours - theirs)[unequal].max()
    return float(difference / largest) if largest > 0 and np.isfinite([largest, difference]).all() else float("inf")
