"""Our own bundle on photographs, NRRD and MetaImage, as the README says how."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.own_bundle import run
from helpers.scans import MARK, mark_in_picture, radiograph
from PIL import Image

FLAT = {"network_def": {"_target_": "helpers.brightness.Brightness"}, "spatial_dims": 2, "spatial_size": [32, 24]}
FLAT |= {"pixdim": None, "window_size": 6, "stride": 3, "classes": [1], "activation": "none"}
SIZES = {"a.png": (31, 45), "site/b.png": (37, 40), "site/b.jpg": (37, 40), "c.tiff": (41, 44), "d.png": (29, 51)}
SIZES |= {"e.jpg": (33, 47)}


def radiographs(folder: Path) -> Path:
    for name, size in SIZES.items():
        radiograph(folder / name, *size, bits=16 if name in ("a.png", "c.tiff") else 8, colours=name == "d.png")
    exif = Image.Exif()
    exif[274] = 6  # to be turned clockwise
    with Image.open(folder / "e.jpg") as upright:
        upright.transpose(Image.Transpose.ROTATE_90).save(folder / "e.jpg", exif=exif, quality=95)
    return folder


def test_radiographs_get_maps_that_lie_as_they_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """8 and 16 bits, odd sizes, gray and colours, one that lies on its side, two files that differ in their suffix."""
    rows = run(radiographs(tmp_path / "in"), tmp_path / "out", "none", picture=True, **FLAT)
    assert "e.jpg is turned by its EXIF orientation" in caplog.text
    names = {
        "a": "a.png",
        "c": "c.tiff",
        "d": "d.png",
        "e": "e.jpg",
        "site/b.jpg": "site/b.jpg",
        "site/b.png": "site/b.png",
    }
    assert [row["case"] for row in rows] == [*names]
    for row, name in zip(rows, names.values(), strict=True):
        saved = nib.load(tmp_path / "out" / f"{row['case']}_saliency.nii.gz")
        saliency = saved.get_fdata().T  # the photograph's rows and columns
        assert saliency.shape == SIZES[name]
        np.testing.assert_array_equal(saved.affine, np.eye(4))
        assert saliency[MARK].mean() > 5 * np.abs(np.delete(saliency, range(14), axis=0)).mean()
        column, line = (float(row[f"peak_{axis}_mm"]) for axis in "xy")
        assert MARK[0].start - 2 <= line < MARK[0].stop + 2
        assert MARK[1].start - 2 <= column < MARK[1].stop + 2
        middle = [(each.start + each.stop) / 2 for each in MARK]
        shown = mark_in_picture(tmp_path / "out" / f"{row['case']}_saliency.png", SIZES[name])
        assert np.abs(np.subtract(shown, middle)).max() < 2.5


DIRECTION = np.array([[0.0, -0.8, 0.6], [1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
SPACING, ORIGIN, SHAPE = (1.5, 2.0, 2.5), (-12.0, 30.0, 7.0), (22, 19, 15)


@pytest.mark.slow
def test_scans_in_lps_get_maps_that_lie_on_them(tmp_path: Path) -> None:
    """NRRD and MetaImage, in one file and in two, oblique: the same map on the same place as of the scan as NIfTI."""
    itk = pytest.importorskip("itk")
    voxels = np.random.default_rng(0).uniform(50, 60, SHAPE).astype(np.float32)
    voxels[3:8, 10:15, 2:7] = 900
    image = itk.image_from_array(np.ascontiguousarray(voxels.T))
    image.SetSpacing(SPACING)
    image.SetOrigin(ORIGIN)
    image.SetDirection(itk.matrix_from_array(DIRECTION))
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = DIRECTION @ np.diag(SPACING), ORIGIN
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    (tmp_path / "in").mkdir()
    for suffix in ("mha", "mhd", "nrrd", "nhdr"):
        itk.imwrite(image, str(tmp_path / "in" / f"{suffix}.{suffix}"))
    nib.save(nib.Nifti1Image(voxels, affine), tmp_path / "in" / "nifti.nii.gz")
    settings = FLAT | {"network_def": {"_target_": "helpers.brightness.Brightness", "spatial_dims": 3, "window": 3}}
    settings |= {"spatial_dims": 3, "pixdim": [2.0, 2.0, 2.0], "spatial_size": [24, 24, 24], "stride": 6}
    rows = run(tmp_path / "in", tmp_path / "out", "none", picture=True, **settings)
    assert [row["case"] for row in rows] == ["mha", "mhd", "nhdr", "nifti", "nrrd"]
    there = np.array(image.TransformIndexToPhysicalPoint([5, 12, 4])) * (-1, -1, 1)
    expected = nib.load(tmp_path / "out" / "nifti_saliency.nii.gz")
    for row in rows:
        saliency = nib.load(tmp_path / "out" / f"{row['case']}_saliency.nii.gz")
        np.testing.assert_allclose(saliency.affine, affine, atol=1e-4)
        np.testing.assert_allclose(saliency.get_fdata(), expected.get_fdata(), atol=1e-4)
        assert np.linalg.norm([float(row[f"peak_{axis}_mm"]) for axis in "xyz"] - there) < 9
        assert (tmp_path / "out" / f"{row['case']}_saliency.png").is_file()
    assert expected.get_fdata().std() > 0
