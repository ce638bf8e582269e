"""The overlay, on small bundles with the ids and the structure of the Model Zoo's, and on others."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import contents, rows_of, scores_of, voxels
from helpers.layouts import LAYOUTS, Bundle, Layout
from helpers.own_bundle import SMALL_NET, run
from helpers.paths import BUNDLE, BUNDLES
from helpers.scans import AFFINES, damage, volume, write_scans
from monai.bundle import ConfigParser
from monai.networks.nets import DenseNet
from monai.transforms import LoadImage
from PIL import Image

from monai_saliency.__main__ import main
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.overlay import Overlay
from monai_saliency.errors import SettingError, root_cause
from monai_saliency.targets import RegionScore


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_explains_a_layout_and_leaves_its_outputs_as_they_were(
    layout: Layout, make: Callable[[str], Bundle], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = make(layout.name)
    name = "results" if layout.name == "renamed_ids" else "output_dir"
    plain, explained, maps = (tmp_path / each for each in ("plain", "explained", "maps"))
    bundle.run(**{name: str(plain)})
    written = {"saliency_picture": True, "saliency_report": True, "saliency_keeps_place": True}
    bundle.explain(**{name: str(explained)}, saliency_dir=str(maps), **written)
    assert contents(explained) == contents(plain)
    if layout.name != "renamed_ids":  # which writes nothing
        assert contents(plain)
    found = sorted(path.relative_to(maps).as_posix() for path in maps.rglob("*_saliency.nii.gz"))
    assert found == sorted(f"{case}_saliency.nii.gz" for case in bundle.scans)
    assert not (maps / "failures.csv").exists()
    for case, path in bundle.scans.items():
        check_map(maps, case, path, layout.name)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("monai_saliency: ")]
    assert len(said) == 1
    assert layout.words in said[0]


def test_an_evaluator_of_one_image_a_call(make: Callable[[str], Bundle], tmp_path: Path, caplog: Any) -> None:
    """A batch of perturbed images takes the axis of its prompts, and each row becomes a softmax over the images: images
    go through one at a time instead, and the log says so.
    """
    bundle = make("vista3d")
    bundle.explain(saliency_dir=str(tmp_path / "alone"), saliency_num_masks=8, saliency_mask_batch_size=1)
    assert "one at a time" not in caplog.text
    bundle.explain(saliency_dir=str(tmp_path / "batches"), saliency_num_masks=8, saliency_mask_batch_size=7)
    assert caplog.text.count("one at a time") == 1
    assert "in a batch with another one" in caplog.text or "fails on a batch of 7" in caplog.text
    assert voxels(tmp_path / "batches") == voxels(tmp_path / "alone") != {}
    assert not (tmp_path / "batches" / "failures.csv").exists()


def test_regions_modalities_and_units(make: Callable[[str], Bundle], tmp_path: Path) -> None:
    """What asks for more than the image: voxel sizes, regions, channels, and the scan's own intensities."""
    bundle = make("spleen_ct_segmentation")
    asked: dict[str, dict[str, Any]] = {
        "supervoxels": {"method": "region_occlusion", "num_supervoxels": 15},
        "mm": {"method": "sliding_window", "window_size": 12, "stride": 12, "window_unit": "mm"},
        "air": {"fill": -1000, "fill_unit": "scan"},
        "black": {"fill": 0},
    }
    maps = {}
    for name, settings in asked.items():
        bundle.explain(saliency_dir=str(tmp_path / name), **{f"saliency_{id}": each for id, each in settings.items()})
        assert not (tmp_path / name / "failures.csv").exists()
        for case, path in bundle.scans.items():
            scan, saliency = nib.load(path), nib.load(tmp_path / name / f"{case}_saliency.nii.gz")
            assert saliency.shape == scan.shape
            maps[name, case] = saliency.get_fdata()
            assert np.ptp(maps[name, case]) > 0
    case = next(iter(bundle.scans))
    # Flat in each supervoxel.
    assert len(np.unique(maps["supervoxels", case])) <= 16
    # The bundle clips at -57 HU and scales that to 0: air is what zero is in the network's input.
    np.testing.assert_allclose(maps["air", case], maps["black", case], atol=1e-6)
    with pytest.raises(RuntimeError) as caught:
        bundle.explain(
            saliency_dir=str(tmp_path / "no"), saliency_method="region_occlusion", saliency_label_key="organs"
        )
    assert "no label map under `saliency_label_key` 'organs'" in str(root_cause(caught.value))


