"""A fill in the scan's own units, against slow references that freeze what each step took from the scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import (
    AdjustContrastd,
    CastToTyped,
    ClipIntensityPercentilesd,
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    EnsureTyped,
    Flipd,
    GaussianSmoothd,
    HistogramNormalized,
    Lambdad,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandGaussianNoised,
    RepeatChanneld,
    Resized,
    Rotate90d,
    ScaleIntensityd,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentilesd,
    ShiftIntensityd,
    Spacingd,
    SpatialPadd,
    ThresholdIntensityd,
    ToNumpyd,
    ToTensord,
)

from monai_saliency import ClassScore, channel_occlusion
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.transforms import CheckScand

#: value before a step -> value after it, from the voxels of the scan before the step
Reference = Callable[[np.ndarray, float], float]


def normalized(scan: np.ndarray, value: float) -> float:
    return (value - scan.mean()) / scan.std()


def normalized_inside(scan: np.ndarray, value: float) -> float:
    return 0.0 if value == 0 else normalized(scan[scan != 0], value)


def percentiles(scan: np.ndarray, value: float) -> float:
    low, high = np.percentile(scan, 1), np.percentile(scan, 99)
    return float(np.clip(2 * (value - low) / (high - low) - 1, -1, 1))


STEPS: list[tuple[str, Callable[[], Any], Reference]] = [
    (
        "window",
        lambda: ScaleIntensityRanged("image", -160, 240, 0, 1, clip=True),
        lambda scan, value: min(max((value + 160) / 400, 0), 1),
    ),
    (
        "wide window",
        lambda: ScaleIntensityRanged("image", -1000, 1000, 0, 1),
        lambda scan, value: (value + 1000) / 2000,
    ),
    ("normalize", lambda: NormalizeIntensityd("image"), normalized),
    ("normalize inside", lambda: NormalizeIntensityd("image", nonzero=True), normalized_inside),
    ("by channel", lambda: NormalizeIntensityd("image", channel_wise=True), normalized),
    ("own numbers", lambda: NormalizeIntensityd("image", 7, 3), lambda scan, value: (value - 7) / 3),
    (
        "range",
        lambda: ScaleIntensityd("image", minv=-1, maxv=1),
        lambda scan, value: 2 * (value - scan.min()) / (scan.max() - scan.min()) - 1,
    ),
    ("percentiles", lambda: ScaleIntensityRangePercentilesd("image", 1, 99, -1, 1, clip=True), percentiles),
    (
        "clip",
        lambda: ClipIntensityPercentilesd("image", 1, 99),
        lambda scan, value: float(np.clip(value, np.percentile(scan, 1), np.percentile(scan, 99))),
    ),
    (
        "above",
        lambda: ThresholdIntensityd("image", 0, above=True, cval=-7),
        lambda scan, value: value if value > 0 else -7.0,
    ),
    ("shift", lambda: ShiftIntensityd("image", 5), lambda scan, value: value + 5),
    *(
        (name, make, lambda scan, value: value)
        for name, make in {
            "numpy": lambda: ToNumpyd("image"),
            "tensor": lambda: ToTensord("image"),
            "typed": lambda: EnsureTyped("image", dtype=torch.float32),
            "float64": lambda: CastToTyped("image", np.float64),
            "spacing": lambda: Spacingd("image", (1.2, 1.7, 1.4)),
            "orientation": lambda: Orientationd("image", "PIR", labels=None),
            "flip": lambda: Flipd("image", 1),
            "turn": lambda: Rotate90d("image", 1, (0, 2)),
            "crop": lambda: CropForegroundd("image", "image", select_fn=lambda x: x > x.min(), allow_smaller=True),
            "pad": lambda: SpatialPadd("image", (14, 11, 12)),
        }.items()
    ),
]


def loading() -> list[Any]:
    return [LoadImaged("image"), EnsureChannelFirstd("image")]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A CT of int16 with slope and intercept, a scan without a zero, one with a NaN, two channels."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("scans")
    ct = 2 * rng.normal(20, 100, (12, 10, 9)).round() - 24
    ct[:3], ct[3, :2] = -1000, 0
    image = nib.Nifti1Image(((ct + 24) / 2).astype(np.int16), np.diag([-1.0, 1.5, 2.0, 1.0]))
    image.header.set_slope_inter(2, -24)
    nib.save(image, folder / "ct.nii.gz")
    positive = rng.uniform(50, 900, (10, 9, 8))
    nan = positive.copy()
    nan[2, 3, 4] = np.nan
    others = {
        "positive": positive,
        "nan": nan,
        "two": rng.normal([50, 500], [3, 90], (8, 7, 6, 2)),
    }
    for name, voxels in others.items():
        affine = np.diag([-1.0, 1.5, 2.0, 1.0])
        nib.save(nib.Nifti1Image(voxels.astype(np.float32), affine), folder / f"{name}.nii.gz")
    return {name: str(folder / f"{name}.nii.gz") for name in ("ct", *others)}


def bound(value: Any, path: str, *steps: Any, whole: list[Any] | None = None) -> Any:
    """The value of the fill of one scan."""
    pipeline = Compose(whole if whole is not None else [*loading(), *steps])
    image = torch.as_tensor(pipeline({"image": path, "channels": 1})["image"])
    return ScanUnitFill(value, pipeline).bind(Case("a", image, file=path)).value


@pytest.mark.parametrize("name", ["ct", "positive"])
def test_chains_of_known_steps_give_the_reference(scans: dict[str, str], name: str) -> None:
    rng = np.random.default_rng(0)
    chains = [[number] for number in range(len(STEPS))] + [rng.integers(len(STEPS), size=3) for _ in range(12)]
    for chain in chains:
        steps = [STEPS[number] for number in chain]
        for value in (0.0, -777.25, 4000.0):
            item, expected = Compose(loading())({"image": scans[name]}), value
            for _, make, reference in steps:
                expected = reference(np.asarray(item["image"], dtype=np.float64), expected)
                item = make()(item)
            size = 1e-5 * max(1.0, abs(expected))
            found = bound(value, scans[name], *(make() for _, make, _ in steps))
            assert found == pytest.approx([expected], rel=1e-4, abs=10 * size), ([each[0] for each in steps], value)


REFUSED: dict[str, tuple[str, Callable[[], list[Any]], str]] = {
    "a filter": ("ct", lambda: [GaussianSmoothd("image", 1.0)], "GaussianSmoothd, which is not one of the steps"),
    "a function": ("ct", lambda: [Lambdad("image", lambda x: x / 2)], "Lambdad, which is not one"),
    "a histogram": ("ct", lambda: [HistogramNormalized("image")], "HistogramNormalized, which is not one"),
    "contrast": ("ct", lambda: [AdjustContrastd("image", 2.0)], "AdjustContrastd, which is not one"),
    "a random step": ("ct", lambda: [RandGaussianNoised("image", prob=1.0)], "RandGaussianNoised, which is not one"),
    "a plain function": ("ct", lambda: [lambda item: {"image": item["image"] * 2}], "function, which is not one"),
    "a soft clip": ("ct", lambda: [ClipIntensityPercentilesd("image", 1, 99, 1.0)], "has settings"),
    "blurred borders": ("ct", lambda: [Resized("image", (6, 7, 5), anti_aliasing=True)], r"Resized.*anti_aliasing"),
    "a type": ("ct", lambda: [CastToTyped("image", np.int16)], r"CastToTyped.*torch\.int16"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_any_other_step_is_refused_by_its_name(scans: dict[str, str], name: str) -> None:
    scan, make, words = REFUSED[name]
    with pytest.raises(ValueError, match=rf"-777\.25 cannot be followed through .*{words}.*ConstantFill"):
        bound(-777.25, scans[scan], *make())


def test_channels_have_their_own_statistics(scans: dict[str, str]) -> None:
    voxels = nib.load(scans["two"]).get_fdata()
    mean, deviation = voxels.mean((0, 1, 2)), voxels.std((0, 1, 2))
    step = NormalizeIntensityd("image", channel_wise=True)
    for value in (40.0, [40.0, 300.0]):
        np.testing.assert_allclose(bound(value, scans["two"], step), (np.asarray(value) - mean) / deviation, rtol=1e-4)
    assert bound(7, scans["two"]) == [7.0, 7.0]
    with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
        bound([1, 2, 3], scans["two"], step)


def test_whole_pipelines(scans: dict[str, str]) -> None:
    window = ScaleIntensityRanged("image", 0, 400, 0, 1)
    assert bound(100.0, scans["positive"], window, RepeatChanneld("image", 3)) == [0.25] * 3
    assert bound(100.0, scans["nan"], window) == [0.25]
    assert bound(100.0, scans["ct"], CheckScand("image"), window) == [0.25]
    # Before there is a channel axis.
    assert bound(100.0, scans["positive"], whole=[LoadImaged("image"), window, EnsureChannelFirstd("image")]) == [0.25]


def test_other_keys_of_the_pipeline_are_left_alone(scans: dict[str, str]) -> None:
    """The replay knows the image's file only."""
    path = scans["ct"]
    both = [LoadImaged(["image", "label"]), EnsureChannelFirstd(["image", "label"])]
    steps = [*both, ScaleIntensityRanged("image", 0, 100, 0, 1), EnsureTyped("label")]
    image = Compose(steps)({"image": path, "label": path})["image"].as_tensor()
    assert ScanUnitFill(50, Compose(steps)).bind(Case("ct", image, file=path)).value == [0.5]
    steps = [*both, CropForegroundd("image", "label", allow_smaller=True)]
    image = Compose(steps)({"image": path, "label": path})["image"].as_tensor()
    with pytest.raises(ValueError, match=r"from its file alone.*CropForegroundd failed \(KeyError: 'label'\)"):
        ScanUnitFill(50, Compose(steps)).bind(Case("ct", image, file=path))


