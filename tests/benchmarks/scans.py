"""Scans made for benchmarks, and a preprocessing as networks are trained with."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    Resized,
    Spacingd,
)
from scipy.ndimage import gaussian_filter

LPS = np.diag([-1.0, -1.0, 1.2, 1.0])


def write_scans(folder: Path, count: int, shape: tuple[int, int, int]) -> list[dict[str, str]]:
    """Smooth blobs in noise, int16, compressed as scanners' exports are; the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    blobs = gaussian_filter(rng.normal(size=shape).astype(np.float32), 8)
    blobs *= 500 / np.abs(blobs).max()
    cases = []
    for index in range(count):
        voxels = 1000 + np.roll(blobs, 5 * index, 0) + rng.normal(0, 20, shape).astype(np.float32)
        path = folder / f"scan_{index:03d}.nii.gz"
        nib.save(nib.Nifti1Image(voxels.astype(np.int16), LPS), path)
        cases.append({"case": f"scan_{index:03d}", "image": str(path)})
    return cases


def preprocessing(size: int) -> Compose:
    """From a file to ``(1, size, size, size)``."""
    return Compose(
        [
            LoadImaged(keys="image"),
            EnsureChannelFirstd(keys="image"),
            Orientationd(keys="image", axcodes="RAS", labels=None),
            Spacingd(keys="image", pixdim=(1.5, 1.5, 1.5), mode="bilinear"),
            Resized(keys="image", spatial_size=(size, size, size), mode="trilinear"),
            NormalizeIntensityd(keys="image", nonzero=True, channel_wise=True),
        ]
    )