def test_label_maps_of_the_batch(tmp_path: Path) -> None:
    """Their regions are hidden, with no supervoxels and no further setting."""
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, low=50, high=150) for i in range(2)]
    organs = np.zeros((8, 8, 8), np.uint8)
    organs[1:3], organs[4:7, 2:6] = 3, 8
    nib.save(nib.Nifti1Image(organs, AFFINES[1]), tmp_path / "organs.nii.gz")
    parser = small_bundle(scans, Brightness())
    parser["dataset"]["data"] = [{"image": str(s), "organs": str(tmp_path / "organs.nii.gz")} for s in scans]
    for transform in parser["preprocessing"]["transforms"]:
        transform["keys"] = ["image", "organs"]
    Overlay(tmp_path / "maps", method="region_occlusion", label_key="organs", picture=False).explain(parser)
    assert {row["forwards"] for row in rows_of(tmp_path / "maps" / "summary.csv")} == {"3"}
    for case in "01":
        saliency = nib.load(tmp_path / "maps" / f"{case}_saliency.nii.gz").get_fdata()
        assert np.all(saliency[organs == 0] == 0)
        assert len(np.unique(saliency[organs == 8])) == 1
    # As the part that is perturbed, by whatever method: its other key makes other rows.
    Overlay(tmp_path / "part", method="sliding_window", window_size=4, within_key="organs", picture=False).explain(
        parser
    )
    for case in "01":
        saliency = nib.load(tmp_path / "part" / f"{case}_saliency.nii.gz").get_fdata()
        assert np.all(saliency[organs == 0] == 0)
        assert len(np.unique(saliency[organs != 0])) > 2
    assert '"within": "saliency_within_organs"' in (tmp_path / "part" / "summary.settings.json").read_text()


def test_our_own_bundle(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own handler, which explains as well, is left out; the maps are those of its own run with these settings."""
    write_scans(tmp_path, 2)
    torch.manual_seed(0)
    torch.save(DenseNet(**SMALL_NET).state_dict(), tmp_path / "weights.pt")
    rise = {"method": "rise", "num_masks": 9, "grid_size": 3, "mask_batch_size": 5}
    rows = run(tmp_path / "cohort", tmp_path / "run", tmp_path / "weights.pt", classes=[1], **rise)
    settings = {
        "network_def": {"_target_": "DenseNet", **SMALL_NET},
        "device": "cpu",
        "checkpoint": tmp_path / "weights.pt",
    }
    settings |= {"dataset_dir": str(tmp_path / "cohort"), "output_dir": str(tmp_path / "explained")}
    settings |= {"spatial_size": [16, 16, 16], "pixdim": [2.5, 2.5, 2.5], "cache": "none"}
    monai.bundle.run(
        run_id="explain",
        bundle_root=str(BUNDLE),
        config_file=[str(BUNDLE / "configs" / "inference.yaml"), str(overlay_path("explain"))],
        saliency_classes=[1],
        **settings,
        **{f"saliency_{id}": value for id, value in rise.items()},
    )
    maps = tmp_path / "explained" / "saliency"
    assert sorted(path.name for path in (tmp_path / "explained").iterdir()) == ["saliency"]
    assert voxels(maps) == voxels(tmp_path / "run")
    assert [row["score"] for row in rows_of(maps / "summary.csv")] == [row["score"] for row in rows]
    assert "evaluator (CohortEvaluator) runs DenseNet by" in capfd.readouterr().out


def test_the_maps_key(tmp_path: Path) -> None:
    scan = volume(tmp_path / "scan.nii.gz", (8, 8, 8), AFFINES[1], 0, low=0, high=200)
    Overlay(tmp_path / "maps", key="why", num_masks=4, picture=False, report=False, store_dir="").explain(
        small_bundle([scan], Brightness())
    )
    found = {path.name for path in (tmp_path / "maps").iterdir() if not path.name.startswith(".")}
    maps = {"scan_why.nii.gz", "scan_why_standard_error.nii.gz"}
    assert found == {*maps, "summary.csv", "summary.settings.json"}
    with pytest.raises(RuntimeError) as raised:
        Overlay(tmp_path / "no", key="image").explain(small_bundle([scan], Brightness()))
    assert "`saliency_key` 'image' is a key of the batch, and names the map" in str(root_cause(raised.value))


def check_map(maps: Path, case: str, path: Path, layout: str) -> None:
    """A map that lies on its image, whose values differ, with the table's row and a picture."""
    saliency = nib.load(maps / f"{case}_saliency.nii.gz")
    values = np.asarray(saliency.dataobj)
    rows = [row for row in rows_of(maps / "summary.csv") if row["case"] == case]
    scan = LoadImage(image_only=True)(path)
    grid = tuple(scan.meta["spatial_shape"])
    if layout == "valve_landmarks":  # the loader's axes, not the file's
        grid = (24, 24, 2)
    assert saliency.shape == (*grid, *([len(rows)] if len(rows) > 1 else []))
    np.testing.assert_allclose(saliency.affine, scan.affine, atol=1e-5)
    if path.suffix == ".gz" and layout != "valve_landmarks":
        header = nib.load(path).header
        assert all(saliency.header[code] == header[code] for code in ("sform_code", "qform_code"))
    assert np.isfinite(values).all()
    for each in np.moveaxis(values, -1, 0) if len(rows) > 1 else [values]:
        assert np.ptp(each) > 0
    assert all(int(row["forwards"]) == 13 for row in rows)
    with Image.open(maps / f"{case}_saliency.png") as picture:
        assert np.ptp(np.asarray(picture)) > 0


def small_bundle(scans: list[Path], network: torch.nn.Module, **parts: Any) -> ConfigParser:
    """A parser of a bundle made of objects, for what needs no files of its own."""
    keys = {"keys": "image"}
    config: dict[str, Any] = {
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "LoadImaged", **keys}, {"_target_": "EnsureChannelFirstd", **keys}],
        },
        "dataset": {"_target_": "Dataset", "data": [{"image": str(s)} for s in scans], "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 2},
        "network": network,
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "cpu",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "postprocessing": {"_target_": "Activationsd", "keys": "pred", "softmax": True},
        },
        "run": ["$@evaluator.run()"],
    }
    return ConfigParser(config | parts)


