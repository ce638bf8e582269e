"""A map comes back to where the evidence is, whatever the preprocessing and however the scan lies in the scanner."""

import itertools
import re
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.scans import rotation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor

from monai_saliency import ClassScore, Saliencyd, region_occlusion, sliding_window
from monai_saliency.errors import CaseError, root_cause
from monai_saliency.transforms import CheckScand, LoadRegionsd, SaveSaliencyd

SHAPE = (12, 10, 9)
CENTRE = (7.3, 3.6, 4.8)  # of the planted blob, in voxels


def affine(axes: np.ndarray, origin: tuple[float, ...] = (17.0, -31.0, 5.5)) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = axes, origin
    return matrix


AFFINES = {
    "anisotropic": affine(np.diag([1.0, 1.3, 2.4])),
    "flipped": affine(np.diag([-1.5, -1.2, 1.8])),
    "permuted": affine(np.array([[0, 0, 1.6], [-1.1, 0, 0], [0, 1.9, 0]])),
    "oblique": affine(rotation(0.3, -0.2) @ np.diag([-1.1, 1.3, 2.0])),
}
# In the plane of a 2D scan, the third axis stays out of it.
AFFINES_2D = {
    "anisotropic": AFFINES["anisotropic"],
    "flipped": AFFINES["flipped"],
    "permuted": affine(np.array([[0, 1.6, 0], [-1.1, 0, 0], [0, 0, 1.0]])),
    "oblique": affine(rotation(0.3, 0.0) @ np.diag([-1.1, 1.6, 1.0])),
}


def write_scan(path: Path, matrix: np.ndarray, dims: int) -> Path:
    """A body of brightness 1 that does not fill the scan, with a bright blob; sform code 4, qform code 2."""
    shape, centre = SHAPE[:dims], CENTRE[:dims]
    index = np.moveaxis(np.indices(shape), 0, -1)
    body = (((index - np.subtract(shape, 2) / 2) / (np.subtract(shape, 1) / 2)) ** 2).sum(-1) < 1.3
    blob = 20 * np.exp(-0.5 * ((index - centre) ** 2).sum(-1))
    image = nib.Nifti1Image((body + blob).astype(np.float32), matrix)
    image.set_sform(matrix, code=4)
    image.set_qform(matrix, code=2)
    image.header.set_xyzt_units("mm", "msec")
    nib.save(image, path)
    return path


def bright(x: torch.Tensor) -> torch.Tensor:
    """A network whose score is what is much brighter than the body."""
    return (x - 3).relu().flatten(1).sum(dim=1, keepdim=True)


def steps(dims: int) -> dict[str, mt.Transform]:
    return {
        "orientation": mt.Orientationd("image", "RAS"[:dims], labels=None),
        "spacing": mt.Spacingd("image", (1.4, 1.6, 1.5)[:dims]),
        "crop": mt.CropForegroundd("image", "image", select_fn=lambda x: x > 0.5, allow_smaller=True),
        "resize": mt.Resized("image", (11, 13, 10)[:dims]),
        "pad": mt.DivisiblePadd("image", 4),
    }


def pipeline(names: tuple[str, ...], dims: int) -> mt.Compose:
    load = [mt.LoadImaged("image"), mt.EnsureChannelFirstd("image"), CheckScand("image", spatial_dims=dims)]
    return mt.Compose([*load, *(steps(dims)[name] for name in names)])


def explain_and_save(scan: Path, preprocessing: mt.Compose, output_dir: Path) -> nib.Nifti1Image:
    explain = sliding_window(2, 1, target=ClassScore([0], "none"), mask_batch_size=512)
    chain = mt.Compose(
        [
            preprocessing,
            Saliencyd("image", bright, explain, names="saliency"),
            mt.Invertd("saliency", preprocessing, orig_keys="image", nearest_interp=False),
            SaveSaliencyd("saliency", output_dir, picture=False),
        ]
    )
    return nib.load(chain({"image": str(scan), "case": "scan"})["saliency_path"])


