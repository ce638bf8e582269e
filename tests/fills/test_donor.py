from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityRanged

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.inferers.case_explainer import CaseExplainer
from monai_saliency.storage.score_store import ScoreStore

TARGET = ms.ClassScore([0], "none")
LOAD = [LoadImaged(["image", "label"]), EnsureChannelFirstd(["image", "label"])]
PREPROCESSING = Compose([*LOAD, ScaleIntensityRanged("image", 0, 100, 0, 1)])


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    """A ramp along x, 10 a mm from 0 at the origin, in voxels of 2 mm."""
    ramp = np.broadcast_to(20.0 * np.arange(12).reshape(-1, 1, 1), (12, 9, 8))
    nib.save(nib.Nifti1Image(ramp, np.diag([2.0, 2, 2, 1])), tmp_path / "donor.nii.gz")
    return tmp_path / "donor.nii.gz"


def test_the_donors_value_at_the_same_place_in_mm(donor: Path) -> None:
    """Its preprocessing divides by 100; the scan has voxels of 1 mm, runs from right to left, and begins at 9 mm."""
    affine = np.diag([-1.0, 1, 1, 1])
    affine[0, 3] = 9
    image = MetaTensor(torch.zeros(1, 1, 8, 7, 6), affine=torch.from_numpy(affine))
    found = fill_in_unit(f"donor:{donor}", transform=PREPROCESSING).bind(Case.of(image).with_image(image[0], 0, image))
    expected = (9 - torch.arange(8.0)) * 0.1
    torch.testing.assert_close(found(image)[0, 0, :, 3, 3], expected)
    maps = ms.channel_occlusion(target=TARGET, fill=ms.DonorFill(donor, PREPROCESSING))(
        image, lambda x: x.flatten(1).sum(dim=1, keepdim=True)
    )
    assert float(maps.mean()) == pytest.approx(-float(expected.sum()) * 42, rel=1e-5)


def test_a_donor_of_the_same_grid_is_taken_as_it_is(donor: Path) -> None:
    image = torch.rand(1, 2, 5, 4)
    for other in (torch.rand(2, 5, 4), np.random.default_rng(0).random((2, 5, 4))):
        found = ms.DonorFill(other).bind(Case("a", image[0]))(image)
        assert found.dtype == image.dtype
        assert torch.equal(found[0], torch.as_tensor(other).to(image))
    loaded = ms.DonorFill(donor).bind(Case("a", torch.zeros(1, 12, 9, 8)))(torch.zeros(1, 1, 12, 9, 8))
    assert loaded[0, 0, 3].unique().tolist() == [60.0]


def test_scores_are_kept_until_the_donor_changes(donor: Path, tmp_path: Path) -> None:
    forwards: list[int] = []
    for time in (1, 1, 2):
        os.utime(donor, (time, time))
        explain = ms.sliding_window(6, target=TARGET, fill=ms.DonorFill(donor))
        network: Any = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(864, 1)).eval()
        torch.nn.init.ones_(network[1].weight)
        torch.nn.init.zeros_(network[1].bias)
        explained: list[Any] = []
        explainer = CaseExplainer(explain, network, ScoreStore(tmp_path / "store"))
        explainer.explain(torch.ones(1, 1, 12, 9, 8), [Case("a")], explained.append)
        forwards.append(explained[0].explanation.num_forwards)
    assert forwards[0] == forwards[2] > forwards[1]


def test_errors(donor: Path) -> None:
    with pytest.raises(ValueError, match=r"`donor` must be a scan, and there is no file .*\.missing"):
        fill_in_unit(f"donor:{donor}.missing")
    image = MetaTensor(torch.zeros(1, 1, 12, 9, 7), affine=torch.eye(4))
    far = MetaTensor(torch.zeros(1, 1, 12, 9, 7), affine=torch.diag(torch.tensor([-1.0, 1, 1, 1])))
    broken = Compose([*LOAD, ScaleIntensityRanged("image", 0, "wide", 0, 1)])
    for given, fill, words in [
        (image, ms.DonorFill(torch.zeros(1, 3, 3, 3)), r"the donor has shape \(1, 3, 3, 3\), and the image \(1, 12"),
        (image.repeat(1, 2, 1, 1, 1), ms.DonorFill(donor), r"shape \(1, 12, 9, 8\), and the image \(2, 12, 9, 7\)"),
        (far, ms.DonorFill(donor), "covers .*% of the scan: register"),
        (image, ms.DonorFill(donor, broken), "the donor .* could not be preprocessed"),
    ]:
        with pytest.raises(CaseError, match=words):
            ms.rise(4, 2, target=TARGET, fill=fill)(given, torch.nn.Flatten())
