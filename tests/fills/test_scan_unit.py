from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    EnsureTyped,
    GaussianSmoothd,
    HistogramNormalized,
    Lambdad,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandGaussianNoised,
    ScaleIntensityd,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentilesd,
    Spacingd,
    SpatialPadd,
    ThresholdIntensityd,
)

from monai_saliency import ClassScore, channel_occlusion
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.transforms import CheckScand

SCAN_SHAPE = (12, 10, 9)


@pytest.fixture
def ct(tmp_path: Path) -> str:
    """An int16 scan with slope 2 and intercept -24: air at -1000, a table at 0, and a body of noise."""
    rng = np.random.default_rng(0)
    units = 2 * rng.normal(20, 100, SCAN_SHAPE).round() - 24
    units[:3], units[3, :2] = -1000, 0
    image = nib.Nifti1Image(((units + 24) / 2).astype(np.int16), np.diag([-1.0, 1.5, 2.0, 1.0]))
    image.header.set_slope_inter(2, -24)
    nib.save(image, tmp_path / "ct.nii.gz")
    assert np.array_equal(nib.load(tmp_path / "ct.nii.gz").get_fdata(), units)
    return str(tmp_path / "ct.nii.gz")


def loading(*steps: Any) -> Compose:
    return Compose(
        [
            LoadImaged("image"),
            EnsureChannelFirstd("image"),
            Orientationd("image", "RAS", labels=None),
            Spacingd("image", (1.2, 1.2, 1.2)),
            CropForegroundd("image", "image", select_fn=lambda x: x > -990, margin=2, allow_smaller=True),
            *steps,
        ]
    )


def in_network_units(value: Any, path: str, *steps: Any) -> Any:
    """The fill of one scan and, for the slow references, the scan before the steps of intensities."""
    image = loading(*steps)({"image": path})["image"].as_tensor()
    fill = ScanUnitFill(value, loading(*steps)).bind(Case("ct", image, file=path))
    filled = fill(image[None])
    assert filled.shape == image[None].shape
    (unique,) = filled.unique().tolist()
    return unique, loading()({"image": path})["image"].as_tensor().double()


VALUES = [-1000.0, 0.0, -777.25, 4000.0]


@pytest.mark.parametrize("value", VALUES)
class TestScanUnitFill:
    def test_a_window_of_hounsfield_units(self, ct: str, value: float) -> None:
        fill, _ = in_network_units(value, ct, ScaleIntensityRanged("image", -160, 240, 0, 1, clip=True))
        assert fill == pytest.approx(min(max((value + 160) / 400, 0), 1), abs=1e-6)

    @pytest.mark.parametrize("nonzero", [False, True])
    def test_the_scans_own_mean_and_deviation(self, ct: str, value: float, nonzero: bool) -> None:
        fill, scan = in_network_units(value, ct, NormalizeIntensityd("image", nonzero=nonzero))
        voxels = scan[scan != 0] if nonzero else scan
        expected = (value - voxels.mean()) / voxels.std(unbiased=False)
        assert fill == pytest.approx(0.0 if nonzero and value == 0 else float(expected), rel=1e-5, abs=1e-6)

    def test_the_scans_own_range(self, ct: str, value: float) -> None:
        fill, scan = in_network_units(value, ct, ScaleIntensityd("image", minv=-1, maxv=1))
        expected = 2 * (value - scan.min()) / (scan.max() - scan.min()) - 1
        assert fill == pytest.approx(float(expected), rel=1e-5, abs=1e-6)

    def test_one_step_after_the_other(self, ct: str, value: float) -> None:
        steps = (
            ThresholdIntensityd("image", -500, above=True, cval=-500),
            NormalizeIntensityd("image"),
            Lambdad("image", lambda x: torch.tanh(x / 2)),
            EnsureTyped("image"),
            SpatialPadd("image", (20, 20, 20)),
        )
        fill, scan = in_network_units(value, ct, *steps)
        scan = scan.clamp_min(-500)
        expected = torch.tanh((max(value, -500) - scan.mean()) / scan.std(unbiased=False) / 2)
        assert fill == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


