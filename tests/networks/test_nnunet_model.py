"""nnU-Net's model folders: which are read, and which are refused."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.nnunet import FULL, counted_patches, own_predictor, scan
from helpers.tolerances import SINGLE, assert_close, assert_same_bits
from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged, Orientationd
from monai.utils import TraceKeys, convert_to_dst_type

import monai_saliency as ms
from monai_saliency.estimators import OcclusionScoring
from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.masks import SlidingWindowMasks
from monai_saliency.networks.nnunet import MirroredNetwork, NNUNetModel, NNUNetNetwork
from monai_saliency.storage.scans import scan_loader
from monai_saliency.transforms import NNUNetPreprocessd


@pytest.fixture
def models(nnunet_models: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(nnunet_models, tmp_path / "models"))


def test_finds_model_and_folds(nnunet_models: Path) -> None:
    model = NNUNetModel(nnunet_models / FULL)
    assert (model.folds, model.configuration, model.channels, model.activation) == ([0, 1], "3d_fullres", 1, "softmax")
    network = model.network()
    assert [member.axes for member in network.members] == [(0, 1, 2)] * 2
    assert NNUNetModel(nnunet_models, "1", "2d").network(mirroring=False).members[0].axes == ()


CASCADE = "3d_cascade_fullres"


def cascade(models: Path) -> None:
    """As nnU-Net lays it out: the second stage has its own folder and inherits the settings of ``3d_fullres``."""
    plans = json.loads((models / FULL / "plans.json").read_text())
    stage = {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"}
    plans["configurations"] |= {"3d_lowres": {"next_stage": CASCADE}, CASCADE: stage}
    (models / FULL / "plans.json").write_text(json.dumps(plans))
    for path in (models / FULL).glob("fold_*/*.pth"):
        content = torch.load(path, weights_only=False)
        content["init_args"]["configuration"] = CASCADE
        torch.save(content, path)
    (models / FULL).rename(models / FULL.replace("3d_fullres", CASCADE))


def read_by(name: str) -> Callable[[Path], None]:
    def change(models: Path) -> None:
        plans = json.loads((models / FULL / "plans.json").read_text())
        (models / FULL / "plans.json").write_text(json.dumps(plans | {"image_reader_writer": name}))

    return change


class Evil:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


def with_code(models: Path) -> None:
    (models / FULL / "fold_0" / "checkpoint_final.pth").write_bytes(pickle.dumps(Evil()))


def with_numpy(models: Path) -> None:
    """Beside the float32 that nnU-Net has logged in the training of these models."""
    for fold in (0, 1):
        path = models / FULL / f"fold_{fold}" / "checkpoint_final.pth"
        content = torch.load(path, weights_only=False)
        assert isinstance(content["logging"]["train_losses"][0], np.float32)
        torch.save(content | {"_best_ema": np.float64(0.5)}, path)


@pytest.mark.parametrize(
    ("change", "arguments", "error"),
    [
        (
            cascade,
            ("", None, CASCADE),
            "second stage of a cascade: its network also reads the segmentation of 3d_lowres",
        ),
        (with_code, (FULL,), "cannot be read without running code in it"),
        (with_numpy, (FULL,), None),
        (None, ("",), "holds several models"),
        (None, ("", None, "3d_lowres"), "no model of the configuration 3d_lowres, and .*nnUNetPlans__2d, nnUNetT"),
        (None, ("..",), "holds no plans.json: pass --nnunet_model_folder"),
        (None, (FULL, [0, 3]), "has no checkpoint_final.pth of fold 3, but .* in fold_0, fold_1"),
        (None, (FULL, [0], None, "checkpoint_latest.pth"), "but checkpoint_best.pth, checkpoint_final.pth in fold_0"),
        (read_by("MyReader"), (FULL,), "are read by MyReader, and only scans of SimpleITKIO, .* are explained"),
        (lambda models: (models / FULL / "dataset.json").unlink(), (FULL,), "No such file .*dataset.json"),
    ],
)
def test_refuses_with_the_reason(models: Path, change: Any, arguments: Any, error: str | None, capsys: Any) -> None:
    if change is not None:
        change(models)
    if error is None:
        NNUNetModel(models / arguments[0], *arguments[1:])
    else:
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            NNUNetModel(models / arguments[0], *arguments[1:])
    assert "it ran" not in capsys.readouterr().out


def test_mirrors_along_all_combinations_of_axes() -> None:
    """Written slowly: each flip of the patch is flipped back, and all are averaged."""
    network = torch.nn.Conv3d(1, 2, 3, padding=1)
    patches = torch.randn(2, 1, 4, 5, 6)
    with torch.no_grad():
        flipped = [network(patches.flip(axes)).flip(axes) for axes in [(), (2,), (4,), (2, 4)]]
        found = MirroredNetwork(network, (0, 2))(patches)
    assert_close(found, torch.stack(flipped).mean(0))


def test_slices_of_a_volume_go_through_a_network_of_slices() -> None:
    network = torch.nn.Conv2d(1, 2, 3, padding=1)
    patches = torch.randn(2, 1, 1, 5, 6)
    with torch.no_grad():
        found = NNUNetNetwork([MirroredNetwork(network, spatial_dims=2)])(patches)
        assert_same_bits(found[:, :, 0], network(patches[:, :, 0]))


@pytest.mark.parametrize(
    ("configuration", "shape", "edges"), [("3d_fullres", (7, 20, 18), [4, 10, 9]), ("2d", (3, 30, 24), [1, 15, 12])]
)
def test_remembers_patches(
    nnunet_models: Path, configuration: str, shape: Any, edges: list[int], caplog: Any, monkeypatch: Any
) -> None:
    """The scores of whole images, from fewer forwards. nnU-Net adds up in float16, so they are compared without."""
    model = NNUNetModel(nnunet_models, configuration=configuration)
    network = model.network()
    for member in network.members:
        member.flips = member.flips[1:2]
    image = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(NNUNetInferer, "blended_in", torch.float32)
    inferer = NNUNetInferer(model.patch_size)
    masks = SlidingWindowMasks(edges, edges)
    explain = ms.PerturbationInferer(masks, ms.RegionScore(1, "softmax"), OcclusionScoring(), inferer=inferer)
    with counted_patches() as few:
        (remembered,) = explain.explain(image, network)
    with counted_patches() as many:
        (whole,) = explain.replace(patch_memory=False).explain(image, network)
    assert "no patches are remembered" not in caplog.text
    assert sum(few) < sum(many)
    assert whole.scores.std() > 1e-4
    assert_close(remembered.scores, whole.scores)
    assert_close(remembered.reference_scores, whole.reference_scores)


# nnU-Net's preprocessing as a transform, compared with nnU-Net's own readers, preprocessor and export.
TURNED = np.array([[0.96, -0.28, 0], [0.28, 0.96, 0], [0, 0, 1]]) @ np.array([[1, 0, 0], [0, 0.8, -0.6], [0, 0.6, 0.8]])
AFFINES = {
    "anisotropic": nib.affines.from_matvec(np.diag([-4.1, -0.9, 0.7]), [5, -7, 20]),
    "oblique": nib.affines.from_matvec(TURNED @ np.diag([2.3, 1.1, 1.3]), [5, -7, 20]),
    "permuted": nib.affines.from_matvec((TURNED @ np.diag([0.8, 1.1, 3.3]))[:, [2, 0, 1]], [5, -7, 20]),
}


def pipeline(model: NNUNetModel) -> Compose:
    turn = [Orientationd("image", axcodes="RAS", labels=None)] if model.reorients else []
    own = NNUNetPreprocessd("image", model.plans, model.dataset_json, model.configuration)
    return Compose([LoadImaged("image"), EnsureChannelFirstd("image"), *turn, own])


@pytest.mark.parametrize("configuration", ["3d_fullres", "2d"])
@pytest.mark.parametrize(
    ("place", "reader"),
    [("anisotropic", "SimpleITKIO"), ("oblique", "NibabelIOWithReorient"), ("permuted", "SimpleITKIOWithReorient")],
)
def test_preprocesses_and_inverts_as_nnunet(
    nnunet_models: Path, tmp_path: Path, place: str, reader: str, configuration: str
) -> None:
    """The network's input is nnU-Net's, and logits that are inverted are its probabilities on the scan's grid."""
    model = NNUNetModel(nnunet_models, 0, configuration)
    model.reorients = reader.endswith("WithReorient")
    predictor = own_predictor(model.folder, [0], mirroring=False)
    predictor.plans_manager.plans["image_reader_writer"] = reader
    path = scan(tmp_path / "case.nii.gz", AFFINES[place], (7, 15, 17))
    pre = pipeline(model)
    item = pre({"image": str(path)})
    array, properties = predictor.plans_manager.image_reader_writer_class().read_images([str(path)])
    preprocessor = predictor.configuration_manager.preprocessor_class(verbose=False)
    managers = predictor.plans_manager, predictor.configuration_manager
    theirs, _, known = preprocessor.run_case_npy(array, None, dict(properties), *managers, predictor.dataset_json)
    assert_same_bits(item["image"].numpy(), theirs)
    assert (
        min(np.ptp(side) < size for side, size in zip(known["bbox_used_for_cropping"], array.shape[1:], strict=True))
        < 1
    )
    with torch.no_grad():
        logits = NNUNetInferer(model.patch_size)(item["image"][None], model.network(mirroring=False))[0]
    item["saliency"] = convert_to_dst_type(logits, item["image"], dtype=torch.float16)[0]
    back = Invertd("saliency", pre, orig_keys="image", nearest_interp=False)(item)["saliency"]
    assert_close(back.affine, AFFINES[place], within=SINGLE)  # a header is in single precision
    _, probabilities = predictor.predict_single_npy_array(array, properties, save_or_return_probabilities=True)
    if model.reorients:
        code = nib.orientations.ornt_transform(*map(nib.io_orientation, (np.eye(4), AFFINES[place])))
        turned = [nib.orientations.apply_orientation(each.transpose(2, 1, 0), code) for each in probabilities]
        probabilities = np.stack(turned).transpose(0, 3, 2, 1)
    inside = (np.asarray(back) != 0).any(axis=0)
    assert 0.5 < inside.mean() < 1
    found = torch.as_tensor(np.asarray(back)).float().softmax(0).numpy()
    assert np.abs(found - probabilities.transpose(0, 3, 2, 1))[:, inside].max() < 1e-6