class Brightness(torch.nn.Module):
    """Two channels: nothing, and how far a voxel is above a value."""

    def __init__(self, above: float = 100) -> None:
        super().__init__()
        self.above = above

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(image), image - self.above], dim=1)


class Deaf(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[2.0, 1.0]]).repeat(len(image), 1)


def test_peak_lies_on_the_planted_structure_in_the_scan(make: Callable[[str], Bundle], tmp_path: Path) -> None:
    """Through resampling, cropping and padding, in a scan with oblique axes."""
    bundle = make("renamed_ids")
    for path in bundle.scans.values():
        path.unlink()
    data = np.full((20, 18, 15), 10, dtype=np.float32)
    data[12:16, 4:8, 6:10] = 200
    path = tmp_path / "data" / "scan.nii.gz"
    nib.save(nib.Nifti1Image(data, AFFINES[0]), path)
    network = {"_target_": f"{Brightness.__module__}.Brightness", "above": 2}  # standard deviations above the mean
    asked = {"saliency_num_masks": 200, "saliency_grid_size": 5}
    bundle.explain(model=network, weights="nothing to load", saliency_dir=str(tmp_path / "maps"), **asked)
    (row,) = rows_of(tmp_path / "maps" / "summary.csv")
    peak = [float(row[f"peak_{axis}_mm"]) for axis in "xyz"]
    voxel = nib.affines.apply_affine(np.linalg.inv(AFFINES[0]), peak)
    assert ((voxel > [10.5, 2.5, 4.5]) & (voxel < [16.5, 8.5, 10.5])).all()  # within one voxel


def test_network_that_ignores_the_image_gets_an_error_and_no_map(tmp_path: Path) -> None:
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i) for i in range(2)]
    with pytest.raises(SystemExit, match="2 cases without a map"):
        Overlay(tmp_path / "maps", method="rise", num_masks=5).explain(small_bundle(scans, Deaf()))
    rows = rows_of(tmp_path / "maps" / "failures.csv")
    assert [row["case"] for row in rows] == ["0", "1"]
    assert all("all 5 perturbed images changed the score by the same amount" in row["error"] for row in rows)
    assert not list((tmp_path / "maps").rglob("*.nii.gz"))


