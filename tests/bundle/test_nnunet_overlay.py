"""The overlay ``nnunet``: our bundle explains a trained nnU-Net model folder."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
from helpers.nnunet import scan
from helpers.paths import BUNDLE

from monai_saliency.bundle.configs import overlay_path

ANISOTROPIC = np.diag([-4.1, 0.9, 0.8, 1.0])
TURNED = np.array([[0.96, -0.28, 0], [0.28, 0.96, 0], [0, 0, 1]]) @ np.array([[1, 0, 0], [0, 0.8, -0.6], [0, 0.6, 0.8]])
OBLIQUE = nib.affines.from_matvec(TURNED @ np.diag([3.3, 1.2, 1.1]), [-20, 10, 5])


def explain(model: Path, data: Path, output: Path, **settings: Any) -> list[dict[str, str]]:
    """Run our bundle with the overlay; the summary's rows."""
    files = [str(BUNDLE / "configs" / "inference.yaml"), str(overlay_path("nnunet"))]
    given = {"nnunet_model_folder": str(model), "dataset_dir": str(data), "output_dir": str(output), "device": "cpu"}
    monai.bundle.run(bundle_root=str(BUNDLE), config_file=files, **given | {"picture": False} | settings)
    with open(output / "summary.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("affine", [ANISOTROPIC, OBLIQUE], ids=["anisotropic", "oblique"])
def test_finds_what_is_planted(nnunet_bright: Path, tmp_path: Path, affine: np.ndarray) -> None:
    """Within a voxel, on the scan's own grid."""
    path = scan(tmp_path / "imagesTs" / "case_0000.nii.gz", affine, (8, 15, 14))
    image = nib.load(path)
    values = np.asarray(image.dataobj)
    place = (5, 9, 6)
    planted = tuple(slice(axis - 1, axis + 2) for axis in place)
    values[planted] += 400
    nib.save(nib.Nifti1Image(values, affine), path)
    window = {"method": "sliding_window", "window_size": [1, 3, 3], "stride": [1, 2, 2], "nnunet_mirroring": False}
    (row,) = explain(nnunet_bright, tmp_path / "imagesTs", tmp_path / "out", **window)
    assert row["case"] == "case"
    found = nib.load(tmp_path / "out" / "case_saliency.nii.gz")
    np.testing.assert_allclose(found.affine, affine, atol=1e-5)
    saliency = np.asarray(found.dataobj)
    assert saliency.shape == values.shape
    weights = np.where(saliency > saliency.max() / 2, saliency, 0)
    centre = [(weights * index).sum() / weights.sum() for index in np.indices(values.shape)]
    assert np.abs(np.subtract(centre, place)).max() < 1
