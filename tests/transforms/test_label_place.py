"""Where a label map lies: decided and checked as for a scan, in whatever way it comes in."""

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import rows_of
from helpers.scans import LPS, OBLIQUE, damage, write_scan
from helpers.tolerances import SINGLE, assert_close
from monai.data import Dataset, MetaTensor, decollate_batch, list_data_collate
from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged, Spacingd
from PIL import Image

import monai_saliency as ms
from monai_saliency.bundle.placement import Placement
from monai_saliency.cases import Case
from monai_saliency.data import CachedDataset, CohortLoader
from monai_saliency.errors import AdviceError, CaseError, root_cause
from monai_saliency.handlers.summary import summarize
from monai_saliency.handlers.trust import label_on_grid
from monai_saliency.storage.label_maps import load_label
from monai_saliency.storage.scans import load_scan, scan_loader
from monai_saliency.storage.tables import Failures
from monai_saliency.transforms import CheckScand, LoadRegionsd, Saliencyd, SaveSaliencyd
from monai_saliency.transforms.regions import region_rows
from monai_saliency.utils.affines import affine_in_mm, image_spacing

pytestmark = pytest.mark.filterwarnings("default:the label map")  # one of our own, which are errors in tests

SHAPE = (8, 6, 5)
BOX = np.s_[2:5, 1:4, 1:3]
EXPLAIN = ms.region_occlusion(target=ms.ClassScore([0], "none"))
PROBLEM = r"label\.nii cannot be used: its sform and the qform that MONAI reads put voxels up to .* mm apart"


def total(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).sum(1, keepdim=True)


def a_label(path: Path, affine: np.ndarray = LPS, spoilt: str = "") -> str:
    """Label 3 in the box, with a header that gives it two places where it is spoilt."""
    values = np.zeros(SHAPE, np.uint8)
    values[BOX] = 3
    image = nib.Nifti1Image(values, affine)
    image.set_sform(affine, 1)
    image.set_qform(affine, 1)
    if spoilt == "pixdim":
        image.set_qform(np.eye(4), 0, update_affine=False)
        image.header["pixdim"][1:4] = 1
    elif spoilt == "qform":
        image.set_qform(affine @ np.diag([2.0, 1, 1, 1]), 1, update_affine=False)
    nib.save(image, path)
    return str(path)


def a_case(folder: Path, **label: Any) -> dict[str, Any]:
    scan = write_scan(folder / "ct.nii.gz", SHAPE, LPS)
    return {"image": str(scan), "label": a_label(folder / "label.nii", **label), "case": "ct"}


def loaded(item: dict[str, Any], *more: Any) -> dict[str, Any]:
    steps = [scan_loader("image"), mt.EnsureChannelFirstd("image"), *more]
    try:
        return mt.Compose(steps)(item)
    except RuntimeError as error:
        raise root_cause(error) from None


def peak_in_label(item: dict[str, Any], image: MetaTensor, *voxel: int) -> Any:
    maps = np.zeros(image.shape, np.float32)
    maps[(0, *voxel)] = 1
    (explanation,) = EXPLAIN.explain(image.as_tensor()[None], total, cases=[Case("x", labels=torch.ones(image.shape))])
    (row,) = summarize("ct", explanation, maps, affine_in_mm(image), item["label"], image=image)
    return row["peak_in_label"]


@pytest.mark.parametrize("spoilt", ["pixdim", "qform"])
def test_a_header_of_two_places_is_refused_on_each_way_in(spoilt: str, tmp_path: Path, caplog: Any) -> None:
    item = a_case(tmp_path, spoilt=spoilt)
    with pytest.raises(CaseError, match=rf"case ct: its label map .*{PROBLEM}"):
        loaded(item, LoadRegionsd())
    both = mt.Compose([mt.LoadImaged(["image", "label"]), mt.EnsureChannelFirstd(["image", "label"])])(item)
    with pytest.raises(CaseError, match=rf"case ct: its label map .*{PROBLEM}"):
        EXPLAIN.explain(both["image"][None], total, cases=[Case("ct", labels=both["label"])])
    image = loaded(item)["image"]
    for label in (item["label"], both["label"]):
        with pytest.raises(AdviceError, match="its sform and the qform"):
            label_on_grid({"image": image, "label": label}, "image")()
    with caplog.at_level(logging.WARNING):
        SaveSaliencyd("saliency", tmp_path / "out")(item | {"saliency": MetaTensor(image)})
        assert peak_in_label(item, image, 3, 2, 1) == ""
    assert [line.partition(", so ")[0] for line in caplog.messages] == [
        f"case ct: its label {item['label']} cannot be used"
    ] * 2


