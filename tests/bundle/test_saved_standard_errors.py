"""The standard error travels with the map: to the scan's own grid, by every way that explains a cohort."""

from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.brightness import Brightness
from helpers.files import maps, rows_of
from helpers.own_bundle import forwards, settings
from helpers.scans import AFFINES, LPS, OBLIQUE, volume, write_scan
from helpers.tolerances import assert_same_bits
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, Orientationd

import monai_saliency as ms


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    write_scan(tmp_path / "cohort" / "a.nii.gz", (21, 17, 13), OBLIQUE, seed=1, sform=2, qform=0)
    write_scan(tmp_path / "cohort" / "site" / "b.nii.gz", (14, 12, 9), LPS, seed=2)
    return tmp_path


def explain(folder: Path, out: str = "out", **overrides: Any) -> None:
    """As the bundle does by default, which is with standard errors."""
    given = settings(folder, out)
    del given["standard_error"]
    monai.bundle.run(**given | overrides)


def errors(folder: Path) -> dict[str, np.ndarray]:
    files = folder.rglob("*_standard_error.nii.gz")
    return {path.relative_to(folder).as_posix(): nib.load(path).get_fdata() for path in files}


def test_our_bundle_saves_it_on_the_scans_own_grid(cohort: Path) -> None:
    explain(cohort)
    found = errors(cohort / "out")
    assert set(found) == {"a_standard_error.nii.gz", "site/b_standard_error.nii.gz"}
    for name, values in found.items():
        saved = nib.load(cohort / "out" / name)
        saliency = nib.load(cohort / "out" / name.replace("standard_error", "saliency"))
        scan = nib.load(cohort / "cohort" / name.replace("_standard_error", ""))
        assert saved.shape == scan.shape
        assert_same_bits(saved.affine, saliency.affine)
        for field in ("sform_code", "qform_code", "xyzt_units"):
            assert saved.header[field] == scan.header[field]
        assert values.min() >= 0
        assert values.max() > 0
        # Of 30 masks: a map is about as large as its error where nothing is found, and more is not explained by chance.
        assert 0.5 < float(np.sqrt(np.mean(saliency.get_fdata() ** 2)) / np.sqrt(np.mean(values**2))) < 10
    assert not list((cohort / "out").rglob("*standard_error.png"))


def test_a_run_with_it_after_one_without_needs_no_forward(cohort: Path) -> None:
    """And one without it removes the file, which would belong to an earlier map."""
    explain(cohort, "whole")
    explain(cohort, standard_error=False)
    assert errors(cohort / "out") == {}
    before, plain = forwards(cohort, "out"), maps(cohort / "out")
    explain(cohort)
    assert forwards(cohort, "out") - before == 2  # the batch of each case that holds the unperturbed image
    found, expected = errors(cohort / "out"), errors(cohort / "whole")
    assert set(found) == set(expected) != set()
    for name in expected:
        assert_same_bits(found[name], expected[name])
    assert maps(cohort / "out") == plain == maps(cohort / "whole")
    explain(cohort, method="sliding_window", window_size=6)
    assert errors(cohort / "out") == {}


def test_the_summary_says_why_a_case_stopped(cohort: Path) -> None:
    explain(cohort, num_masks=20, until=0.5, budget=200)
    rows = rows_of(cohort / "out" / "summary.csv")
    for row in rows:
        asked = int(row["forwards"]) - 1
        assert asked in {20, 30, 45, 67, 100, 150, 200}
        assert row["stopped"].startswith("agreement") or asked == 200
        assert " reached" in row["stopped"] or asked == 200
    assert len(rows) == 2
    explain(cohort, "plain", num_masks=20)
    stopped = {row["stopped"] for row in rows_of(cohort / "plain" / "summary.csv")}
    assert all(not each or each.startswith("hiding the whole scan leaves") for each in stopped)


def evaluator(scan: Path, transform: Compose) -> SupervisedEvaluator:
    loader = DataLoader(Dataset([{"image": str(scan)}], transform), batch_size=1)
    return SupervisedEvaluator(torch.device("cpu"), loader, Brightness(3))


def test_attached(tmp_path: Path) -> None:
    """The file has what the explanation says, where preprocessing moves no voxel; and it is inverted like the map."""
    scan = volume(tmp_path / "scan.nii.gz", (9, 8, 7), AFFINES[1], 0, low=0, high=200)
    keys = {"keys": "image"}
    load = [LoadImaged(**keys), EnsureChannelFirstd(**keys)]
    run = evaluator(scan, Compose(load))
    given: dict[str, Any] = {"method": "rise", "num_masks": 30, "grid_size": 3, "picture": False, "classes": [1]}
    ms.attach(run, tmp_path / "maps", activation="none", **given)
    run.run()
    path = tmp_path / "maps" / "scan_standard_error.nii.gz"
    image = Compose(load)({"image": str(scan)})["image"]
    method = ms.rise(30, 3, target=ms.ClassScore([1], "none"))
    (expected,) = method.explain(image[None], Brightness(3), cases=[ms.Case("scan")])
    np.testing.assert_allclose(nib.load(path).get_fdata(), expected.standard_error[0], rtol=1e-4, atol=1e-6)
    moved = evaluator(scan, Compose([*load, Orientationd(axcodes="RAS", labels=None, **keys)]))
    ms.attach(moved, tmp_path / "moved", activation="none", **given)
    moved.run()
    found, saliency = (nib.load(tmp_path / "moved" / f"scan_{each}.nii.gz") for each in ("standard_error", "saliency"))
    assert found.shape == (9, 8, 7)
    assert_same_bits(found.affine, saliency.affine)
    turned = Compose([*load, Orientationd(axcodes="RAS", labels=None, **keys)])({"image": str(scan)})["image"]
    (expected,) = method.explain(turned[None], Brightness(3), cases=[ms.Case("scan")])
    back = nib.orientations.apply_orientation(
        expected.standard_error[0].numpy(),
        nib.orientations.ornt_transform(
            nib.orientations.io_orientation(turned.affine), nib.orientations.io_orientation(nib.load(scan).affine)
        ),
    )
    np.testing.assert_allclose(found.get_fdata(), back, rtol=1e-4, atol=1e-6)