@pytest.mark.parametrize("suffix", ["mha", "nrrd", "nii.gz"])
def test_takes_voxel_sizes_as_nnunet_reads_them(nnunet_models: Path, tmp_path: Path, suffix: str) -> None:
    """Oblique; 15 voxels of 4.1 mm are 20.5 of 3 mm: with another last digit it would be one more."""
    itk = pytest.importorskip("SimpleITK")
    if suffix != "nii.gz":
        pytest.importorskip("itk")
    model = NNUNetModel(nnunet_models, 0, "3d_fullres")
    random = np.random.default_rng(0)
    for _ in range(5):
        image = itk.GetImageFromArray(random.normal(100, 20, (12, 14, 15)).astype(np.float32))
        image.SetSpacing([4.1, 3.8, 3.8])
        image.SetDirection(np.linalg.qr(random.normal(size=(3, 3)))[0].ravel().tolist())
        path = str(tmp_path / f"case.{suffix}")
        itk.WriteImage(image, path)
        array, properties = model.predictor.plans_manager.image_reader_writer_class().read_images([path])
        plans, known = model.predictor.plans_manager, model.predictor.configuration_manager
        preprocessor = known.preprocessor_class(verbose=False)
        theirs, _, _ = preprocessor.run_case_npy(array, None, dict(properties), plans, known, model.dataset_json)
        own = NNUNetPreprocessd("image", model.plans, model.dataset_json, model.configuration)
        item = Compose([scan_loader("image", dtype=np.float32), EnsureChannelFirstd("image"), own])({"image": path})
        assert_same_bits(item["image"].numpy(), theirs)
        info = item["image"].applied_operations[-1][TraceKeys.EXTRA_INFO]
        assert info["spacing"] == [*map(float, properties["spacing"])]


def test_maps_of_regions_come_back_by_nearest_neighbour(nnunet_models: Path, tmp_path: Path) -> None:
    model = NNUNetModel(nnunet_models, 0, "3d_fullres")
    path = scan(tmp_path / "case.nii.gz", AFFINES["oblique"], (7, 15, 17))
    pre = pipeline(model)
    item = pre({"image": str(path)})
    values = torch.randint(1, 5, item["image"].shape, generator=torch.Generator().manual_seed(0)).float()
    item["saliency"] = convert_to_dst_type(values, item["image"])[0]
    back = Invertd("saliency", pre, orig_keys="image", nearest_interp=True)(item)["saliency"]
    assert set(back.unique().tolist()) == {0, 1, 2, 3, 4}