def test_the_cohort_goes_on(tmp_path: Path) -> None:
    cases = [a_case(tmp_path), a_case(tmp_path) | {"case": "bad", "label": a_label(tmp_path / "b.nii", spoilt="qform")}]
    cases.append(cases[0] | {"case": "damaged", "label": str(write_scan(tmp_path / "d.nii.gz", SHAPE, LPS))})
    damage(tmp_path / "d.nii.gz")
    steps = [scan_loader("image"), mt.EnsureChannelFirstd("image"), CheckScand("image"), LoadRegionsd()]
    failures = Failures(tmp_path / "failures.csv")
    (batch,) = CohortLoader(CachedDataset(cases, mt.Compose(steps), "none"), failures)
    image = nib.load(cases[0]["image"]).get_fdata()
    (explanation,) = EXPLAIN.explain(batch["image"], total, cases=[Case("ct", labels=batch["regions"][0])])
    (row,) = region_rows(explanation, (1.5, 1.5, 3.0))
    assert (row["region"], row["volume_ml"]) == (3, round(18 * 6.75 / 1000, 6))
    np.testing.assert_allclose(row["saliency"], image[BOX].sum(), rtol=1e-5)
    failed = {row["case"]: row["error"] for row in rows_of(failures.path)}
    assert sorted(failed) == ["bad", "damaged"]
    assert "b.nii cannot be used: its sform" in failed["bad"]
    assert "d.nii.gz is damaged (CRC check failed" in failed["damaged"]


def test_another_affine_under_the_scans_shape_is_reported(tmp_path: Path) -> None:
    """A label a little beside the scan lies where its header says, one that reaches no voxel is refused."""
    beside = LPS + np.array([[0, 0, 0, -1.5]] + [[0.0] * 4] * 3)  # one voxel further in the first axis
    item = a_case(tmp_path, affine=beside)
    with pytest.warns(UserWarning, match=r"label.nii has the shape of its scan .*ct.nii.gz and another affine.*1.5 mm"):
        turned = loaded(item, mt.Orientationd("image", "SAR", labels=None), LoadRegionsd())
    expected = np.zeros(SHAPE)
    expected[3:6, 1:4, 1:3] = 3
    expected = expected[::-1, ::-1].transpose(2, 1, 0)  # of LPS
    np.testing.assert_array_equal(turned["regions"][0].numpy(), expected)
    inside = label_on_grid({"image": turned["image"], "label": item["label"]}, "image")
    np.testing.assert_array_equal(inside()[0].numpy(), expected != 0)
    item = a_case(tmp_path, affine=np.diag([1.0, 1, 1, 1]))
    with (
        pytest.warns(UserWarning, match="another affine"),
        pytest.raises(
            CaseError, match=r"case ct: .*label.nii cannot be used: all of its labels lie outside the prepro"
        ),
    ):
        loaded(item, LoadRegionsd())
    item = a_case(tmp_path)
    image, label = loaded(item)["image"], nib.load(item["label"])
    nib.save(label.as_reoriented(np.array([[2, 1], [1, -1], [0, -1]])), tmp_path / "turned.nii")
    nib.save(label.as_reoriented(np.array([[0, 1], [1, -1], [2, -1]])), tmp_path / "flipped.nii")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the label map")
        for name in ("label.nii", "turned.nii", "flipped.nii"):
            load_label(tmp_path / name, image)