def test_the_map_of_a_case_that_fails_now_goes(tmp_path: Path) -> None:
    """It is an earlier run's, of another network here. Rows of another cohort stay, and are named."""
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, high=900 - 800 * i) for i in range(2)]
    Overlay(tmp_path / "maps", num_masks=5, activation="none").explain(small_bundle(scans, Brightness()))
    assert sorted(path.name[0] for path in (tmp_path / "maps").glob("*_saliency.*")) == ["0", "0", "1", "1"]
    with pytest.raises(SystemExit, match="1 case without a map"):
        Overlay(tmp_path / "maps", num_masks=5, activation="none").explain(small_bundle(scans, Broken()))
    assert sorted(path.name[0] for path in (tmp_path / "maps").glob("*_saliency.*")) == ["1", "1"]
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "summary.csv")] == ["1"]
    (row,) = rows_of(tmp_path / "maps" / "failures.csv")
    assert (row["case"], "NaN" in row["error"]) == ("0", True)


@pytest.mark.parametrize("times", [1, 2])
def test_a_healthy_scan_is_listed_and_no_failure(tmp_path: Path, capfd: Any, times: int) -> None:
    """The run ends well, and the report has a line for it; an earlier map of the scan goes."""
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, high=900 - 800 * i) for i in range(2)]
    if times > 1:
        Overlay(tmp_path / "maps", num_masks=5, activation="none").explain(small_bundle(scans, Brightness()))
    for _ in range(times):
        Overlay(tmp_path / "maps", num_masks=5, target=RegionScore(1, "softmax")).explain(
            small_bundle(scans, Brightness())
        )
        assert "nothing_to_explain 1" in capfd.readouterr().out
    assert {path.name[0] for path in (tmp_path / "maps").glob("*_saliency.*")} == {"0"}
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "summary.csv")] == ["0"]
    (row,) = rows_of(tmp_path / "maps" / "nothing_to_explain.csv")
    assert (row["case"], "the predicted region of channel 1 is empty" in row["reason"]) == ("1", True)
    assert not (tmp_path / "maps" / "failures.csv").exists()
    page = (tmp_path / "maps" / "report" / "index.html").read_text()
    assert "nothing to explain: the predicted region" in page
    assert "1 with nothing to explain" in page


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": [5]}, "channel 5 is out of range"),
        ({"output": "logits"}, "has no part 'logits'"),
        ({"against": 1}, "`against` is for"),
    ],
)
def test_a_setting_that_fits_no_case_takes_no_earlier_map(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    """The run ends at its first case, and a night's maps and table stay as they are."""
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, high=900) for i in range(2)]
    maps = tmp_path / "maps"
    explain = {"num_masks": 5, "activation": "none"}
    Overlay(maps, **explain).explain(small_bundle(scans, Brightness()))
    before = contents(maps)
    assert len(list(maps.glob("*_saliency.nii.gz"))) == 2
    with pytest.raises(Exception, match=r"Failed to evaluate") as raised:
        Overlay(maps, **explain, **settings).explain(small_bundle(scans, Brightness()))
    cause = root_cause(raised.value)
    assert isinstance(cause, SettingError)
    assert words in str(cause)
    after = contents(maps)
    assert {name for name in before if after.get(name) != before[name]} <= {"run_settings.json"}


def test_a_setting_that_fails_every_case_takes_no_earlier_map(tmp_path: Path) -> None:
    """Which setting fits no case cannot always be told before the cases are tried."""
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, high=900) for i in range(2)]
    maps = tmp_path / "maps"
    Overlay(maps, num_masks=5, activation="none").explain(small_bundle(scans, Brightness()))
    before = voxels(maps)
    with pytest.raises(SystemExit, match="2 cases without a map"):
        Overlay(maps, method="sliding_window", window_size=50).explain(small_bundle(scans, Brightness()))
    assert voxels(maps) == before
    assert [row["case"] for row in rows_of(maps / "summary.csv")] == ["0", "1"]
    assert len(rows_of(maps / "failures.csv")) == 2


def test_files_of_one_stem_and_a_second_cohort_in_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("a.nii", "a.nii.gz", "b.nii.gz")
    scans = [volume(tmp_path / name, (8, 8, 8), AFFINES[1], i, low=0, high=200) for i, name in enumerate(names)]
    Overlay(tmp_path / "maps", num_masks=5, picture=False).explain(small_bundle(scans[:2], Brightness()))
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "summary.csv")] == ["a.nii", "a.nii.gz"]
    assert len(voxels(tmp_path / "maps")) == 4  # two maps, each with its standard error
    assert "not of this cohort" not in caplog.text
    Overlay(tmp_path / "maps", num_masks=5, picture=False).explain(small_bundle(scans[2:], Brightness()))
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "summary.csv")] == ["a.nii", "a.nii.gz", "b"]
    assert "2 cases (the first is a.nii) are not of this cohort" in caplog.text


