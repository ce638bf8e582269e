"""xaitk-saliency's classes as `--method` in other people's bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
from helpers.files import rows_of
from helpers.layouts import Bundle

STACK = "xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise.RISEStack"


def voxels_of(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(folder.rglob("*_saliency.nii.gz")):
        found[path.name] = np.asanyarray(nib.load(path).dataobj)
    return found


def test_a_whole_method_by_the_overlay(make: Callable[[str], Bundle], tmp_path: Path) -> None:
    """RISE of both packages, with the same masks: the one scales its maps."""
    bundle = make("breast_density_classification")
    shared = {"saliency_p1": 0.4, "saliency_seed": 3, "saliency_trust": True, "saliency_trust_steps": 4}
    theirs = {"saliency_method": STACK, "saliency_n": 12, "saliency_s": 4}
    ours = {"saliency_method": "rise", "saliency_num_masks": 12, "saliency_grid_size": 4, "saliency_form": "debiased"}
    folders = {}
    for name, method in {"theirs": theirs, "ours": ours}.items():
        folders[name] = tmp_path / name
        bundle.explain(few_masks=False, saliency_dir=str(folders[name]), **shared, **method)
    expected, found = voxels_of(folders["ours"]), voxels_of(folders["theirs"])
    assert found.keys() == expected.keys() != set()
    for name, saliency in expected.items():
        np.testing.assert_allclose(found[name], saliency / np.abs(saliency).max(), rtol=0, atol=1e-4)
    rows = rows_of(folders["theirs"] / "summary.csv")
    assert [row["forwards"] for row in rows] == ["14"] * len(rows)  # the image too, once for each
    assert not (folders["theirs"] / "failures.csv").exists()
