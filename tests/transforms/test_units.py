"""Scans whose headers count in micrometres or metres are explained as the same scans in mm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.scans import OBLIQUE, write_scan
from monai.data import Dataset, MetaTensor, decollate_batch, list_data_collate
from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged, Spacingd

import monai_saliency as ms
from monai_saliency.bundle.placement import Placement
from monai_saliency.cases import affine_in_mm, image_spacing
from monai_saliency.errors import CaseError
from monai_saliency.handlers.summary import summarize
from monai_saliency.metrics.agreement import read_map
from monai_saliency.storage.files import scan_loader
from monai_saliency.transforms import CheckScand, LoadRegionsd, Saliencyd, SaveSaliencyd
from monai_saliency.transforms.regions import region_rows

SHAPE = (14, 12, 9)
UNITS = {"micron": 1000.0, "meter": 0.001, "unknown": 1.0}
WINDOWS = ms.sliding_window(10, 6, window_unit="mm", target=ms.ClassScore([0], "none"))


def score(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).square().mean(1, keepdim=True)


def in_unit(path: str, unit: str) -> str:
    """A copy of a file with the same place, in another unit."""
    image = nib.load(path)
    affine = np.diag([*[UNITS[unit]] * 3, 1]) @ image.affine
    other = nib.Nifti1Image(np.asarray(image.dataobj), affine)
    other.set_sform(affine, 2)
    other.set_qform(affine, 1, strip_shears=True)
    other.header.set_xyzt_units(unit, "sec")
    place = f"{path.removesuffix('.nii')}_{unit}.nii"
    nib.save(other, place)
    return place


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    values = np.zeros(SHAPE, np.uint8)
    values[3:8, 2:9, 4:7] = 2
    nib.save(nib.Nifti1Image(values, OBLIQUE), tmp_path / "label.nii")
    return str(write_scan(tmp_path / "ct.nii", SHAPE, OBLIQUE)), str(tmp_path / "label.nii")


def explained(image: str, label: str) -> dict[str, Any]:
    """Windows in mm on voxels of 2 mm, placed and saved; and the regions."""
    steps = [scan_loader("image"), EnsureChannelFirstd("image"), CheckScand("image"), Spacingd("image", (2.0,) * 3)]
    before = Compose([*steps, LoadRegionsd()])
    after = [Saliencyd("image", score, WINDOWS, "saliency"), Invertd("saliency", before, "image", False)]
    save = SaveSaliencyd("saliency", Path(image).parent, picture=False)
    return Compose([before, *after, save])({"image": image, "label": label, "case": Path(image).stem})


def test_images_that_were_stacked_have_no_place() -> None:
    """torch.stack keeps the affine and file of the first alone, MONAI's function each."""
    image = torch.rand(1, 14, 12, 12)
    first, second = (MetaTensor(image * k, torch.eye(4) * k, meta={"filename_or_obj": f"{k}.nii"}) for k in (1, 2))
    explain = ms.sliding_window(4, 4, target=ms.ClassScore([0], "none"))
    apart = [explain(each[None].as_tensor(), score)[0] for each in (first, second)]
    for make in (torch.stack, lambda each: torch.cat([each[0][None], each[1][None]])):
        with pytest.warns(UserWarning, match="a batch of 2 images has the affine and file of the first one only"):
            maps = explain(make([first, second]), score)
        assert not isinstance(maps, MetaTensor)
        torch.testing.assert_close(maps, torch.stack(apart))
        with pytest.warns(UserWarning, match="collate"), pytest.raises(CaseError, match=r"image 0 of the batch: .* mm"):
            WINDOWS(make([first, second]), score)
    batch = list_data_collate([first, second])
    assert [image_spacing(WINDOWS(batch, score), index) for index in (0, 1)] == [(1, 1, 1), (2, 2, 2)]
    assert [each.name for each in WINDOWS.explain(batch, score)] == ["1.nii", "2.nii"]


@pytest.mark.parametrize(("unit", "label_unit"), [("micron", "unknown"), ("meter", "micron"), ("unknown", "meter")])
def test_the_same_scan_in_another_unit(
    unit: str, label_unit: str, files: tuple[str, str], recwarn: pytest.WarningsRecorder
) -> None:
    mine, image, label = explained(*files), in_unit(files[0], unit), in_unit(files[1], label_unit)
    other = explained(image, label)
    said = {str(each.message).partition(":")[0] for each in recwarn if "converted to mm" in str(each.message)}
    assert said == {each for each in (image, label) if "unknown" not in each}
    (want, place), (found, other_place) = (read_map(each["saliency_path"]) for each in (mine, other))
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=1e-6 * want.max())
    np.testing.assert_allclose(other_place, place, rtol=1e-5, atol=1e-4)
    # The file has the scan's own header, so that viewers lay it over the scan.
    saved, scan = nib.load(other["saliency_path"]), nib.load(image)
    assert np.array_equal(saved.affine, scan.affine)
    assert saved.header.get_xyzt_units() == scan.header.get_xyzt_units() == (unit, "sec")
    np.testing.assert_array_equal(other["regions"].numpy(), mine["regions"].numpy())
    explain = ms.region_occlusion(target=ms.ClassScore([0], "none"))
    (regions,) = explain.explain(other["image"][None], score, cases=[ms.Case("ct", labels=other["regions"])])
    (row,) = region_rows(regions, image_spacing(other["image"][None]))
    assert row["volume_ml"] == pytest.approx(int((other["regions"] == 2).sum()) * 8 / 1000, rel=1e-4)
    maps = other["saliency"]
    (row,) = summarize("ct", regions, maps.numpy(), affine_in_mm(maps), label, image=other["image"])
    peak = nib.affines.apply_affine(OBLIQUE, np.unravel_index(want.argmax(), SHAPE))
    np.testing.assert_allclose([row[f"peak_{axis}_mm"] for axis in "xyz"], peak, atol=0.011)


def test_scans_that_were_not_read_in_mm(
    files: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in other people's bundles: sizes in mm and the place of a map are right; a check before Spacingd refuses."""
    image, load = in_unit(files[0], "micron"), Compose([LoadImaged("image"), EnsureChannelFirstd("image")])
    batch = list_data_collate([load({"image": each, "case": "ct"}) for each in (files[0], image)])
    want = nib.affines.voxel_sizes(OBLIQUE)
    np.testing.assert_allclose([image_spacing(batch["image"], index) for index in (0, 1)], [want] * 2, rtol=1e-5)
    _, item = decollate_batch(batch)
    maps = WINDOWS(batch["image"], score)
    np.testing.assert_allclose(maps[0].numpy(), maps[1].numpy(), rtol=1e-5)
    done = SaveSaliencyd("saliency", tmp_path)(item | {"saliency": item["image"]})
    assert np.array_equal(nib.load(done["saliency_path"]).affine, nib.load(image).affine)
    loader = SimpleNamespace(dataset=Dataset([{"image": image}], load))
    assert Placement(loader, "image").problem_of(item, False) is None
    assert f"{image}: by its header, 1 in its affine is 0.001 mm: peaks and sizes in mm" in caplog.text
    with pytest.raises(CaseError, match=r"ct: .*, 1 in its affine is 0.001 mm, .*: load it by .*files.scan_loader"):
        CheckScand("image")(item)
