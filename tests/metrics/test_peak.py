from __future__ import annotations

import numpy as np
from helpers.maps import PEAK, peaked, volume

from monai_saliency.metrics.peak import peak_voxel


def test_peak_voxel() -> None:
    assert peak_voxel(peaked()) == PEAK
    assert peak_voxel(np.array([[-5.0, -3.0], [-4.0, -9.0]])) == (0, 1)
    # Zeros, and what resampling leaves of them, are voxels that no mask hid.
    assert peak_voxel(np.array([[-5.0, -3.0], [0.0, -1e-15]])) == (0, 1)


def test_peak_voxel_of_a_plateau_is_its_middle() -> None:
    saliency = volume().clip(-1, 1)
    saliency[1:6, 2:5, 1:4] = 2 * (1 + np.random.default_rng(2).normal(size=(5, 3, 3)) * 1e-8)
    assert peak_voxel(saliency) == (3, 3, 2)