def test_scans_without_a_place_are_refused_before_they_are_explained(tmp_path: Path) -> None:
    """Their maps would lie nowhere. The others have theirs, and no perturbed image of the refused ones is run."""
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, low=0, high=200) for i in range(5)]
    damage(scans[4])
    two_places = nib.load(scans[0])
    two_places.set_qform(two_places.affine, 1)
    two_places.set_sform(two_places.affine @ np.diag([2.0, 1, 1, 1]), 1)
    complex_voxels = nib.Nifti1Image(nib.load(scans[1]).get_fdata().astype(np.complex64), AFFINES[1])
    flat = nib.Nifti1Image(nib.load(scans[2]).get_fdata(dtype=np.float32), None)
    flat.set_sform(np.diag([1.0, 0, 1, 1]), 2)
    for path, image in zip(scans, (two_places, complex_voxels, flat), strict=False):
        nib.save(image, path)
    network = Counted()
    keys = {"keys": "image"}
    real = {"_target_": "EnsureTyped", **keys, "dtype": "$torch.float32"}
    load = [{"_target_": name, **keys} for name in ("LoadImaged", "EnsureChannelFirstd")]
    parts = {"preprocessing": {"_target_": "Compose", "transforms": [*load, real]}, "imports": ["$import torch"]}
    with pytest.raises(SystemExit, match="4 cases without a map"):
        Overlay(tmp_path / "maps", num_masks=5, picture=False, fill=0.0).explain(small_bundle(scans, network, **parts))
    errors = {row["case"]: row["error"] for row in rows_of(tmp_path / "maps" / "failures.csv")}
    assert "put voxels up to" in errors["0"]
    assert "complex numbers" in errors["1"]
    assert "singular" in errors["2"]
    assert "4.nii.gz is damaged" in errors["4"]
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "summary.csv")] == ["3"]
    # Predictions, one case in batches of its images, and the five that look at the network.
    assert network.images < 5 + 3 * (5 + 2) + 5


class Counted(Brightness):
    """Counts the images that it is given."""

    images = 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.images += len(image)
        return super().forward(image)


def test_a_saturated_probability_is_explained_by_its_log_odds_as_all_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One case's probability is 1 whatever is hidden, the other's is not: both are asked for one thing."""
    few: dict[str, Any] = {"method": "rise", "num_masks": 5, "picture": False}
    scans = [volume(tmp_path / f"{i}.nii.gz", (8, 8, 8), AFFINES[1], i, high=90000 - 89800 * i) for i in range(2)]
    with pytest.raises(SystemExit, match="1 case without a map"):
        Overlay(tmp_path / "maps", **few, scale="probability").explain(small_bundle(scans, Hundredths()))
    (row,) = rows_of(tmp_path / "maps" / "failures.csv")
    assert row["case"] == "0"
    assert "try --saliency_activation none" in row["error"]
    (row,) = rows_of(tmp_path / "maps" / "summary.csv")
    assert (row["case"], row["unit"], row["quantity"]) == ("1", "probability", "softmax probability of the class")
    assert float(row["noise"]) > 0
    Overlay(tmp_path / "logits", **few, activation="none").explain(small_bundle(scans, Hundredths()))
    assert {row["unit"] for row in rows_of(tmp_path / "logits" / "summary.csv")} == {"network output"}
    Overlay(tmp_path / "auto", **few).explain(small_bundle(scans, Hundredths()))
    saturated, other = rows_of(tmp_path / "auto" / "summary.csv")
    for row in (saturated, other):
        assert (row["unit"], row["quantity"]) == ("log-odds", "log-odds of the softmax probability of the class")
    assert saturated["score"] == "1.0"
    assert abs(float(saturated["peak_saliency"])) > 1
    assert "fill: 0 (chosen by auto on 2 cases). Error of each candidate: 0 " in capsys.readouterr().err
    assert "ConstantFill" in (tmp_path / "auto" / "summary.settings.json").read_text()
    assert float(saturated["fill_leaves"]) < 0.01


class Hundredths(torch.nn.Module):
    """A hundredth of the mean against its opposite."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        score = image.mean(dim=(1, 2, 3, 4)) / 100
        return torch.stack([score, -score], dim=1)