def check(saved: nib.Nifti1Image, scan: Path, dims: int, limit: float = 0.5) -> None:
    """Header and place: the map's centre of mass lies within ``limit`` voxels of the blob."""
    original = nib.load(scan)
    assert saved.shape == original.shape == SHAPE[:dims]
    assert np.array_equal(saved.affine, original.affine)
    assert (int(saved.header["sform_code"]), int(saved.header["qform_code"])) == (4, 2)
    assert np.array_equal(saved.get_qform(), original.get_qform())
    assert saved.header.get_xyzt_units() == ("mm", "msec")
    saliency = saved.get_fdata()
    found = (np.indices(saliency.shape) * saliency).reshape(dims, -1).sum(1) / saliency.sum()
    # Half a voxel by default, so that a voxel's centre is not taken for its corner.
    assert np.abs(found - CENTRE[:dims]).max() < limit, found
    to_mm = [nib.affines.apply_affine(saved.affine, [*v, *[0] * (3 - dims)]) for v in (found, CENTRE[:dims])]
    assert np.linalg.norm(np.subtract(*to_mm)) < nib.affines.voxel_sizes(saved.affine)[:dims].max()


# None, each, each pair, and all. Three and four, in any order: the test below.
COMBINATIONS = [
    names
    for count in (0, 1, 2, 5)
    for names in itertools.combinations(("orientation", "spacing", "crop", "resize", "pad"), count)
]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", AFFINES)
def test_a_planted_blob_comes_back_through_each_combination(kind: str, dims: int, tmp_path: Path) -> None:
    matrix = (AFFINES_2D if dims == 2 else AFFINES)[kind]
    scan = write_scan(tmp_path / ("scan.nii" if dims == 2 else "scan.nii.gz"), matrix, dims)
    for names in COMBINATIONS:
        check(explain_and_save(scan, pipeline(names, dims), tmp_path / "out"), scan, dims)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.sampled_from(sorted(steps(3))), unique=True, max_size=5).map(tuple),
    angles=st.tuples(st.floats(-0.7, 0.7), st.floats(-0.7, 0.7)),
    spacing=st.tuples(*[st.floats(0.8, 2.5)] * 3),
    order=st.permutations(range(3)),
    flips=st.tuples(*[st.sampled_from([-1, 1])] * 3),
)
def test_in_any_order_of_steps_and_any_pose(
    names: tuple[str, ...],
    angles: tuple[float, float],
    spacing: tuple[float, ...],
    order: list[int],
    flips: tuple[int, ...],
    tmp_path: Path,
) -> None:
    axes = (rotation(*angles) @ np.diag(np.multiply(spacing, flips)))[:, order]
    scan = write_scan(tmp_path / "scan.nii.gz", affine(axes), 3)
    # Where the network's voxels are coarser, the place is known in these: still less than half of one.
    seen = pipeline(names, 3)({"image": str(scan), "case": "scan"})["image"]
    coarser = nib.affines.voxel_sizes(seen.affine.numpy()).max() / min(spacing)
    check(explain_and_save(scan, pipeline(names, 3), tmp_path / "out"), scan, 3, max(0.5, 0.4 * coarser))


def shifted(x: MetaTensor) -> MetaTensor:
    x.affine[0, 3] += 1
    return x


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            mt.Lambdad("image", lambda x: x[:, 2:]),
            r"the map of shape \(10, 10, 9\), .* does not lie on the scan's grid",
        ),
        (mt.Lambdad("image", shifted), r"affine .* does not lie on the scan's grid .*, so it is not saved"),
    ],
    ids=["crop", "shift"],
)
def test_what_inversion_does_not_restore_is_not_saved(step: mt.Transform, message: str, tmp_path: Path) -> None:
    scan = write_scan(tmp_path / "scan.nii.gz", AFFINES["oblique"], 3)
    with pytest.raises(RuntimeError) as caught:
        explain_and_save(scan, mt.Compose([*pipeline((), 3).transforms, step]), tmp_path / "out")
    cause = root_cause(caught.value)
    assert isinstance(cause, CaseError)
    assert re.search(f"case scan: .*{message}", str(cause)), str(cause)
    assert not (tmp_path / "out").exists()


