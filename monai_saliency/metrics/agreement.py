"""Comparing the maps of two runs of one cohort: ``python -m monai_saliency compare A B``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nibabel.filebasedimages import ImageFileError

from monai_saliency.errors import AdviceError
from monai_saliency.storage.files import load_scan
from monai_saliency.utils.arguments import a_path, number

__all__ = ["CaseComparison", "Comparison", "compare", "find_maps", "read_map"]

_SUFFIX = "_saliency.nii.gz"


def find_maps(folder: str | Path) -> dict[str, Path]:
    """The files of the maps in an output folder and its subfolders, by the case's name."""
    folder = a_path("folder", folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the output folder of a run")
    found = sorted(path.relative_to(folder) for path in folder.rglob(f"*{_SUFFIX}"))
    # Names that begin with a dot are files still being written, or left by a killed run.
    maps = [path for path in found if not any(part.startswith(".") for part in path.parts)]
    return {path.as_posix().removesuffix(_SUFFIX): folder / path for path in maps}


def read_map(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """The voxels of a map's file, ``(*spatial)`` or ``(*spatial, K)`` for K maps, and its affine ``(4, 4)``."""
    try:
        scan = load_scan(path)
        return np.asanyarray(scan.dataobj), scan.affine
    except (OSError, EOFError, ImageFileError, ValueError, zlib.error) as error:
        raise AdviceError(f"{path} is not a readable map ({error}): delete it and run again") from error


@dataclass(frozen=True)
class CaseComparison:
    """How the two maps of one case differ."""

    case: str
    difference: float
    same_voxels: bool
    same_affine: bool


@dataclass(frozen=True)
class Comparison:
    """How the maps of two output folders differ. ``print(comparison)`` gives a summary.

    Attributes:
        both: the cases with a map in both folders.
        only_first: the names of cases with a map in the first folder only.
        only_second: the names of cases with a map in the second folder only.
    """

    both: Sequence[CaseComparison]
    only_first: Sequence[str]
    only_second: Sequence[str]

    @property
    def worst(self) -> CaseComparison:
        """The case with the largest difference. There must be a case in both folders."""
        return max(self.both, key=lambda case: case.difference)

    def agrees(self, tolerance: float = 1e-6) -> bool:
        """Whether both folders have maps of the same cases and affines, which differ by at most ``tolerance``."""
        number("tolerance", tolerance, 0)
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
    """Compare the maps in two output folders case by case. The maps may come from our bundle or from the overlay.

    Args:
        first: an output folder. Differences are relative to its maps.
        second: the output folder to compare with it.

    Raises:
        ValueError: when a folder holds no maps, or when a map cannot be read.

    Example::

        comparison = compare("rise/eval", "windows/eval")
        print(comparison)
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
    if np.array_equal(ours, theirs, equal_nan=True):
        return 0.0
    with np.errstate(all="ignore"):
        difference = float(np.abs(ours - theirs).max() / np.abs(ours).max())
    return difference if np.isfinite(difference) else float("inf")
