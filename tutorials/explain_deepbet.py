"""Why does a trained network find the brain where it does? deepbet's, on a real brain.

deepbet (MIT, https://github.com/wwu-mmll/deepbet) ships two trained U-Nets as TorchScript. Its first looks at the whole
head on a grid of 128^3 and says where the brain is. Nothing of deepbet's own code is needed, nor what that imports:

    pip install "monai-saliency[demo]"
    pip install --no-deps deepbet==1.0.2
    python tutorials/explain_deepbet.py maps

writes maps/mni152_saliency.nii.gz, on the scan's own grid, and a picture, after 65 predictions of about a second.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    Invertd,
    LoadImaged,
    Orientationd,
    Resized,
    ScaleIntensityRangePercentilesd,
)
from nibabel.processing import resample_from_to
from nilearn.datasets import load_mni152_template

import monai_saliency as ms


def write_scan(path: Path) -> Path:
    """The MNI152 brain as a scanner might give it: int16, in tilted slices of 2.6 mm, from the right to the left."""
    template = load_mni152_template(resolution=2)
    turn, tilt = np.deg2rad(9), np.deg2rad(14)
    about_z = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
    about_x = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])
    shape, affine = (110, 124, 84), np.eye(4)
    affine[:3, :3] = about_z @ about_x @ np.diag([-1.9, 1.9, 2.6])
    affine[:3, 3] = np.array([0, -18, 8]) - affine[:3, :3] @ (np.array(shape) / 2)  # the middle of the brain, in mm
    scan = resample_from_to(template, (shape, affine), order=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image((1000 * scan.get_fdata(dtype=np.float32)).astype(np.int16), affine), path)
    return path


def load_network() -> torch.nn.Module:
    """The network that finds the brain in a whole head: (B, 1, *spatial) to two probabilities, background and brain."""
    return torch.jit.load(distribution("deepbet").locate_file("data/models/bbox_model.pt")).eval()


def preprocessing(size: int = 128) -> Compose:
    """What the network gets: the head on a cube, whatever its spacing, with its bulk of intensities in [0, 1]."""
    return Compose(
        [
            LoadImaged("image"),
            EnsureChannelFirstd("image"),
            Orientationd("image", "RAS", labels=None),
            Resized("image", (size, size, size), mode="trilinear"),
            ScaleIntensityRangePercentilesd("image", 0.5, 99.5, 0, 1, clip=True),
        ]
    )


def explain(scan: Path, output_dir: Path, size: int = 128, window: int = 32) -> dict[str, Any]:
    """Hide boxes of the head one after another: how much less sure is the network of the brain that it found?

    Returns:
        the case: the image and its map on the network's grid.
    """
    steps = preprocessing(size)
    # The network gives probabilities already. Hidden is a box by what lies around a head: nothing.
    target = ms.RegionScore(channel=1, region="predicted", activation="none")
    method = ms.sliding_window(window, window, target=target, fill=ms.ConstantFill(0.0), progress=True)
    to_map = ms.Saliencyd("image", load_network(), method, names="saliency")
    back = Invertd("saliency", steps, orig_keys="image", nearest_interp=False)
    save = ms.transforms.SaveSaliencyd("saliency", output_dir)
    case = to_map(steps({"image": str(scan), "case": scan.name.removesuffix(".nii.gz")}))
    save(back({**case, "title": "deepbet: what makes this the brain?"}))
    return case


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "maps")
    explain(write_scan(folder / "mni152.nii.gz"), folder)
