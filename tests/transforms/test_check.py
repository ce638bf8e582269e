"""Scans that would give a wrong map, or none after much work, are refused at once."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.scans import damage, write_scan
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged

from monai_saliency.errors import CaseError, root_cause
from monai_saliency.transforms import CheckScand

ONE = np.array([[-1.5, 0, 0, 20], [0, 1.5, 0, -30], [0, 0, 2.0, 10], [0, 0, 0, 1]])
SHIFTED = ONE + np.array([[0, 0, 0, 5.0]] + [[0.0] * 4] * 3)
WIDER = ONE @ np.diag([2.0, 1, 1, 1])
TILTED = ONE @ np.array([[1, 0, 0.2, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
ROUNDED = ONE + 1e-4


def check(path: Path, sform: tuple[np.ndarray, int], qform: tuple[np.ndarray, int], dims: int = 3) -> None:
    """Check a scan with such a header as our bundle does."""
    shape = (6, 5, 4)[:dims]
    image = nib.Nifti1Image(np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32), None)
    image.set_qform(qform[0], qform[1])
    image.set_sform(sform[0], sform[1], update_affine=True)
    nib.save(image, path)
    load(path, dims)


def load(path: Path, dims: int = 3) -> None:
    steps = [LoadImaged("image"), EnsureChannelFirstd("image"), CheckScand("image", spatial_dims=dims)]
    try:
        Compose(steps)({"image": str(path), "case": "ct"})
    except RuntimeError as error:
        raise root_cause(error) from None


@pytest.mark.parametrize("code", [1, 2])
def test_a_header_of_which_monai_reads_another_place(code: int, tmp_path: Path) -> None:
    """MONAI reads the form that agrees with the voxel sizes, nibabel and the saved map the sform."""
    with pytest.raises(CaseError, match=r"sform and the qform that MONAI reads put voxels up to 7.5 mm apart"):
        check(tmp_path / "ct.nii.gz", (WIDER, code), (ONE, 1))


@pytest.mark.parametrize(
    ("sform", "qform"),
    [
        ((ONE, 1), (ROUNDED, 1)),
        ((TILTED, 1), (TILTED, 1)),  # of which the qform keeps what it can hold
        ((ONE, 2), (SHIFTED, 0)),
        ((SHIFTED, 0), (ONE, 1)),
        # Two spaces: the scanner's, and that of the scan to which it was registered, in which the map lies.
        ((SHIFTED, 2), (ONE, 1)),
    ],
)
@pytest.mark.parametrize("dims", [2, 3])
def test_a_header_that_places_the_scan(
    sform: tuple[np.ndarray, int], qform: tuple[np.ndarray, int], dims: int, tmp_path: Path
) -> None:
    check(tmp_path / "ct.nii.gz", sform, qform, dims)


def test_a_scan_that_is_not_what_was_packed(tmp_path: Path) -> None:
    """Which a checksum at the file's end shows, and nibabel does not read."""
    path = write_scan(tmp_path / "ct.nii.gz", (12, 13, 14), ONE)
    load(path)
    damage(path)
    with pytest.raises(CaseError, match=r"case ct: its file .*ct.nii.gz is damaged .CRC check failed.*: copy it again"):
        load(path)