def test_a_loader_that_ends_early_makes_up_no_case(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MONAI's ThreadDataLoader ends at a scan that cannot be read, and the evaluator begins it anew."""
    scans = [volume(tmp_path / f"{name}.nii.gz", (8, 8, 8), AFFINES[1], i, high=200) for i, name in enumerate("abcde")]
    scans[2].write_bytes(scans[2].read_bytes()[:100])
    parser = small_bundle(scans, Brightness())
    parser["dataloader"] = {"_target_": "ThreadDataLoader", "dataset": "@dataset", "batch_size": 1}
    Overlay(tmp_path / "maps", num_masks=5, picture=False, activation="none").explain(parser)
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "summary.csv")] == ["a", "b"]
    assert sorted(path.name[:1] for path in (tmp_path / "maps").glob("*_saliency.nii.gz")) == ["a", "b"]
    assert "has not met 3 of the cases that its loader's dataset lists (the first is c)" in caplog.text


class Broken(Hundredths):
    """Gives NaN for the first image of a batch."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.where(image.amax(dim=(1, 2, 3, 4))[:, None] > 500, torch.nan, super().forward(image))


def test_each_flag_that_an_error_lists_is_taken(make: Callable[[str], Bundle], tmp_path: Path, capfd: Any) -> None:
    """By a bundle without a postprocessing, whose two channels may be anything."""
    bundle = make("renamed_ids")
    with pytest.raises(RuntimeError) as raised:
        bundle.explain(saliency_dir=str(tmp_path), saliency_activation=None)
    flags = re.findall(r"\(in a bundle --(\w+) (.*)\)$", str(root_cause(raised.value)), re.MULTILINE)
    said = ["mean softmax probability", "mean sigmoid probability", "RegionScore: mean network output in the image"]
    assert len(flags) == len(said)
    for number, ((flag, value), words) in enumerate(zip(flags, said, strict=True)):
        capfd.readouterr()
        value = ast.literal_eval(value.strip('"')) if value.startswith('"') else value
        given = {"saliency_dir": str(tmp_path / str(number)), "saliency_activation": None, flag: value}
        bundle.explain(**given)
        assert words in capfd.readouterr().out
        assert len(list((tmp_path / str(number)).rglob("*_saliency.nii.gz"))) == 2


def test_a_misspelt_evaluator_is_named(make: Callable[[str], Bundle], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        make("spleen_ct_segmentation").explain(saliency_dir=str(tmp_path), saliency_evaluator="evaluater")
    expected = "`saliency_evaluator` must be an id of the bundle, got 'evaluater': did you mean `evaluator`?"
    assert str(root_cause(caught.value)) == expected


def test_bundle_without_an_evaluator_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = BUNDLES / "brain_image_synthesis_latent_diffusion_model"
    monkeypatch.chdir(tmp_path)
    files = [str(bundle / "configs" / "inference.json"), str(overlay_path("explain"))]
    with pytest.raises(RuntimeError) as raised:
        monai.bundle.run(run_id="explain", config_file=files, bundle_root=str(tmp_path))
    assert "this bundle has no evaluator" in str(root_cause(raised.value))
    assert not list(tmp_path.iterdir())


def test_one_of_several_evaluators_is_named(tmp_path: Path) -> None:
    scan = volume(tmp_path / "scan.nii.gz", (8, 8, 8), AFFINES[1], 0, low=0, high=200)
    parser = small_bundle([scan], Brightness())
    evaluator = parser.config.pop("evaluator")  # type: ignore[union-attr]
    parser.config |= {"first": evaluator, "second": evaluator, "run": ["$@first.run()", "$@second.run()"]}  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"several evaluators \(first, second\)"):
        Overlay(tmp_path / "maps").explain(parser)
    Overlay(tmp_path / "maps", evaluator="second", num_masks=4, picture=False).explain(parser)
    assert (tmp_path / "maps" / "scan_saliency.nii.gz").is_file()


def test_evaluator_that_meets_no_case_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="met no case"):
        Overlay(tmp_path / "maps").explain(small_bundle([], Brightness(), dataloader=[]))


def test_part_of_a_dictionary_is_chosen_by_name(make: Callable[[str], Bundle], tmp_path: Path, capfd: Any) -> None:
    bundle = make("pathology_nuclei_segmentation_classification")
    asked = {"saliency_output": "type_prediction", "saliency_classes": [1, 4], "saliency_method": "sliding_window"}
    with pytest.raises(RuntimeError) as raised:
        bundle.explain(saliency_dir=str(tmp_path / "maps"), **asked)
    assert "--saliency_activation softmax" in str(root_cause(raised.value))
    asked["saliency_activation"] = "softmax"
    bundle.explain(saliency_dir=str(tmp_path / "maps"), **asked)
    assert "in its predicted region of output type_prediction" in capfd.readouterr().out
    assert nib.load(tmp_path / "maps" / "tile_saliency.nii.gz").shape[:2] == (48, 40)


def test_path_of_an_overlay_is_printed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    main(["overlay", "explain"])
    assert capsys.readouterr().out == f"{overlay_path('explain')}\n"


# The overlay on a bundle that cuts patches under AMP, as most of the Model Zoo's with a sliding-window inferer do.
@pytest.mark.parametrize(
    ("method", "shares"),
    [
        ({}, (0.95, 0.95)),
        ({"saliency_method": "hierarchical_occlusion"}, (0.7, 0.7)),
        ({"saliency_method": "sliding_window", "saliency_window_size": 8, "saliency_stride": 8}, (0.7, 1)),
    ],
    ids=["by default", "hierarchical_occlusion", "sliding_window"],
)
def test_patches_are_remembered_under_amp(
    method: Any, shares: tuple[float, float], make: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The same scores and maps as from whole images, from fewer patches, through the bundle's own inferer."""
    bundle = make("spleen_ct_segmentation")
    assert '"amp": true' in bundle.config.read_text()
    bundle.explain(few_masks=False, saliency_dir=str(tmp_path / "remembered"), **method)
    monkeypatch.setattr("monai_saliency.inferers.inferer.remember", lambda *args: None)
    bundle.explain(few_masks=False, saliency_dir=str(tmp_path / "whole"), **method)
    scores = [scores_of(tmp_path / name / "scores") for name in ("remembered", "whole")]
    rows = [rows_of(tmp_path / name / "summary.csv") for name in ("remembered", "whole")]
    assert len(scores[0]) == len(rows[0]) == len(bundle.scans)
    for case, ours, whole in zip(bundle.scans, *rows, strict=True):
        np.testing.assert_allclose(scores[0][case], scores[1][case], rtol=0, atol=1e-5)
        assert np.ptp(scores[0][case]) > 1e-3
        one, other = (nib.load(tmp_path / n / f"{case}_saliency.nii.gz").get_fdata() for n in ("remembered", "whole"))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        # Eight patches a volume; windows off their grid touch all of the smaller one, and so may random masks.
        assert int(ours["forwards"]) <= 8 * shares[case == "spleen_1"] * int(whole["forwards"])
        assert method.get("saliency_method") != "hierarchical_occlusion" or float(ours["predictions"]) <= 40


