"""The overlay ``nnunet``: our bundle explains a trained nnU-Net model folder."""

from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import rows_of
from helpers.nnunet import FULL, counted_patches, own_predictor, scan
from helpers.notebooks import run_notebook
from helpers.paths import BUNDLE
from monai.bundle import ConfigParser
from monai.engines import SupervisedEvaluator
from monai.transforms import Invertd
from monai.utils import convert_to_dst_type

import monai_saliency as ms
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.nnunet import find_nnunet_cases

ANISOTROPIC = np.diag([-4.1, 0.9, 0.8, 1.0])
TURNED = np.array([[0.96, -0.28, 0], [0.28, 0.96, 0], [0, 0, 1]]) @ np.array([[1, 0, 0], [0, 0.8, -0.6], [0, 0.6, 0.8]])
OBLIQUE = nib.affines.from_matvec(TURNED @ np.diag([3.3, 1.2, 1.1]), [-20, 10, 5])


FILES = [str(BUNDLE / "configs" / "inference.yaml"), str(overlay_path("nnunet"))]


def ids(model: Path, data: Path, output: Path, **settings: Any) -> dict[str, Any]:
    """Of our bundle with the overlay."""
    given = {"nnunet_model_folder": str(model), "dataset_dir": str(data), "output_dir": str(output), "device": "cpu"}
    return given | {"bundle_root": str(BUNDLE), "picture": False, "report": False} | settings


def explain(model: Path, data: Path, output: Path, **settings: Any) -> list[dict[str, str]]:
    """Run our bundle with the overlay; the summary's rows."""
    monai.bundle.run(config_file=FILES, **ids(model, data, output, **settings))
    return rows_of(output / "summary.csv")


def plant(folder: Path, affine: np.ndarray) -> tuple[Path, tuple[int, ...]]:
    """A scan with something bright, and its place."""
    path, place = scan(folder / "imagesTs" / "case_0000.nii.gz", affine, (8, 15, 14)), (5, 9, 6)
    values = np.asarray(nib.load(path).dataobj)
    values[tuple(slice(axis - 1, axis + 2) for axis in place)] += 400
    nib.save(nib.Nifti1Image(values, affine), path)
    return path, place


def check_found(path: Path, affine: np.ndarray, place: tuple[int, ...]) -> None:
    """A map lies on the scan, and its highest values within a voxel of a place."""
    found = nib.load(path)
    np.testing.assert_allclose(found.affine, affine, atol=1e-5)
    saliency = np.asarray(found.dataobj)
    assert saliency.shape == (8, 15, 14)
    weights = np.where(saliency > saliency.max() / 2, saliency, 0)
    centre = [(weights * index).sum() / weights.sum() for index in np.indices(saliency.shape)]
    assert np.abs(np.subtract(centre, place)).max() < 1


@pytest.mark.parametrize("affine", [ANISOTROPIC, OBLIQUE], ids=["anisotropic", "oblique"])
def test_finds_what_is_planted(nnunet_models: Path, tmp_path: Path, affine: np.ndarray) -> None:
    """By a network that nnU-Net has trained: within a voxel, on the scan's own grid."""
    _, place = plant(tmp_path, affine)
    windows = {"method": "sliding_window", "window_size": [1, 5, 5], "stride": [1, 3, 3], "nnunet_mirroring": False}
    (row,) = explain(nnunet_models / FULL, tmp_path / "imagesTs", tmp_path / "out", **windows)
    assert row["case"] == "case"
    check_found(tmp_path / "out" / "case_saliency.nii.gz", affine, place)


@pytest.mark.parametrize(
    ("configuration", "affine", "folds", "mirroring"),
    [
        ("3d_fullres", OBLIQUE, [0, 1], True),
        ("3d_fullres", ANISOTROPIC, [0], False),
        ("2d", OBLIQUE, [0], True),
        ("2d", ANISOTROPIC, [0, 1], False),
    ],
)
def test_unperturbed_probabilities_are_nnunets(
    nnunet_models: Path, tmp_path: Path, affine: np.ndarray, configuration: str, folds: list[int], mirroring: bool
) -> None:
    """From the file to the scan's own grid, with what the overlay's config makes, in as many forwards."""
    path, _ = plant(tmp_path, affine)
    settings = {"nnunet_configuration": configuration, "nnunet_folds": folds, "nnunet_mirroring": mirroring}
    parser = ConfigParser(ConfigParser.load_config_files(FILES))
    parser.update(ids(nnunet_models, path.parent, tmp_path / "out", **settings))
    pre, network, inferer = (parser.get_parsed_content(name) for name in ("preprocessing", "network", "inferer"))
    item = pre({"image": str(path)})
    with torch.no_grad(), counted_patches() as ours:
        logits = inferer(item["image"][None], network)[0]
    # nnU-Net resamples logits in float16.
    item["pred"] = convert_to_dst_type(logits, item["image"], dtype=torch.float16)[0]
    found = Invertd("pred", pre, orig_keys="image", nearest_interp=False)(item)["pred"]
    np.testing.assert_allclose(found.affine, affine, atol=1e-5)
    predictor = own_predictor(nnunet_models / FULL.replace("3d_fullres", configuration), folds, mirroring)
    array, properties = predictor.plans_manager.image_reader_writer_class().read_images([str(path)])
    with counted_patches() as theirs:
        _, expected = predictor.predict_single_npy_array(array, properties, save_or_return_probabilities=True)
    expected = expected.transpose(0, 3, 2, 1)
    # Around what is cropped nnU-Net has the probability of the background, which is not of the network.
    inside = np.asarray(found.abs().amax(0) > 0)
    assert expected[1][inside].max() > 0.5 > expected[1][inside].min()
    assert np.abs(np.asarray(found.float().softmax(0)) - expected)[:, inside].max() < 1e-5
    assert sum(ours) == sum(theirs) >= len(folds) * (4 if mirroring else 1)


