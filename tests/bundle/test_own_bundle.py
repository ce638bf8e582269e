"""The bundle, run as a user runs it: on scans of his own, with a network of his own, and on broken input."""

import json
import logging
import re
from pathlib import Path

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import commands
from helpers.files import rows_of
from helpers.own_bundle import SMALL_NET, run, settings
from helpers.paths import BUNDLE, CONFIGS, SCHEMA
from helpers.scans import LPS, OBLIQUE, PERMUTED, write_scan, write_scans
from monai.bundle import ConfigParser, ConfigWorkflow
from monai.networks.nets import DenseNet

from monai_saliency.bundle.config import BundleConfig
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.errors import CaseError, root_cause
from monai_saliency.networks.checkpoints import load_checkpoint
from monai_saliency.transforms.writers import case_writers

DENSENET = {"_target_": "DenseNet", **SMALL_NET}
UNET = {"_target_": "UNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [2, 4], "strides": [2]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "weights" / "own.pt"
    path.parent.mkdir()
    torch.save(DenseNet(**SMALL_NET).state_dict(), path)
    return path


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    folder = tmp_path / "cohort"
    write_scan(folder / "a.nii.gz", (21, 17, 13), OBLIQUE, seed=1, sform=2, qform=0)
    write_scan(folder / "site" / "b.nii.gz", (14, 22, 9), LPS, seed=2)
    write_scan(folder / "c.nii", (11, 12, 19), PERMUTED, seed=3, sform=0, qform=4)
    return folder


def test_own_scans_get_maps_on_their_own_grids(cohort: Path, checkpoint: Path, tmp_path: Path) -> None:
    rows = run(cohort, tmp_path / "out", checkpoint, picture=True)
    assert [row["case"] for row in rows] == ["a", "c", "site/b"]
    for row, name in zip(rows, ("a.nii.gz", "c.nii", "site/b.nii.gz"), strict=True):
        scan = nib.load(cohort / name)
        saliency = nib.load(tmp_path / "out" / f"{row['case']}_saliency.nii.gz")
        assert saliency.shape == scan.shape
        np.testing.assert_allclose(saliency.affine, scan.affine, atol=1e-4)
        for field in ("sform_code", "qform_code", "xyzt_units"):
            assert saliency.header[field] == scan.header[field]
        data = saliency.get_fdata()
        assert data.std() > 0
        peak = [float(row[f"peak_{axis}_mm"]) for axis in "xyz"]
        voxel = np.rint(nib.affines.apply_affine(np.linalg.inv(scan.affine), peak)).astype(int)
        assert data[tuple(voxel)] == pytest.approx(data.max(), rel=1e-5)
        assert float(row["peak_saliency"]) == pytest.approx(data.max(), rel=1e-5)
        assert int(row["forwards"]) == 1 + 4**3
        assert float(row["seconds"]) > 0
        assert float(row["probability"]) == pytest.approx(float(row["score"]))
        assert row["prediction"] == row["class"]
        assert (tmp_path / "out" / f"{row['case']}_saliency.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob(".tmp*"))


def test_class_names_are_the_metadatas_unless_given() -> None:
    parser = ConfigParser()
    parser.read_config(BUNDLE / "configs" / "inference.yaml")
    parser["bundle_root"] = str(BUNDLE)
    assert BundleConfig(parser).class_names() == {"class_names": None}
    parser.read_meta(BUNDLE / "configs" / "metadata.json")
    assert BundleConfig(parser).class_names() == {"class_names": {"0": "no lesion", "1": "lesion"}}
    assert BundleConfig(parser).class_names({0: "a"}) == {"class_names": {0: "a"}}
    # Of another network, or of other weights, the metadata knows nothing.
    for id, value in (("network_def", DENSENET), ("checkpoint", "own.pt"), ("network_def::num_classes", 3)):
        own = parser[id]
        parser[id] = value
        assert BundleConfig(parser).class_names() == {"class_names": None}, id
        assert BundleConfig(parser).class_names(["a", "b"]) == {"class_names": ["a", "b"]}
        parser[id] = own
    assert BundleConfig(parser).class_names()["class_names"]
    with pytest.raises(ValueError, match=r"`class_names` must be names by class, .*, got 'lesion'"):
        case_writers(".", class_names="lesion")  # type: ignore[arg-type]


def test_half_precision_explains_and_leaves_predictions(cohort: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The same folder again: stored scores of another precision are not taken for these."""
    plain = run(cohort, tmp_path / "out", checkpoint, stride=8)
    before = nib.load(tmp_path / "out" / "a_saliency.nii.gz").get_fdata()
    faster = {"stride": 8, "amp": "bf16", "channels_last": True}
    quick = run(cohort, tmp_path / "out", checkpoint, **faster)
    after = nib.load(tmp_path / "out" / "a_saliency.nii.gz").get_fdata()
    assert 0 < np.abs(after - before).max() < 0.1 * np.abs(before).max()
    assert [row["forwards"] for row in quick] == [row["forwards"] for row in plain]
    assert [row["prediction"] for row in quick] == [row["prediction"] for row in plain]
    known = json.loads((tmp_path / "out" / "summary.settings.json").read_text())
    assert {row["settings"] for row in quick} != {row["settings"] for row in plain}
    assert known[quick[0]["settings"]] == known[plain[0]["settings"]] | {
        "network.amp": "bf16",
        "network.channels_last": "True",
    }
    run(cohort, tmp_path / "new", checkpoint, **faster)
    np.testing.assert_array_equal(after, nib.load(tmp_path / "new" / "a_saliency.nii.gz").get_fdata())
    with pytest.raises(RuntimeError) as caught:
        run(cohort, tmp_path / "no", checkpoint, amp="half")
    assert str(root_cause(caught.value)) == "`amp` must be false, bf16 or fp16, got 'half'"


def broken(kind: str, folder: Path) -> str:
    """Add a broken scan, last in order; what its error must say."""
    path = write_scan(folder / "z_broken.nii.gz", (12, 13, 14), LPS)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return "truncated"
    data = nib.load(path).get_fdata(dtype=np.float32)
    data[3, 4, 5] = np.nan
    nib.save(nib.Nifti1Image(data, LPS), path)
    return "1 of its voxels are NaN or infinite"


@pytest.mark.parametrize("kind", ["truncated", "NaN"])
def test_broken_scan_is_named(kind: str, cohort: Path, checkpoint: Path, tmp_path: Path) -> None:
    message = broken(kind, cohort)
    (cohort / "z_broken.nii.gz").rename(cohort / "b_broken.nii.gz")  # in the middle, so that some come after it
    with pytest.raises(SystemExit, match=r"error: 1 case without a map, see .*; the first is case b_broken: ") as error:
        run(cohort, tmp_path / "out", checkpoint, stride=8, store_dir="", cache="none")
    assert message in str(error.value)
    (row,) = rows_of(tmp_path / "out" / "failures.csv")
    assert (row["case"], row["stage"]) == ("b_broken", "load")
    assert message in row["error"]
    # All others are there, whole; nothing of the broken case is left.
    tables = ["failures.csv", "summary.csv", "summary.settings.json"]
    files = [f".{name}.lock" for name in tables] + [f"{case}_saliency.nii.gz" for case in "abc"] + tables
    assert sorted(p.name for p in (tmp_path / "out").rglob("*") if p.is_file()) == files
    with pytest.raises(RuntimeError) as strict:
        run(cohort, tmp_path / "strict", checkpoint, stride=8, strict=True)
    cause = root_cause(strict.value)
    assert isinstance(cause, CaseError)
    assert str(cause).startswith("case b_broken: ")
    assert message in str(cause)
    assert (tmp_path / "strict" / "a_saliency.nii.gz").is_file()
    assert not (tmp_path / "strict" / "c_saliency.nii.gz").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dataset_dir": "nowhere"}, "`dataset_dir` nowhere is not a folder"),
        (
            {"spatial_size": [64, 64]},
            r"^`spatial_size` must be one number or one per spatial axis \(3\), got \[64, 64\]",
        ),
        ({"pixdim": [2.5, 2.5]}, "^`pixdim` must be one number or one per spatial axis"),
        ({"method": "rize"}, r"^`method` must be one of .*, got 'rize': did you mean `rise`\?"),
        ({"activation": "Sigmoid"}, r"^`activation` must be one of .*, got 'Sigmoid': did you mean `sigmoid`\?"),
        ({"fill": "blurr"}, r"^`fill` must be one of .*, got 'blurr': did you mean `blur`\?"),
        ({"classes": [7]}, "^class 7 is out of range: the network gives 2 classes"),
        ({"checkpoint": "none.pt"}, "checkpoint none.pt does not exist"),
        ({"checkpoint": ""}, "^checkpoint is empty, got ''.*--checkpoint none if the network brings its weights"),
        ({"network_def": DENSENET | {"out_channels": 5}}, "does not fit the network DenseNet"),
        (
            {"network_def": UNET, "checkpoint": "none"},
            "^ClassScore reads one row of class.*RegionScore.*--target",
        ),
        ({"network_def": DENSENET | {"in_channels": 3}, "checkpoint": "none"}, "case a: .*channels"),
    ],
)
def test_wrong_settings_say_what_to_do(
    overrides: dict, message: str, cohort: Path, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"dataset_dir": cohort, "output_dir": tmp_path / "out", "checkpoint": checkpoint, "strict": True}
    with pytest.raises(RuntimeError) as caught:
        run(**settings | overrides)
    assert re.search(message, str(root_cause(caught.value))), str(root_cause(caught.value))
    assert not list((tmp_path / "out").rglob("*saliency*"))


@pytest.mark.parametrize("name", ["dataset_dir", "output_dir", "store_dir", "cache_dir", "checkpoint"])
def test_a_number_where_a_path_is_meant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fire, which reads the command line, makes 2024 of 2024, and 202401 of 2024_01."""
    write_scans(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        monai.bundle.run(**settings(tmp_path, "out", **{name: 2024}))
    assert re.search(r"must be a path, got the number 2024.* such as --\w+ \./2024", str(root_cause(caught.value)))
    assert not (tmp_path / "2024").exists()


def test_the_flag_of_a_segmenter_is_the_one_that_its_error_names(cohort: Path, tmp_path: Path) -> None:
    """What the error says after ``--target`` explains a segmenter."""
    torch.manual_seed(0)
    settings = {"dataset_dir": cohort, "network_def": UNET, "checkpoint": "none", "num_masks": 8, "strict": True}
    with pytest.raises(RuntimeError) as caught:
        run(**settings, output_dir=tmp_path / "refused")
    (flag,) = re.findall(r'--target "(.*?)"', str(root_cause(caught.value)))
    run(**settings, output_dir=tmp_path / "out", target=eval(flag))
    assert (tmp_path / "out" / "a_saliency.nii.gz").is_file()


def test_false_as_a_command_line_writes_it(cohort: Path, checkpoint: Path, tmp_path: Path) -> None:
    """``--report false`` comes as a text, which Python takes for true."""
    names = ("standard_error", "report", "picture", "keep_memory", "debug", "amp", "compile", "channels_last", "trust")
    run(dataset_dir=cohort, output_dir=tmp_path / "out", checkpoint=checkpoint, **dict.fromkeys(names, "false"))
    written = {path.name for path in (tmp_path / "out").rglob("*")}
    assert {"a_saliency.nii.gz", "summary.csv"} <= written
    assert not {name for name in written if "error" in name or name in ("report", "views", "a_saliency.png")}
    assert logging.getLogger("monai_saliency").level != logging.DEBUG


@pytest.mark.slow
def test_command_line_ends_with_the_cause(cohort: Path, checkpoint: Path, tmp_path: Path) -> None:
    broken("NaN", cohort)
    (cohort / "a.nii.gz").unlink()
    command = ["-m", "monai.bundle", "run", "--bundle_root", str(BUNDLE), "--strict", "true"]
    command += ["--config_file", str(BUNDLE / "configs" / "inference.yaml"), "--dataset_dir", str(cohort)]
    command += ["--output_dir", str(tmp_path / "out"), "--checkpoint", str(checkpoint), "--method", "rise"]
    command += ["--num_masks", "5", "--grid_size", "2", "--spatial_size", "[16,16,16]", "--picture", "False"]
    command += ["--network_def", json.dumps(DENSENET)]
    done = commands.run(command, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("error: case z_broken: 1 of its voxels are NaN")
    assert (tmp_path / "out" / "c_saliency.nii.gz").is_file()


def test_bundle_has_the_properties_of_an_infer_workflow(cohort: Path, checkpoint: Path) -> None:
    workflow = ConfigWorkflow(
        config_file=str(BUNDLE / "configs" / "inference.yaml"),
        meta_file=str(BUNDLE / "configs" / "metadata.json"),
        workflow_type="infer",
        bundle_root=str(BUNDLE),
        dataset_dir=str(cohort),
        checkpoint="none",
    )
    workflow.initialize()
    assert workflow.check_properties() == []


def decathlon(folder: Path) -> Path:
    """Scans of two modalities, the second ten times as bright, with two organs; spacing 1.5 x 1.5 x 3 mm."""
    for index in range(2):
        path = write_scan(folder / "imagesTs" / f"s{index}.nii.gz", (12, 13, 14, 2), LPS, seed=index)
        image = nib.load(path)
        nib.save(nib.Nifti1Image(image.get_fdata(dtype=np.float32) * [1, 10], LPS, image.header), path)
        label = np.zeros((12, 13, 14), np.uint8)
        label[2:6, 3:9, 4:9], label[7:11, 3:9, 4:9] = 4, 9
        (folder / "labelsTs").mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(label, LPS), folder / "labelsTs" / f"s{index}.nii.gz")
    listing = {"modality": {"0": "T1", "1": "T2"}, "test": [f"./imagesTs/s{i}.nii.gz" for i in range(2)]}
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


TWO_CHANNELS = {"network_def": DENSENET | {"in_channels": 2}, "pixdim": [1.5, 1.5, 3.0]}


def test_organs_and_modalities(tmp_path: Path) -> None:
    """Each organ in each modality: the map on the scan is the table's value inside the label, and zero outside."""
    folder = decathlon(tmp_path / "Task99")
    weights = tmp_path / "weights.pt"
    torch.manual_seed(0)
    torch.save(DenseNet(**SMALL_NET | {"in_channels": 2}).state_dict(), weights)
    settings = TWO_CHANNELS | {"mask_batch_size": 1, "per_channel": True, "region_names": {4: "liver"}}
    settings["method"] = "region_occlusion"
    rows = run(folder, tmp_path / "out", weights, **settings)
    assert [(row["case"], row["channel"]) for row in rows] == [
        ("imagesTs/s0", "0"),
        ("imagesTs/s0", "1"),
        ("imagesTs/s1", "0"),
        ("imagesTs/s1", "1"),
    ]
    assert {row["forwards"] for row in rows} == {str(1 + 2 * 2)}
    saliency, label = saved_map(tmp_path / "out"), np.asarray(nib.load(folder / "labelsTs" / "s0.nii.gz").dataobj)
    assert saliency.shape == (12, 13, 14, 2)
    assert np.all(saliency[label == 0] == 0)
    check_regions(tmp_path / "out" / "regions.csv", saliency, label)
    # Nothing has changed: the scores are there, but for the batch that holds the image.
    assert {row["forwards"] for row in run(folder, tmp_path / "out", weights, **settings)} == {"1"}
    # Other labels, other regions: stored scores of the old ones must not be used.
    moved = np.roll(label, 2, axis=1)
    nib.save(nib.Nifti1Image(moved, LPS), folder / "labelsTs" / "s0.nii.gz")
    (folder / "labelsTs" / "s1.nii.gz").unlink()
    with pytest.raises(SystemExit, match=r"error: 1 case without a map.* case imagesTs/s1: it has no label map"):
        run(folder, tmp_path / "out", weights, **settings)
    assert [row["forwards"] for row in rows_of(tmp_path / "out" / "summary.csv")][:2] == ["5", "5"]
    again = saved_map(tmp_path / "out")
    assert np.all(again[moved == 0] == 0)
    assert np.all(again[moved == 4][:, 0] != saliency[label == 4][0, 0])


def saved_map(out: Path) -> np.ndarray:
    return nib.load(out / "imagesTs" / "s0_saliency.nii.gz").get_fdata()


def check_regions(path: Path, saliency: np.ndarray, label: np.ndarray) -> None:
    """Of two scans, two organs and two channels; a row has its organ's volume, and the map's one value inside it."""
    table = rows_of(path)
    assert len(table) == 2 * 2 * 2
    assert {(row["region"], row["name"]) for row in table} == {("4", "liver"), ("9", "")}
    for row in table[:4]:
        inside = label == int(row["region"])
        np.testing.assert_allclose(saliency[inside, int(row["channel"])], float(row["saliency"]), rtol=1e-5)
        assert float(row["volume_ml"]) == pytest.approx(inside.sum() * 1.5 * 1.5 * 3 / 1000)


def test_metadata_passes_monais_check_offline() -> None:
    monai.bundle.verify_metadata(meta_file=str(CONFIGS / "metadata.json"), filepath=str(SCHEMA))


@pytest.mark.parametrize("overlay", [[], [str(overlay_path("explain"))]], ids=["alone", "with the overlay"])
def test_network_takes_and_gives_what_the_metadata_says(overlay: list[str]) -> None:
    monai.bundle.verify_net_in_out(
        net_id="network_def",
        meta_file=str(CONFIGS / "metadata.json"),
        config_file=[str(CONFIGS / "inference.yaml"), *overlay],
        device="cpu",
    )


@pytest.mark.slow
def test_exported_network_gives_the_same_maps(tmp_path: Path) -> None:
    """MONAI's ``ckpt_export`` of the bundle (TorchScript) and ``torch.export`` equal the module to the last digits."""
    config, meta = str(CONFIGS / "inference.yaml"), str(CONFIGS / "metadata.json")
    exported = tmp_path / "model.ts"
    monai.bundle.ckpt_export(
        net_id="network_def",
        filepath=str(exported),
        ckpt_file=str(BUNDLE / "models" / "model.pt"),
        meta_file=meta,
        config_file=config,
        key_in_ckpt="",
    )
    program = tmp_path / "model.pt2"
    parser = ConfigParser()
    parser.read_config(config)
    parser["bundle_root"] = str(BUNDLE)
    network = load_checkpoint(parser.get_parsed_content("network_def"), BUNDLE / "models" / "model.pt").eval()
    shape = parser.get_parsed_content("spatial_size")
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    torch.export.save(torch.export.export(network, (torch.rand(2, 1, *shape),), dynamic_shapes=(batch,)), program)
    write_scan(tmp_path / "cohort" / "scan.nii.gz", (40, 44, 38), np.diag([-4.0, -4.0, 4.0, 1.0]))
    maps = {}
    for name, network in {
        "module": {"checkpoint": str(BUNDLE / "models" / "model.pt")},
        "export": {"checkpoint": "none", "network_def": f"$torch.jit.load({str(exported)!r})", "network_id": "export"},
        "pt2": {"checkpoint": "none", "network_def": f"$torch.export.load({str(program)!r}).module()"},
        "checkpoint": {"checkpoint": str(program)},
    }.items():
        monai.bundle.run(
            bundle_root=str(BUNDLE),
            config_file=config,
            dataset_dir=str(tmp_path / "cohort"),
            output_dir=str(tmp_path / name),
            method="sliding_window",
            window_size=40,
            stride=32,
            device="cpu",
            picture=False,
            activation="none",
            **network,
        )
        maps[name] = np.asarray(nib.load(tmp_path / name / "scan_saliency.nii.gz").dataobj)
    assert np.ptp(maps["module"]) > 0.1
    for name in ("export", "pt2", "checkpoint"):
        np.testing.assert_allclose(maps[name], maps["module"], rtol=1e-5, atol=1e-5)