class TestScanUnitFillOfCases:
    def test_a_value_that_the_scan_holds_needs_no_rule(self, ct: str) -> None:
        """A histogram's curve is neither voxel by voxel nor linear, but air is in the scan."""
        step = HistogramNormalized("image", num_bins=64)
        fill, _ = in_network_units(-1000, ct, step)
        scan = loading(step)({"image": ct})["image"].as_tensor()
        assert fill == float(scan[loading()({"image": ct})["image"].as_tensor() == -1000][0])
        with pytest.raises(ValueError, match=r"the value of -777\.25 after HistogramNormalized is not known exactly"):
            in_network_units(-777.25, ct, step)

    @pytest.mark.parametrize("value", VALUES)
    def test_percentiles_with_a_clip(self, ct: str, value: float) -> None:
        fill, scan = in_network_units(value, ct, ScaleIntensityRangePercentilesd("image", 1, 99, -1, 1, clip=True))
        low, high = np.percentile(scan, 1), np.percentile(scan, 99)
        assert fill == pytest.approx(min(max(2 * (value - low) / (high - low) - 1, -1), 1), abs=1e-5)

    def test_steps_that_mix_voxels_are_refused(self, ct: str) -> None:
        with pytest.raises(ValueError, match="the value of -1000 after GaussianSmoothd is not known exactly"):
            in_network_units(-1000, ct, GaussianSmoothd("image", 1.0))
        with pytest.raises(ValueError, match="RandGaussianNoised is random"):
            in_network_units(-1000, ct, RandGaussianNoised("image", prob=1.0))

    def test_channels_have_their_own_statistics(self, tmp_path: Path) -> None:
        voxels = np.random.default_rng(0).normal([50, 500], [3, 90], (8, 7, 6, 2))
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "two.nii")
        steps = [LoadImaged("image"), EnsureChannelFirstd("image"), NormalizeIntensityd("image", channel_wise=True)]
        image = Compose(steps)({"image": str(tmp_path / "two.nii")})["image"].as_tensor()
        case = Case("two", image, file=str(tmp_path / "two.nii"))
        mean, deviation = voxels.mean((0, 1, 2)), voxels.std((0, 1, 2))
        for value in (40.0, [40.0, 300.0]):
            fill = ScanUnitFill(value, Compose(steps)).bind(case)(image[None])
            np.testing.assert_allclose(fill[0, :, 0, 0, 0], (np.asarray(value) - mean) / deviation, rtol=1e-5)
        with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
            ScanUnitFill([1, 2, 3], Compose(steps)).bind(case)

    def test_one_value_for_all_channels_without_a_step_of_intensities(self, tmp_path: Path) -> None:
        nib.save(nib.Nifti1Image(np.random.default_rng(0).random((8, 7, 6, 2)), np.eye(4)), tmp_path / "two.nii")
        steps = [LoadImaged("image"), EnsureChannelFirstd("image"), CheckScand("image")]
        image = Compose(steps)({"image": str(tmp_path / "two.nii"), "channels": 2})["image"].as_tensor()
        fill = ScanUnitFill(7, Compose(steps)).bind(Case("two", image, file=str(tmp_path / "two.nii")))
        assert fill.value == [7.0, 7.0]

    def test_other_keys_of_the_pipeline_are_left_alone(self, ct: str) -> None:
        """The replay knows the image's file only."""
        steps = [
            LoadImaged(["image", "label"]),
            EnsureChannelFirstd(["image", "label"]),
            ScaleIntensityRanged("image", 0, 100, 0, 1),
            EnsureTyped("label"),
        ]
        image = Compose(steps)({"image": ct, "label": ct})["image"].as_tensor()
        assert ScanUnitFill(50, Compose(steps)).bind(Case("ct", image, file=ct)).value == [0.5]

    def test_a_step_that_needs_more_than_the_image(self, ct: str) -> None:
        steps = [LoadImaged(["image", "label"]), EnsureChannelFirstd(["image", "label"])]
        steps.append(CropForegroundd("image", "label", allow_smaller=True))
        image = Compose(steps)({"image": ct, "label": ct})["image"].as_tensor()
        with pytest.raises(ValueError, match=r"from its file alone.*CropForegroundd failed \(KeyError: 'label'\)"):
            ScanUnitFill(50, Compose(steps)).bind(Case("ct", image, file=ct))

    def test_errors(self, ct: str) -> None:
        with pytest.raises(ValueError, match="needs the scan's file, which is unknown"):
            ScanUnitFill(0, loading()).bind(Case("ct", torch.zeros(1, 4, 4, 4)))
        image = loading()({"image": ct})["image"].as_tensor()
        with pytest.raises(ValueError, match="does not give the image that is explained"):
            ScanUnitFill(0, loading(ScaleIntensityd("image"))).bind(Case("ct", image, file=ct))

    def test_inside_an_explanation(self, ct: str) -> None:
        """Hiding everything with air leaves the network with air, and the scan is not changed by the replay."""
        preprocessing = loading(NormalizeIntensityd("image"))
        image = preprocessing({"image": ct})["image"]
        before = image.clone()
        explain = channel_occlusion(target=ClassScore([0], "none"), fill=ScanUnitFill(-1000, preprocessing))
        (explanation,) = explain.explain(image[None], lambda x: x.flatten(1).mean(1, keepdim=True))
        scan = loading()({"image": ct})["image"].as_tensor().double()
        air = float((-1000 - scan.mean()) / scan.std(unbiased=False))
        assert float(explanation.scores) == pytest.approx(air, rel=1e-5)
        assert torch.equal(image, before)
        with pytest.raises(CaseError, match="needs the scan's file"):
            explain(image.as_tensor()[None], lambda x: x.flatten(1))
