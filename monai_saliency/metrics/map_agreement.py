"""How far do two maps of one scan agree, such as maps of two methods, seeds, checkpoints or fills?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from monai_saliency.metrics.base import checked_maps
from monai_saliency.metrics.mass import MassInLabel, highest_voxels
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.ranks import correlation, rank_correlation

__all__ = ["MapAgreement", "map_agreement"]


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
