"""How far do maps agree: two maps of one scan, or all maps of two runs (``python -m monai_saliency compare A B``)?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata

from monai_saliency.errors import AdviceError
from monai_saliency.metrics.base import checked_maps
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.plausibility import MassInLabel, highest_voxels
from monai_saliency.storage.scans import load_scan
from monai_saliency.utils.arguments import a_path, number
from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["CaseComparison", "Comparison", "MapAgreement", "compare", "correlation", "map_agreement"]
__all__ += ["rank_correlation", "read_map"]

_SUFFIX = "_saliency.nii.gz"


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(n,)`` of rows ``(n, N)``, in [-1, 1]; NaN where all values of a row are equal."""
    ranks = (torch.from_numpy(rankdata(rows.numpy(force=True), axis=1)) for rows in (first, second))
    return correlation(*ranks).to(first.device, accumulation_dtype(first.device))


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation ``(n,)`` of rows ``(n, N)``, in [-1, 1]; NaN where all values of a row are equal."""
    ours, theirs = (rows - rows.mean(1, keepdim=True) for rows in (first, second))
    size = ((ours**2).sum(1) * (theirs**2).sum(1)).sqrt()
    varied = [(rows != rows[:, :1]).any(1) for rows in (first, second)]
    return torch.where(varied[0] & varied[1], (ours * theirs).sum(1) / size, torch.nan)


@dataclass(frozen=True)
class MapAgreement:
    """How far two maps of one scan agree.

    Attributes:
        pearson: Pearson's correlation of the values, in [-1, 1]; NaN where a map is flat.
        spearman: the correlation of their ranks, in [-1, 1]; NaN where a map is flat.
        overlap: which share of the first map's highest voxels is among the second's highest, in [0, 1]. The highest are
            a share ``top`` of all voxels, as far as they are positive; NaN where one map has none.
        peak_distance: between the peaks, in mm.
        difference: the largest absolute difference of a voxel, in the maps' unit.
    """

    pearson: float
    spearman: float
    overlap: float
    peak_distance: float
    difference: float


def map_agreement(first: np.ndarray, second: np.ndarray, affine: np.ndarray, top: float = 0.05) -> MapAgreement:
    """How far two maps of one scan agree.

    Args:
        first: one map ``(*spatial)``, 2D or 3D.
        second: another map of the same scan, of the same shape.
        affine: ``(4, 4)``, from voxels to scanner mm.
        top: the share of voxels that counts as highest, in (0, 1].

    Raises:
        ValueError: when the maps have different shapes, or hold NaN or infinity.

    Example::

        >>> a = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 9.0]])
        >>> b = np.array([[0.0, 1.0, 9.0], [0.0, 0.0, 2.0]])
        >>> found = map_agreement(a, b, np.diag([3.0, 1.0, 1.0, 1.0]), top=1 / 6)
        >>> found.overlap, found.peak_distance, found.difference
        (0.0, 3.0, 7.0)
    """
    if first.shape != second.shape:
        raise ValueError(f"maps of one scan have one shape, got {first.shape} and {second.shape}")
    ours, theirs = (checked_maps(torch.from_numpy(np.array(each, np.float64))[None, None]) for each in (first, second))
    rows = ours.flatten(1), theirs.flatten(1)
    highest = [highest_voxels(each, top) & (each > 0) for each in (ours, theirs)]
    overlap = float(MassInLabel().compute(highest[0].double(), highest[1])) if highest[0].any() else float("nan")
    peaks = [np.array([*peak_voxel(each), 0, 0][:3], np.float64) for each in (first, second)]
    return MapAgreement(
        float(correlation(*rows)),
        float(rank_correlation(*rows)),
        overlap,
        float(np.linalg.norm(affine[:3, :3] @ (peaks[0] - peaks[1]))),
        float((ours - theirs).abs().max()),
    )


# Two runs. ------------------------------------------------------------------------------------------------------------


def _find_maps(folder: str | Path) -> dict[str, Path]:
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
    except Exception as error:
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
        maps.append(_find_maps(folder))
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
    difference = 0.0 if same else float("inf")
    if not same and ours.shape == theirs.shape:
        with np.errstate(all="ignore"):
            found = np.abs(ours.astype(np.float64) - theirs).max() / np.abs(ours).max()
        difference = float(found) if np.isfinite(found) else float("inf")
    return CaseComparison(case, difference, same, np.array_equal(our_affine, their_affine))
