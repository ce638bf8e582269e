"""Photographs of an nnU-Net model, compared with nnU-Net's own reader, preprocessor and predictor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.nnunet import counted_patches, own_predictor, photograph
from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged
from monai.utils import convert_to_dst_type
from PIL import Image

from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.networks.nnunet import NNUNetModel
from monai_saliency.storage.nnunet_photographs import nnunet_photograph_loader
from monai_saliency.transforms import LoadRegionsd, NNUNetPreprocessd

SHAPE = (23, 31)  # rows, columns


def pipeline(model: NNUNetModel) -> Compose:
    own = NNUNetPreprocessd("image", model.plans, model.dataset_json, model.configuration)
    return Compose([nnunet_photograph_loader("image", dtype=np.float32), EnsureChannelFirstd("image"), own])


def numbers(top: int, kind: type = np.uint8, channels: tuple[int, ...] = ()) -> np.ndarray:
    values = np.random.default_rng(0).integers(1, top, (*SHAPE, *channels)).astype(kind)
    values[:3] = values[:, -2:] = 0
    return values


def palette() -> Image.Image:
    return Image.fromarray(numbers(256, channels=(3,))).quantize(7)


GRAY = {"gray": numbers(256), "16 bits": numbers(2**16, np.uint16), "1 bit": numbers(2, bool)}
COLOURS = {"colours": numbers(256, channels=(3,)), "alpha": numbers(256, channels=(4,))}


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [(kind, "png") for kind in (*GRAY, *COLOURS, "palette", "two files")]
    + [(kind, "tif") for kind in ("gray", "16 bits", "float", *COLOURS, "two files")],
)
def test_input_is_nnunets(nnunet_photographs: Path, tmp_path: Path, kind: str, suffix: str) -> None:
    """To the bit, whatever is in the file; and it comes back as it lies in the photograph."""
    values = {**GRAY, **COLOURS, "float": numbers(2**16, np.float32)}.get(kind, GRAY["gray"])
    files = [tmp_path / f"case_000{i}.{suffix}" for i in range(2 if kind == "two files" else 1)]
    for i, file in enumerate(files):
        (palette() if kind == "palette" else Image.fromarray(np.roll(values, i, axis=0))).save(file)
    model = NNUNetModel(nnunet_photographs)
    raw, _ = model.manager.image_reader_writer_class().read_images([*map(str, files)])
    model.plans["configurations"]["2d"]["normalization_schemes"] = ["ZScoreNormalization"] * len(raw)
    model.plans["configurations"]["2d"]["use_mask_for_norm"] = [False] * len(raw)
    model.plans["foreground_intensity_properties_per_channel"]["3"] = {}
    preprocessor = model.settings.preprocessor_class(verbose=False)
    managers = model.manager, model.settings
    theirs, _, known = preprocessor.run_case([*map(str, files)], None, *managers, model.dataset_json)

    pre = pipeline(model)
    item = pre({"image": [*map(str, files)]})
    np.testing.assert_array_equal(item["image"].numpy(), theirs[:, 0])
    assert len(raw) == {"colours": 3, "alpha": 4, "palette": 3, "two files": 2}.get(kind, 1)
    box = known["bbox_used_for_cropping"][1:]
    assert [side[1] - side[0] for side in box] != [*SHAPE] or kind in ("palette", "alpha")

    place = tuple(slice(*side) for side in box)
    item["saliency"] = convert_to_dst_type(raw[(slice(None), 0, *place)], item["image"])[0]
    for nearest in (False, True):
        back = Invertd("saliency", pre, orig_keys="image", nearest_interp=nearest)(item)["saliency"]
        np.testing.assert_array_equal(back.affine, np.eye(4))
        shown = Image.open(files[0]).convert("RGB") if kind == "palette" else values
        np.testing.assert_array_equal(back[: np.atleast_3d(shown).shape[2]], np.atleast_3d(shown).transpose(2, 1, 0))


@pytest.mark.parametrize("mirroring", [False, True])
def test_probabilities_are_nnunets(nnunet_photographs: Path, tmp_path: Path, mirroring: bool) -> None:
    """From the file to the photograph's grid, in as many forwards."""
    path = photograph(tmp_path / "case_0000.png", SHAPE)
    model = NNUNetModel(nnunet_photographs)
    pre, inferer = pipeline(model), NNUNetInferer(model.settings.patch_size, spatial_dims=model.spatial_dims)
    item = pre({"image": str(path)})
    with torch.no_grad(), counted_patches() as ours:
        logits = inferer(item["image"][None], model.network(mirroring))[0]
    item["pred"] = convert_to_dst_type(logits, item["image"], dtype=torch.float16)[0]
    found = Invertd("pred", pre, orig_keys="image", nearest_interp=False)(item)["pred"]
    predictor = own_predictor(model.folder, [0], mirroring)
    array, properties = predictor.plans_manager.image_reader_writer_class().read_images([str(path)])
    with counted_patches() as theirs:
        _, expected = predictor.predict_single_npy_array(array, properties, save_or_return_probabilities=True)
    expected = expected[:, 0].transpose(0, 2, 1)
    inside = np.asarray(found.abs().amax(0) > 0)
    assert 0.5 < inside.mean() < 1
    assert np.abs(np.asarray(found.float().softmax(0)) - expected)[:, inside].max() < 1e-6
    assert expected.std() > 0
    assert sum(ours) == sum(theirs) > (4 if mirroring else 1)


def test_regions_lie_on_the_preprocessed_photograph(nnunet_photographs: Path, tmp_path: Path) -> None:
    """A label map that was drawn on the photograph, whose margin nnU-Net crops."""
    model = NNUNetModel(nnunet_photographs)
    model.plans["configurations"]["2d"]["normalization_schemes"] = ["NoNormalization"] * 3
    path = photograph(tmp_path / "case_0000.png", SHAPE)
    Image.fromarray(np.asarray(Image.open(path))[..., 1] // 10).save(tmp_path / "label.png")
    item = pipeline(model)({"image": str(path), "label": str(tmp_path / "label.png")})
    assert item["image"].shape[1:] != SHAPE
    np.testing.assert_array_equal(LoadRegionsd()(item)["regions"][0], item["image"][1] // 10)


def test_model_that_cuts_across_refuses_photographs(nnunet_models: Path, tmp_path: Path) -> None:
    """Its slices would be lines of the picture."""
    model = NNUNetModel(nnunet_models, configuration="2d")
    pre = Compose([LoadImaged("image"), EnsureChannelFirstd("image")])
    own = NNUNetPreprocessd("image", model.plans, model.dataset_json, "2d")
    Image.fromarray(numbers(256)).save(tmp_path / "case.png")
    with pytest.raises(ValueError, match="a scan of 3 axes is expected"):
        own(pre({"image": str(tmp_path / "case.png")}))
