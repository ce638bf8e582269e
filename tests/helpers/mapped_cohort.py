"""A small cohort whose maps are known by hand, and a dataset of it with its maps, which count what they compute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    MapTransform,
    Orientationd,
    RandRotate90d,
)

import monai_saliency as ms
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.saliency_dataset import SaliencyDataset

BOTH = ("image", "saliency")
SHAPE = (8, 12, 8)
BOX = (slice(0, 4), slice(4, 8), slice(4, 8))
# Windows of 4 voxels tile the volume, and one of them is the box.
NUM_MASKS = 12
TURN = RandRotate90d(BOTH, prob=1.0, max_k=1, spatial_axes=(1, 2))
AFFINE = np.diag([-2.0, 2.0, 3.0, 1.0])


def note(what: str, times: int = 1) -> None:
    with open(os.environ["NOTES"], "a") as log:
        log.write(f"{what}\n" * times)


class Logged(MapTransform):
    """Notes each scan that is preprocessed, in any process."""

    def __call__(self, data: Any) -> Any:
        note("scan")
        return data


def box_sum(x: torch.Tensor) -> torch.Tensor:
    """``(B, 1)``. Notes each image."""
    note("forward", len(x))
    return x[(slice(None), slice(None), *BOX)].sum(dim=(1, 2, 3, 4))[:, None]


class BoxSum(torch.nn.Module):
    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([weight]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return box_sum(x) * self.weight.to(x.dtype)


def scan(path: Path, value: float) -> None:
    """The box is bright, all else -1. Its first axis runs from right to left, so that preprocessing turns it."""
    volume = np.full(SHAPE, -1, np.float32)
    volume[BOX] = value
    nib.save(nib.Nifti1Image(volume[::-1], AFFINE), path)


def expected_map(image: torch.Tensor) -> torch.Tensor:
    """What hiding a voxel's window takes from the sum of the box."""
    return 64 * image.clamp(min=0)


def preprocessing(*more: Any) -> Compose:
    steps = [Logged("image"), LoadImaged("image"), EnsureChannelFirstd("image")]
    return Compose([*steps, Orientationd("image", axcodes="RAS", labels=None), *more])


def explain(window: int = 4, classes: Any = "all", **settings: Any) -> ms.PerturbationInferer:
    # One forward an image, so that forwards are counted without those that fill the last batch up.
    settings = {"mask_batch_size": 1} | settings
    return ms.sliding_window(window, window, target=ms.ClassScore(classes, activation="none"), **settings)


def dataset(
    cohort: Path, cache: str = "memory", transform: Any = None, network: Any = None, inferer: Any = None, **options: Any
) -> SaliencyDataset:
    return SaliencyDataset(
        find_cases(cohort),
        preprocessing() if transform is None else transform,
        BoxSum() if network is None else network,
        explain() if inferer is None else inferer,
        cache,
        **{"cache_dir": cohort.parent / "cache"} | options,
    )


def write_cohort(folder: Path) -> Path:
    folder.mkdir()
    for number, name in enumerate("abc"):
        scan(folder / f"{name}.nii.gz", number + 1)
    return folder