@pytest.mark.parametrize(("method", "most", "rounds"), [("focused_rise", 240, 6), ("hierarchical_occlusion", 40, 4)])
def test_explanation_of_all_folds(
    nnunet_models: Path, tmp_path: Path, caplog: Any, method: str, most: int, rounds: int
) -> None:
    """Windows on the patch grid, patches remembered, and what it costs in nnU-Net's predictions, counted in patches;
    scans in two formats of name. The first method is the default.
    """
    for i, name in enumerate(("a_0000", "b")):
        scan(tmp_path / "scans" / f"{name}.nii.gz", OBLIQUE, (8, 15, 14), i)
    settings = {"nnunet_configuration": "3d_fullres", "nnunet_mirroring": False, "fill": 0.0}
    settings |= {"method": method} if method != "focused_rise" else {}
    with counted_patches() as ours:
        rows = explain(nnunet_models, tmp_path / "scans", tmp_path / "out", **settings)
    predictor = own_predictor(nnunet_models / FULL, [0, 1], mirroring=False)
    with counted_patches() as theirs:
        for path in sorted((tmp_path / "scans").iterdir()):
            predictor.predict_single_npy_array(*predictor.plans_manager.image_reader_writer_class().read_images([path]))
    assert [row["case"] for row in rows] == ["a", "b"]
    assert all(1 < float(row["predictions"]) <= most for row in rows)
    # With the prediction itself, and one perturbed image of each case that the bundle's inferer runs for comparison;
    # and for each case, fold and round at most three patches are compared alone. One has everything hidden.
    found = sum(theirs) / 2 * sum(2 + float(row["predictions"]) for row in rows)
    assert found <= sum(ours) <= found + 2 * 2 * rounds * 3 + 2 * 2
    assert "no patches are remembered" not in caplog.text
    for name in "ab":
        saliency = nib.load(tmp_path / "out" / f"{name}_saliency.nii.gz")
        assert saliency.shape[:3] == (8, 15, 14)
        assert np.asarray(saliency.dataobj).std() > 0


def test_monais_wrapper_is_refused(tmp_path: Path) -> None:
    """``monai.apps.nnunet`` gives labels."""

    class ModelnnUNetWrapper(torch.nn.Identity):
        pass

    evaluator = SupervisedEvaluator(torch.device("cpu"), [], ModelnnUNetWrapper())
    with pytest.raises(ValueError, match="explain the model's own folder by our bundle with the overlay `nnunet`"):
        ms.attach(evaluator, tmp_path)


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("nnunetv2", reason="nnU-Net is not installed")
    run_notebook("nnunet.ipynb", tmp_path)


# nnU-Net's names of files.
def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / f"{name}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return folder


def test_one_file_for_each_channel(tmp_path: Path) -> None:
    folder = make(tmp_path, "b_0000", "b_0001", "sub/a_0001", "sub/a_0000")
    cases = find_nnunet_cases(folder, channels=2)
    assert [case["case"] for case in cases] == ["b", "sub/a"]
    assert cases[1]["image"] == [str(folder / f"sub/a_000{i}.nii.gz") for i in range(2)]
    assert cases[1]["channels"] == 2


def test_numbers_may_be_left_out_for_one_channel(tmp_path: Path) -> None:
    cases = find_nnunet_cases(make(tmp_path, "b", "a_0000"))
    assert [(case["case"], Path(case["image"]).name) for case in cases] == [("a", "a_0000.nii.gz"), ("b", "b.nii.gz")]


def test_labels_lie_beside_the_images(tmp_path: Path) -> None:
    folder = make(tmp_path, "imagesTr/a_0000", "labelsTr/a")
    (case,) = find_nnunet_cases(folder / "imagesTr")
    assert (case["case"], case["label"]) == ("a", str(folder / "labelsTr" / "a.nii.gz"))


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["a_0001"], "must have one file for each of 2 channels, a_0000, a_0001, got a_0001"),
        (["a_0000", "a_0001", "a_0002"], "got a_0000, a_0001, a_0002"),
        (["a_0000", "a_0001", "a"], "and one without a number"),
    ],
)
def test_channels_must_be_complete(tmp_path: Path, names: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_nnunet_cases(make(tmp_path, *names), channels=2)