def test_labels_that_the_user_loads_move_with_the_image(tmp_path: Path) -> None:
    both, item = ["image", "label"], a_case(tmp_path)
    right = nib.load(item["image"]).get_fdata()[BOX].sum()
    load, saliency = (
        [mt.LoadImaged(both), mt.EnsureChannelFirstd(both)],
        Saliencyd("image", total, EXPLAIN, "map", None, "label"),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the label map")
        good = mt.Compose([*load, mt.Flipd(both, 0)])(item)
        assert_close(saliency(good)["map"].max(), right)
    bad = mt.Compose([*load, mt.Flipd("image", 0)])(item)
    words = r"its affine .* puts voxels up to 10.5 mm from the voxels of .*: give the label's key to each step"
    with pytest.raises(CaseError, match=f"label.nii cannot be used: {words}"):
        saliency(bad)
    batch = list_data_collate([good, bad])["image"]
    with pytest.raises(CaseError, match=f"case second: .*{words}"):
        EXPLAIN.explain(batch, total, cases=[Case("first", labels=good["label"]), Case("second", labels=bad["label"])])
    with pytest.raises(AdviceError, match=words):
        label_on_grid(bad, "image")()
    # A tool has dropped the label's affine: voxel by voxel it lies right, unless the affines decide on a step.
    item |= {"label": a_label(tmp_path / "dropped.nii", np.eye(4))}
    with pytest.warns(UserWarning, match=r"dropped.nii: its affine .*It is used voxel by voxel; correct its header"):
        assert_close(saliency(mt.Compose(load)(item))["map"].max(), right)
    with pytest.raises(CaseError, match=r"dropped.nii cannot be used: its affine"):
        saliency(mt.Compose([*load, mt.Orientationd(both, "RAS", labels=None)])(item))


def test_an_image_whose_place_is_lost(tmp_path: Path) -> None:
    item = a_case(tmp_path)
    with pytest.raises(CaseError, match=r"the preprocessed image has no affine: keep its meta data \(track_meta\)"):
        loaded(item, mt.ToTensord("image", track_meta=False), LoadRegionsd())
    item["image"] = str(write_scan(tmp_path / "plane.nii", (8, 6, 1), LPS))
    with pytest.raises(CaseError, match="it is a volume, and of the image, a plane, it is not known which"):
        loaded(item, mt.SqueezeDimd("image", -1), LoadRegionsd())


PLANES = {
    "axial": np.diag([1.0, 1.3, 3, 1]),
    "coronal": np.array([[1.0, 0, 0, 5], [0, 0, 3, 6], [0, 1.3, 0, 7], [0, 0, 0, 1]]),
    "sagittal": np.array([[0.0, 0, 3, 5], [1, 0, 0, 6], [0, 1.3, 0, 7], [0, 0, 0, 1]]),
    "oblique": np.array([[0.8, 0.468, 1.44, 5], [-0.6, 0.624, 1.92, 6], [0, -1.04, 1.8, 7], [0, 0, 0, 1]]),
}


@pytest.mark.parametrize("plane", PLANES)
def test_a_plane_whose_thin_axis_is_squeezed(plane: str, tmp_path: Path) -> None:
    """Its voxels keep their sizes of 1 and 1.3 mm and their labels, whichever way the plane lies."""
    values = np.zeros((10, 12, 1), np.uint8)
    values[2:5, 7:10] = 3
    nib.save(nib.Nifti1Image(values, PLANES[plane]), tmp_path / "label.nii")
    scan = write_scan(tmp_path / "plane.nii", (10, 12, 1), PLANES[plane])
    item = {"image": str(scan), "label": str(tmp_path / "label.nii"), "case": "plane"}
    squeeze = mt.SqueezeDimd("image", 3)
    made = loaded(item, squeeze, CheckScand("image", 2), LoadRegionsd())
    np.testing.assert_array_equal(made["regions"][0].numpy(), values[..., 0])
    batch = list_data_collate([{"image": made["image"]}] * 2)["image"]
    assert image_spacing(batch, 1) == pytest.approx((1, 1.3), rel=1e-5)
    found = ms.Saliencyd("image", total, EXPLAIN, names="map", label_key="regions")(made)["map"][0].numpy()
    voxels = nib.load(scan).get_fdata()[..., 0]
    np.testing.assert_allclose(found[2:5, 7:10], voxels[2:5, 7:10].sum(), rtol=1e-4)
    resized = squeeze, mt.Resized("image", (20, 24))
    if plane in ("coronal", "sagittal"):  # MONAI has left no affine that could follow
        assert image_spacing(loaded(item, *resized)["image"][None]) is None
        with pytest.raises(CaseError, match=r"label.nii cannot be used: the image has lost where its plane lies"):
            loaded(item, *resized, LoadRegionsd())
    else:
        twice = np.kron(values[..., 0], np.ones((2, 2)))
        np.testing.assert_array_equal(loaded(item, *resized, LoadRegionsd())["regions"][0].numpy(), twice)


def test_complex_voxels_are_refused(tmp_path: Path) -> None:
    """MONAI's own loader drops one half of them."""
    nib.save(nib.Nifti1Image(np.zeros(SHAPE, np.complex64), LPS), tmp_path / "other.nii")
    item = a_case(tmp_path) | {"label": str(tmp_path / "other.nii")}
    words = "its voxels are complex numbers: save their magnitude"
    with pytest.raises(CaseError, match=f"case ct: its label map .*other.nii cannot be used: {words}"):
        loaded(item, LoadRegionsd())
    for load in (scan_loader("image"), mt.LoadImaged("image")):
        item = mt.Compose([load, mt.EnsureChannelFirstd("image")])(item | {"image": item["label"]})
        with pytest.raises(CaseError, match=f"case ct: {words}"):
            CheckScand("image")(item)


def a_photograph(folder: Path, mask: np.ndarray) -> dict[str, Any]:
    """A picture of noise, 64 rows of 48, and a mask ``(rows, columns)``."""
    pixels = np.random.default_rng(3).integers(0, 256, (64, 48), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "xray.png")
    Image.fromarray(mask).save(folder / "mask.png")
    return {"image": str(folder / "xray.png"), "label": str(folder / "mask.png"), "case": "xray"}


@pytest.mark.parametrize("factor", [0.5, 1, 4])
def test_a_mask_of_another_size_covers_the_same_part_of_a_photograph(factor: float, tmp_path: Path) -> None:
    whole = np.zeros((64, 48), np.uint8)
    whole[40:56, 8:20] = 1
    mask = whole[::2, ::2] if factor == 0.5 else np.kron(whole, np.ones((int(factor),) * 2, np.uint8))
    item = a_photograph(tmp_path, mask)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = loaded(item, CheckScand("image", 2), LoadRegionsd())
    said = [str(each.message) for each in caught if "stretched" in str(each.message)]
    sizes = f"{mask.shape[1]} x {mask.shape[0]} pixels is stretched to its scan's 48 x 64"
    assert said == [] if factor == 1 else (len(said) == 1 and sizes in said[0])
    (explanation,) = EXPLAIN.explain(case["image"].as_tensor()[None], total, cases=[Case("x", labels=case["regions"])])
    pixels = np.asarray(Image.open(item["image"]))
    assert region_rows(explanation)[0]["saliency"] == float(pixels[40:56, 8:20].sum())
    for column, row, inside in ((8, 40, True), (19, 55, True), (7, 40, False), (8, 56, False)):
        assert peak_in_label(item, case["image"], column, row) is inside
    # And under a network that sees the picture in another size.
    small = loaded(item, mt.Resized("image", (24, 32)), LoadRegionsd())["regions"][0].numpy()
    np.testing.assert_array_equal(small.T, whole[1::2, 1::2])


def test_a_mask_that_jpeg_has_changed_is_refused(tmp_path: Path) -> None:
    mask = np.kron(np.eye(2, dtype=np.uint8), np.full((32, 24), 255, np.uint8))
    item = a_photograph(tmp_path, mask) | {"label": str(tmp_path / "mask.jpg")}
    Image.fromarray(mask).save(item["label"], quality=95)  # each block of 8 x 8 pixels is of one value
    assert loaded(item, LoadRegionsd())["regions"].unique().tolist() == [0, 255]
    Image.fromarray(np.roll(mask, 3, 0)).save(item["label"], quality=95)
    with pytest.raises(CaseError, match=r"mask.jpg cannot be used: it holds \d+ labels, and JPEG has made some"):
        loaded(item, LoadRegionsd())


def test_a_mask_of_another_aspect_or_unknown_axes_is_refused(tmp_path: Path) -> None:
    item = a_photograph(tmp_path, np.ones((64, 48), np.uint8)) | {"label": str(tmp_path / "mask.npy")}
    np.save(item["label"], np.eye(64, 48, dtype=np.uint8))
    with pytest.raises(CaseError, match=r"mask.npy cannot be used: it does not say whether .*: save it as a PNG"):
        loaded(item, LoadRegionsd())
    item = a_photograph(tmp_path, np.ones((32, 32), np.uint8))
    with pytest.raises(CaseError, match=r"mask.png cannot be used: it has 32 x 32 pixels, its scan 48 x 64, .*size"):
        loaded(item, LoadRegionsd())
    item = a_photograph(tmp_path, np.ones((21, 16), np.uint8))  # 21.3 rows, rounded
    with pytest.warns(UserWarning, match="16 x 21 pixels is stretched"):
        assert loaded(item, LoadRegionsd())["regions"].all()


# Scans whose headers count in micrometres or metres are explained as the same scans in mm.
STORED = (14, 12, 9)
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
    values = np.zeros(STORED, np.uint8)
    values[3:8, 2:9, 4:7] = 2
    nib.save(nib.Nifti1Image(values, OBLIQUE), tmp_path / "label.nii")
    return str(write_scan(tmp_path / "ct.nii", STORED, OBLIQUE)), str(tmp_path / "label.nii")


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
        assert_close(maps, torch.stack(apart))
        with pytest.warns(UserWarning, match="collate"), pytest.raises(CaseError, match=r"image 0 of the batch: .* mm"):
            WINDOWS(make([first, second]), score)
    batch = list_data_collate([first, second])
    assert [image_spacing(WINDOWS(batch, score), index) for index in (0, 1)] == [(1, 1, 1), (2, 2, 2)]
    assert [each.name for each in WINDOWS.explain(batch, score)] == ["1.nii", "2.nii"]


@pytest.mark.parametrize(("unit", "label_unit"), [("micron", "unknown"), ("meter", "micron"), ("unknown", "meter")])
def test_the_same_scan_in_another_unit(unit: str, label_unit: str, files: tuple[str, str], recwarn: Any) -> None:
    mine, image, label = explained(*files), in_unit(files[0], unit), in_unit(files[1], label_unit)
    other = explained(image, label)
    said = {str(each.message).partition(":")[0] for each in recwarn if "converted to mm" in str(each.message)}
    assert said == {each for each in (image, label) if "unknown" not in each}
    ours, theirs = (load_scan(each["saliency_path"]) for each in (mine, other))
    want, found = np.asarray(ours.dataobj), np.asarray(theirs.dataobj)
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=SINGLE * want.max())
    np.testing.assert_allclose(theirs.affine, ours.affine, rtol=1e-5, atol=1e-4)
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
    peak = nib.affines.apply_affine(OBLIQUE, np.unravel_index(want.argmax(), STORED))
    np.testing.assert_allclose([row[f"peak_{axis}_mm"] for axis in "xyz"], peak, atol=0.011)