# xaitk-saliency's classes as `--method` in other people's bundles.
STACK = "xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise.RISEStack"


def test_a_whole_method_by_the_overlay(make: Callable[[str], Bundle], tmp_path: Path) -> None:
    """RISE of both packages, with the same masks: the one scales its maps."""
    bundle = make("breast_density_classification")
    shared = {"saliency_p1": 0.4, "saliency_seed": 3, "saliency_trust": True, "saliency_trust_steps": 4}
    theirs = {"saliency_method": STACK, "saliency_n": 12, "saliency_s": 4}
    ours = {"saliency_method": "rise", "saliency_num_masks": 12, "saliency_grid_size": 4, "saliency_form": "debiased"}
    for name, method in {"theirs": theirs, "ours": ours}.items():
        bundle.explain(few_masks=False, saliency_dir=str(tmp_path / name), **shared, **method)
    for case in bundle.scans:
        files = (tmp_path / name / f"{case}_saliency.nii.gz" for name in ("theirs", "ours"))
        found, expected = (nib.load(file).get_fdata() for file in files)
        np.testing.assert_allclose(found, expected / np.abs(expected).max(), rtol=0, atol=1e-4)
    rows = rows_of(tmp_path / "theirs" / "summary.csv")
    assert [row["forwards"] for row in rows] == ["14"] * len(rows)  # the image too, once for each
    assert not (tmp_path / "theirs" / "failures.csv").exists()
