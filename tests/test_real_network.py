"""A network that others have trained, on a real brain, through our transforms: ``tutorials/explain_deepbet.py``."""

import importlib.metadata
import itertools
import runpy
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.paths import ROOT

SIZE, WINDOW = 96, 32  # a smaller head than deepbet's 128, which the network finds as well in a third of the time


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    try:
        importlib.metadata.distribution("deepbet")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps deepbet==1.0.2, for its trained networks")
    pytest.importorskip("nilearn", reason='needs pip install "monai-saliency[demo]"')
    return runpy.run_path(str(ROOT / "tutorials" / "explain_deepbet.py"))


@pytest.mark.slow
def test_deepbet_on_a_real_brain(example: dict[str, Any], tmp_path: Path) -> None:
    path = example["write_scan"](tmp_path / "mni152.nii.gz")
    scan = nib.load(path)
    axes = scan.affine[:3, :3] / np.linalg.norm(scan.affine[:3, :3], axis=0)
    assert scan.get_data_dtype() == np.int16
    assert (np.abs(axes).max(axis=0) < 0.99).sum() >= 2  # oblique
    case = example["explain"](path, tmp_path / "maps", SIZE, WINDOW)
    image, found = case["image"].as_tensor()[None], case["saliency"].as_tensor()[0]
    network = example["load_network"]()
    brain = image[0, 0] > 0.05  # the template has no skull
    with torch.no_grad():
        probability = network(image)[0, 1]
    region = probability > 0.5
    overlap = 2 * (region & brain).sum() / (region.sum() + brain.sum())
    assert overlap > 0.95, "the network does not find the brain, so that nothing is shown"
    # Some windows in plain loops: at the centre, beside it, and in a corner.
    for start in ((1, 1, 1), (1, 2, 1), (0, 0, 0)):
        box = tuple(slice(WINDOW * at, WINDOW * (at + 1)) for at in start)
        hidden = image.clone()
        hidden[0, 0][box] = 0
        with torch.no_grad():
            drop = float(probability[region].double().mean() - network(hidden)[0, 1][region].double().mean())
        torch.testing.assert_close(found[box], torch.full_like(found[box], drop), rtol=1e-4, atol=1e-5)
    # What makes it the brain is the brain: the box that matters most holds it, and boxes beside it do nothing.
    corner = [at // WINDOW * WINDOW for at in np.unravel_index(int(found.argmax()), found.shape)]
    peak = tuple(slice(at, at + WINDOW) for at in corner)
    assert float(brain[peak].float().mean()) > 0.25
    assert float(found[brain].mean()) > 2 * float(found[~brain].mean())
    # The map lies on the scan: at each box's middle, in mm, it is what was found for the box.
    saved = nib.load(tmp_path / "maps" / "mni152_saliency.nii.gz")
    assert saved.shape == scan.shape
    np.testing.assert_allclose(saved.affine, scan.affine, atol=1e-4)
    values = saved.get_fdata()
    for start in itertools.product(range(SIZE // WINDOW), repeat=3):
        middle = np.array([WINDOW * at + WINDOW // 2 for at in start])
        place = case["image"].affine.numpy() @ [*middle, 1]
        voxel = np.rint(np.linalg.inv(scan.affine) @ place).astype(int)[:3]
        assert (voxel >= 0).all()
        assert (voxel < scan.shape).all()
        np.testing.assert_allclose(values[tuple(voxel)], found[tuple(middle)], rtol=1e-3, atol=1e-6)
    assert values.std() > 0
    assert list((tmp_path / "maps").glob("*.png"))
