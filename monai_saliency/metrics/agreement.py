"""How far do two maps of one scan agree?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import rankdata

from monai_saliency.metrics.base import checked_maps
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.plausibility import highest_voxels
from monai_saliency.utils.precision import accumulation_dtype
from monai_saliency.utils.tensors import correlation

#: the share of voxels that counts as highest
_TOP = 0.05


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(n,)`` of rows ``(n, N)``, in [-1, 1]; NaN where all values of a row are equal."""
    ranks = correlation(_ranks(first), _ranks(second))
    return ranks.to(first.device, accumulation_dtype(first.device))


def _ranks(rows: torch.Tensor) -> torch.Tensor:
    """The rank of each value in its row, float64 ``(n, N)`` on the CPU; equal values share their mean rank."""
    return torch.from_numpy(rankdata(rows.numpy(force=True), axis=1))


@dataclass(frozen=True)
class MapAgreement:
    """How far two maps of one scan agree.

    Attributes:
        pearson: Pearson's correlation of the values, in [-1, 1]; NaN where a map is flat.
        spearman: the correlation of their ranks, in [-1, 1]; NaN where a map is flat.
        overlap: which share of the first map's highest voxels is among the second's highest, in [0, 1]. The highest are
            5 % of all voxels, as far as they are positive; NaN where one map has none.
        peak_distance: between the peaks, in mm.
        difference: the largest absolute difference of a voxel, in the maps' unit.
    """

    pearson: float
    spearman: float
    overlap: float
    peak_distance: float
    difference: float


def map_agreement(first: np.ndarray, second: np.ndarray, affine: np.ndarray) -> MapAgreement:
    """How far two maps of one scan agree.

    Args:
        first: one map ``(*spatial)``, 2D or 3D.
        second: another map of the same scan, of the same shape.
        affine: ``(4, 4)``, from voxels to scanner mm.

    Raises:
        ValueError: when a map holds NaN or infinity.

    Example::

        >>> a = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 9.0]])
        >>> b = np.array([[0.0, 1.0, 9.0], [0.0, 0.0, 2.0]])
        >>> found = map_agreement(a, b, np.diag([3.0, 1.0, 1.0, 1.0]))
        >>> found.overlap, found.peak_distance, found.difference
        (0.0, 3.0, 7.0)
    """
    ours, theirs = _as_batch(first), _as_batch(second)
    voxels_between = np.subtract(peak_voxel(first), peak_voxel(second))
    mm_between = affine[:3, : first.ndim] @ voxels_between
    return MapAgreement(
        pearson=float(correlation(ours.flatten(1), theirs.flatten(1))),
        spearman=float(rank_correlation(ours.flatten(1), theirs.flatten(1))),
        overlap=_overlap(ours, theirs),
        peak_distance=float(np.linalg.norm(mm_between)),
        difference=float((ours - theirs).abs().max()),
    )


def _as_batch(saliency: np.ndarray) -> torch.Tensor:
    """One map ``(*spatial)`` as maps ``(1, 1, *spatial)`` in float64."""
    return checked_maps(torch.from_numpy(np.array(saliency, np.float64))[None, None])


def _overlap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The share of our highest voxels that are among theirs, see :attr:`MapAgreement.overlap`."""
    our_highest = highest_voxels(ours, _TOP) & (ours > 0)
    their_highest = highest_voxels(theirs, _TOP) & (theirs > 0)
    if not our_highest.any() or not their_highest.any():
        return math.nan
    return int((our_highest & their_highest).sum()) / int(our_highest.sum())