def test_another_file_or_another_preprocessing(scans: dict[str, str]) -> None:
    pipeline = Compose(loading())
    with pytest.raises(ValueError, match="needs the scan's file, which is unknown"):
        ScanUnitFill(0, pipeline).bind(Case("ct", torch.zeros(1, 4, 4, 4)))
    case = Case("ct", pipeline({"image": scans["ct"]})["image"].as_tensor(), file=scans["ct"])
    with pytest.raises(ValueError, match="does not give the image that is explained"):
        ScanUnitFill(0, Compose([*loading(), ScaleIntensityd("image")])).bind(case)
    with pytest.raises(ValueError, match="does not give the image that is explained"):
        ScanUnitFill(1, [EnsureTyped("other")]).bind(case)


def test_inside_an_explanation(scans: dict[str, str]) -> None:
    """Hiding everything with air leaves the network with air, and the scan is not changed by the replay."""
    preprocessing = Compose([*loading(), NormalizeIntensityd("image")])
    image = preprocessing({"image": scans["ct"]})["image"]
    before = image.clone()
    explain = channel_occlusion(target=ClassScore([0], "none"), fill=ScanUnitFill(-1000, preprocessing))
    (explanation,) = explain.explain(image[None], lambda x: x.flatten(1).mean(1, keepdim=True))
    scan = nib.load(scans["ct"]).get_fdata()
    assert float(explanation.scores) == pytest.approx((-1000 - scan.mean()) / scan.std(), rel=1e-5)
    assert torch.equal(image, before)
    with pytest.raises(CaseError, match="needs the scan's file"):
        explain(image.as_tensor()[None], lambda x: x.flatten(1))