class TestLoadRegionsd:
    """Labels of any grid come to lie on the image where they lie in the scanner."""

    def blob_label(self, path: Path, matrix: np.ndarray, shape: tuple[int, ...]) -> Path:
        """Label 3 within 4 mm of the blob, 7 elsewhere, on a grid of its own."""
        place = nib.affines.apply_affine(AFFINES["oblique"], CENTRE)
        mm = nib.affines.apply_affine(matrix, np.moveaxis(np.indices(shape), 0, -1))
        near = np.linalg.norm(mm - place, axis=-1) < 4
        nib.save(nib.Nifti1Image(np.where(near, 3, 7).astype(np.uint8), matrix), path)
        return path

    @pytest.mark.parametrize("own_grid", [False, True])
    @pytest.mark.parametrize("names", [(), ("orientation", "spacing", "crop", "resize", "pad")])
    def test_the_blobs_region_takes_the_whole_score(self, own_grid: bool, names: Any, tmp_path: Path) -> None:
        scan = write_scan(tmp_path / "scan.nii.gz", AFFINES["oblique"], 3)
        corner = nib.affines.apply_affine(AFFINES["oblique"], CENTRE) - 25
        grid = (affine(np.eye(3), tuple(corner)), (50, 50, 50)) if own_grid else (AFFINES["oblique"], SHAPE)
        label = self.blob_label(tmp_path / "label.nii.gz", *grid)
        preprocessing = mt.Compose([pipeline(names, 3), LoadRegionsd()])
        explain = region_occlusion(target=ClassScore([0], "none"))
        chain = mt.Compose(
            [
                preprocessing,
                Saliencyd("image", bright, explain, names="saliency", label_key="regions"),
                mt.Invertd("saliency", preprocessing, orig_keys="image", nearest_interp=True),
                SaveSaliencyd("saliency", tmp_path / "out", picture=False),
            ]
        )
        item = preprocessing({"image": str(scan), "label": str(label), "case": "scan"})
        assert set(item["regions"].unique().tolist()) <= {0.0, 3.0, 7.0}
        near = item["regions"] == 3
        worth = float((item["image"] - 3).relu()[near].sum())
        assert worth > 0.9 * float((item["image"] - 3).relu().sum())
        saved = nib.load(chain({"image": str(scan), "label": str(label), "case": "scan"})["saliency_path"]).get_fdata()
        mm = nib.affines.apply_affine(AFFINES["oblique"], np.moveaxis(np.indices(SHAPE), 0, -1))
        distance = np.linalg.norm(mm - nib.affines.apply_affine(AFFINES["oblique"], CENTRE), axis=-1)
        # One voxel's diagonal, 2.6 mm, about the region's border, nearest neighbour may fall on either side.
        np.testing.assert_allclose(saved[distance < 1.4], worth, rtol=1e-4)
        rest = float((item["image"] - 3).relu()[item["regions"] == 7].sum())
        assert set(np.unique(saved[distance > 6.6].round(3))) <= {0.0, round(rest, 3)}

    def test_errors(self, tmp_path: Path) -> None:
        image = pipeline((), 3)({"image": str(write_scan(tmp_path / "scan.nii", np.eye(4), 3))})["image"]
        with pytest.raises(CaseError, match="case s1: it has no label map"):
            LoadRegionsd()({"image": image, "label": "", "case": "s1"})
        nib.save(nib.Nifti1Image(np.ones((4, 4, 4, 2), np.uint8), np.eye(4)), tmp_path / "two.nii")
        with pytest.raises(
            CaseError, match=r"case s1: its label map .*two.nii cannot be used: .*2 channels, and must have 1 here"
        ):
            LoadRegionsd()({"image": image, "label": str(tmp_path / "two.nii"), "case": "s1"})
        (tmp_path / "cut.nii.gz").write_bytes(b"x")
        with pytest.raises(CaseError, match=r"case s1: its label map .*cut.nii.gz cannot be used: .* gzip"):
            LoadRegionsd()({"image": image, "label": str(tmp_path / "cut.nii.gz"), "case": "s1"})
        for value, words in ((np.nan, "that are not whole numbers, NaN"), (1e20, ".* too large for its type")):
            nib.save(nib.Nifti1Image(np.full((4, 4, 4), value), np.eye(4)), tmp_path / "wild.nii")
            with pytest.raises(
                CaseError, match=f"case s1: its label map .*wild.nii cannot be used: .*has values {words}"
            ):
                LoadRegionsd()({"image": image, "label": str(tmp_path / "wild.nii"), "case": "s1"})
        # Labels of an atlas that float32 would round to one.
        voxels = np.where(np.indices(image.shape[1:])[0] % 2, 614454277, 614454278).astype(np.int32)
        nib.save(nib.Nifti1Image(voxels, image.affine.numpy()), tmp_path / "atlas.nii")
        found = LoadRegionsd()({"image": image, "label": str(tmp_path / "atlas.nii"), "case": "s1"})["regions"]
        assert found.unique().tolist() == [614454277, 614454278]
        with pytest.raises(ValueError, match="`names` must name one place for each of the keys"):
            LoadRegionsd(["a", "b"], names="x")