def test_scans_that_were_not_read_in_mm(files: tuple[str, str], tmp_path: Path) -> None:
    """As in other people's bundles: sizes in mm and the place of a map are right; a check before Spacingd refuses."""
    image, load = in_unit(files[0], "micron"), Compose([LoadImaged("image"), EnsureChannelFirstd("image")])
    batch = list_data_collate([load({"image": each, "case": "ct"}) for each in (files[0], image)])
    want = nib.affines.voxel_sizes(OBLIQUE)
    np.testing.assert_allclose([image_spacing(batch["image"], index) for index in (0, 1)], [want] * 2, rtol=1e-5)
    _, item = decollate_batch(batch)
    maps = WINDOWS(batch["image"], score)
    assert_close(maps[0].numpy(), maps[1].numpy())
    done = SaveSaliencyd("saliency", tmp_path)(item | {"saliency": item["image"]})
    assert np.array_equal(nib.load(done["saliency_path"]).affine, nib.load(image).affine)
    loader = SimpleNamespace(dataset=Dataset([{"image": image}], load))
    assert Placement(loader, "image").problem_of(item, False) is None
    with pytest.raises(CaseError, match=r"ct: .*, 1 in its affine is 0.001 mm, .*: load it by .*scans.scan_loader"):
        CheckScand("image")(item)
