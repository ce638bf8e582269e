"""nnU-Net's preprocessing as a transform, compared with nnU-Net's own readers, preprocessor and export."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.nnunet import own_predictor, scan
from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged, Orientationd
from monai.utils import TraceKeys, convert_to_dst_type

from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.networks.nnunet import NNUNetModel
from monai_saliency.storage.files import scan_loader
from monai_saliency.transforms import NNUNetPreprocessd

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

    read = predictor.plans_manager.image_reader_writer_class()
    array, properties = read.read_images([str(path)])
    preprocessor = predictor.configuration_manager.preprocessor_class(verbose=False)
    managers = predictor.plans_manager, predictor.configuration_manager
    theirs, _, known = preprocessor.run_case_npy(array, None, dict(properties), *managers, predictor.dataset_json)
    np.testing.assert_array_equal(item["image"].numpy(), theirs)
    assert (
        min(np.ptp(side) < size for side, size in zip(known["bbox_used_for_cropping"], array.shape[1:], strict=True))
        < 1
    )

    with torch.no_grad():
        logits = NNUNetInferer(model.patch_size)(item["image"][None], model.network(mirroring=False))[0]
    item["saliency"] = convert_to_dst_type(logits, item["image"], dtype=torch.float16)[0]
    back = Invertd("saliency", pre, orig_keys="image", nearest_interp=False)(item)["saliency"]
    np.testing.assert_allclose(back.affine, AFFINES[place], atol=1e-5)
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
        arguments = (
            array,
            None,
            dict(properties),
            model.predictor.plans_manager,
            model.predictor.configuration_manager,
            model.dataset_json,
        )
        theirs, _, _ = model.predictor.configuration_manager.preprocessor_class(verbose=False).run_case_npy(*arguments)
        own = NNUNetPreprocessd("image", model.plans, model.dataset_json, model.configuration)
        item = Compose([scan_loader("image", dtype=np.float32), EnsureChannelFirstd("image"), own])({"image": path})
        np.testing.assert_array_equal(item["image"].numpy(), theirs)
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
