"""A fill in the scan's own units, against a slow reference that freezes what each step took from the scan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import (
    AdjustContrastd,
    CastToTyped,
    CenterSpatialCropd,
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    EnsureTyped,
    Flipd,
    GaussianSmoothd,
    HistogramNormalized,
    Lambdad,
    LoadImaged,
    MedianSmoothd,
    NormalizeIntensityd,
    Orientationd,
    Resized,
    ResizeWithPadOrCropd,
    Rotate90d,
    ScaleIntensityd,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentilesd,
    Spacingd,
    SpatialPadd,
    ThresholdIntensityd,
    ToNumpyd,
    ToTensord,
)

from monai_saliency.cases import Case
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.fills.value_after_step import value_after_step

#: value before a step -> value after it, from the scan before the step; None: no one number is right
Reference = Callable[[np.ndarray], Callable[[float], "float | None"]]
Step = tuple[str, Callable[[], Any], Reference]


def moves(name: str, make: Callable[[], Any]) -> Step:
    return name, make, lambda scan: lambda value: value


def alone(name: str, make: Callable[[], Any], function: Callable[[float], float | None]) -> Step:
    return name, make, lambda scan: function


def mixes(name: str, make: Callable[[], Any]) -> Step:
    return name, make, lambda scan: lambda value: None


def window(low: float, high: float, clip: bool) -> Step:
    def function(value: float) -> float:
        scaled = (value - low) / (high - low)
        return min(max(scaled, 0.0), 1.0) if clip else scaled

    name = f"window {low} {high} {clip}"
    return alone(name, lambda: ScaleIntensityRanged("image", low, high, 0, 1, clip=clip), function)


def normalize(nonzero: bool, channel_wise: bool) -> Step:
    def reference(scan: np.ndarray) -> Callable[[float], float | None]:
        voxels = scan[scan != 0] if nonzero else scan.ravel()
        mean, deviation = (voxels.mean(), voxels.std()) if len(voxels) else (0.0, 1.0)
        return lambda value: 0.0 if nonzero and value == 0 else (value - mean) / (deviation or 1.0)

    def make() -> Any:
        return NormalizeIntensityd("image", nonzero=nonzero, channel_wise=channel_wise)

    return f"normalize {nonzero} {channel_wise}", make, reference


def extremes(low: float, high: float) -> Step:
    def reference(scan: np.ndarray) -> Callable[[float], float | None]:
        least, most = scan.min(), scan.max()
        return lambda value: (value - least) / (most - least) * (high - low) + low if most > least else low * value

    return f"range {low} {high}", lambda: ScaleIntensityd("image", minv=low, maxv=high), reference


def percentiles(lower: float, upper: float, clip: bool) -> Step:
    def reference(scan: np.ndarray) -> Callable[[float], float | None]:
        low, high = np.percentile(scan, lower), np.percentile(scan, upper)

        def function(value: float) -> float:
            scaled = value - low if high == low else (value - low) / (high - low)
            return min(max(scaled, 0.0), 1.0) if clip else scaled

        return function

    def make() -> Any:
        return ScaleIntensityRangePercentilesd("image", lower, upper, 0, 1, clip=clip)

    return f"percentiles {lower} {upper} {clip}", make, reference


def contrast(gamma: float) -> Step:
    def reference(scan: np.ndarray) -> Callable[[float], float | None]:
        least, span = scan.min(), scan.max() - scan.min()
        return lambda value: ((value - least) / (span + 1e-7)) ** gamma * span + least if value >= least else None

    return f"contrast {gamma}", lambda: AdjustContrastd("image", gamma), reference


def histogram(scan: np.ndarray) -> Callable[[float], float | None]:
    if scan.dtype.kind in "iu":  # one bin for each whole number
        counts, edges = np.histogram(scan.ravel(), np.arange(scan.min() - 0.5, scan.max() + 1))
    else:
        counts, edges = np.histogram(scan.ravel(), 64)
    cumulated = counts.cumsum().astype(float)
    cumulated = (cumulated - cumulated[0]) / max(cumulated[-1] - cumulated[0], 1e-30) * 255
    return lambda value: float(np.interp(value, (edges[1:] + edges[:-1]) / 2, cumulated))


def z_score_in_reach(image: torch.Tensor) -> torch.Tensor:
    return ((image - image.mean()) / image.std(unbiased=False)).clamp(-2, 2)


def z_score_reference(scan: np.ndarray) -> Callable[[float], float | None]:
    return lambda value: min(max((value - scan.mean()) / (scan.std() or 1.0), -2.0), 2.0)


def bias_field(image: Any) -> Any:
    return image * np.linspace(1, 2, image.shape[-1]).astype("float32")


INTENSITY: list[Step] = [
    window(-160, 240, True),
    window(-1000, 1000, False),
    extremes(0, 1),
    extremes(-1, 2),
    normalize(False, False),
    normalize(True, False),
    normalize(True, True),
    percentiles(1, 99, True),
    percentiles(0, 100, True),
    percentiles(5, 95, False),
    alone("above", lambda: ThresholdIntensityd("image", 0, above=True, cval=-7), lambda v: v if v > 0 else -7.0),
    alone("below", lambda: ThresholdIntensityd("image", 40, above=False, cval=40), lambda v: v if v < 40 else 40.0),
    contrast(1.7),
    ("histogram", lambda: HistogramNormalized("image", num_bins=64), histogram),
    alone("tanh", lambda: Lambdad("image", lambda x: torch.tanh(torch.as_tensor(x) / 300)), lambda v: np.tanh(v / 300)),
    ("clamped z-score", lambda: Lambdad("image", z_score_in_reach), z_score_reference),
    ("over the maximum", lambda: Lambdad("image", lambda x: x / x.max()), lambda scan: lambda v: v / scan.max()),
    (
        "above the mean",
        lambda: Lambdad("image", lambda x: (x > x.mean()) * 2.0),
        lambda scan: lambda v: 2.0 * bool(v > scan.mean()),
    ),
]
FORM: list[Step] = [
    moves("numpy", lambda: ToNumpyd("image")),
    moves("tensor", lambda: ToTensord("image")),
    moves("typed", lambda: EnsureTyped("image", dtype=torch.float32)),
    moves("float64", lambda: CastToTyped("image", np.float64)),
    alone("int16", lambda: CastToTyped("image", np.int16), lambda v: float(np.trunc(v))),
    alone("uint8", lambda: CastToTyped("image", np.uint8), lambda v: float(int(v)) + 0.0 if -1 < v < 256 else None),
]
SPATIAL: list[Step] = [
    moves("spacing", lambda: Spacingd("image", (1.2, 1.7, 1.4))),
    moves("orientation", lambda: Orientationd("image", "PIR", labels=None)),
    moves("flip", lambda: Flipd("image", 1)),
    moves("turn", lambda: Rotate90d("image", 1, (0, 2))),
    moves("foreground", lambda: CropForegroundd("image", "image", select_fn=lambda x: x > x.min(), allow_smaller=True)),
    moves("pad", lambda: SpatialPadd("image", (14, 11, 12))),
    moves("pad or crop", lambda: ResizeWithPadOrCropd("image", (11, 12, 7))),
    moves("center", lambda: CenterSpatialCropd("image", (9, 8, 7))),
]
MIXING: list[Step] = [
    mixes("smooth", lambda: GaussianSmoothd("image", 1.0)),
    mixes("median", lambda: MedianSmoothd("image", 1)),
    mixes("blurred edges", lambda: Resized("image", (6, 7, 5), anti_aliasing=True)),
    mixes("crop and scale", lambda: Lambdad("image", lambda x: x[:, 1:-1] / 2)),
    mixes("crop at a statistic", lambda: Lambdad("image", lambda x: x[..., : 3 + int(x[0, 0, 0, 0] > 0)])),
    alone(
        "bias field",
        lambda: Lambdad("image", lambda x: x * np.linspace(1, 2, x.shape[-1]).astype("float32")),
        lambda v: None if v else 0.0,
    ),
    mixes("noise", lambda: Lambdad("image", lambda x: x + torch.randn(x.shape))),
    mixes("own flip", lambda: Lambdad("image", lambda x: torch.flip(torch.as_tensor(x), (1,)))),
]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A CT with air, a scan without a zero, and one with few different values."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("scans")
    ct = rng.normal(20, 100, (12, 10, 9)).round()
    ct[:3], ct[3, :2] = -1000, 0
    scans = {"ct": ct, "positive": rng.uniform(50, 900, (10, 9, 8)), "few": rng.choice([0.0, 30, 77, 200], (9, 10, 8))}
    for name, voxels in scans.items():
        nib.save(nib.Nifti1Image(voxels.astype(np.float32), np.diag([-1.0, 1.5, 2.0, 1.0])), folder / f"{name}.nii.gz")
    return [str(folder / f"{name}.nii.gz") for name in scans]


def loading() -> list[Any]:
    return [LoadImaged("image"), EnsureChannelFirstd("image")]


def chains(count: int) -> Iterator[tuple[list[Step], int, float]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        kinds = rng.choice(["intensity", "spatial", "form", "mixing"], rng.integers(1, 6), p=[0.4, 0.4, 0.17, 0.03])
        tables = {"intensity": INTENSITY, "spatial": SPATIAL, "form": FORM, "mixing": MIXING}
        steps = [tables[kind][rng.integers(len(tables[kind]))] for kind in kinds]
        value = float(rng.choice([-1000.0, 0.0, 77.0, -777.25, 4000.0, 60.0, round(float(rng.uniform(-200, 200)), 2)]))
        yield steps, int(rng.integers(3)), value


def expected(steps: list[Step], path: str, value: float) -> tuple[float | None, Any, float]:
    """The value, the preprocessed image, and the largest magnitude on the way, for the tolerance."""
    item = Compose(loading())({"image": path})
    one: float | None = value
    for _, make, reference in steps:
        scan = np.asarray(item["image"])
        scan = scan.astype(np.float64 if scan.dtype.kind == "f" else np.int64)
        one = None if one is None else reference(scan)(one)
        item = make()(item)
    return one, torch.as_tensor(item["image"]), float(abs(np.asarray(item["image"], dtype=np.float64)).max())


def fill_or_none(value: float, pipeline: Compose, case: Case) -> ConstantFill | None:
    """The fill; None where it is refused with what to do."""
    try:
        return ScanUnitFill(value, pipeline).bind(case)
    except ValueError as error:
        if not re.search("give the fill in the network's input space|does not give the image", str(error)):
            raise
        return None


@pytest.mark.filterwarnings("ignore")
def test_random_chains_give_the_reference_or_an_error(scans: list[str]) -> None:
    outcomes: Counter[str] = Counter()
    given: Counter[str] = Counter()
    for steps, which, value in chains(320):
        names = [name for name, _, _ in steps]
        try:
            one, image, size = expected(steps, scans[which], value)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            continue  # no preprocessing
        if not bool(image.isfinite().all()):
            continue
        pipeline = Compose([*loading(), *(make() for _, make, _ in steps)])
        fill = fill_or_none(value, pipeline, Case("a", image, file=scans[which]))
        if fill is None:
            outcomes["refused"] += 1
            continue
        assert one is not None, f"{names} of {value} on {scans[which]} gave {fill.value}, and no number is right"
        assert fill.value == pytest.approx([one] * len(image), rel=2e-5, abs=2e-5 * size), (names, value, scans[which])
        outcomes["given"] += 1
        given.update(names)
    assert outcomes["given"] >= 200, outcomes
    assert outcomes["refused"] >= 40, outcomes
    assert {name for name, _, _ in [*INTENSITY, *SPATIAL, *FORM]} <= set(given)


def bound(value: Any, path: str, *steps: Any, whole: list[Any] | None = None) -> Any:
    pipeline = Compose(whole if whole is not None else [*loading(), *steps])
    image = torch.as_tensor(pipeline({"image": path})["image"])
    return ScanUnitFill(value, pipeline).bind(Case("a", image, file=path)).value


def two_windows(image: torch.Tensor) -> torch.Tensor:
    return torch.cat([((image - low) / 400).clamp(0, 1) for low in (-160, 40)])


def test_two_windows_of_one_scan_are_two_values(scans: list[str]) -> None:
    assert bound(100.0, scans[0], Lambdad("image", two_windows)) == pytest.approx([260 / 400, 60 / 400])


def test_a_zero_that_no_voxel_holds_is_not_kept_as_zero(scans: list[str]) -> None:
    """The scan's minimum is 50: put into the scan, 0 would be the new minimum."""
    scan = nib.load(scans[1]).get_fdata()
    for step, high in ((ScaleIntensityd("image"), 100), (ScaleIntensityRangePercentilesd("image", 0, 99, 0, 1), 99)):
        expected = -scan.min() / (np.percentile(scan, high) - scan.min())
        assert bound(0.0, scans[1], step) == pytest.approx([expected], rel=1e-5)


def test_one_voxel_with_the_value_does_not_vouch_for_a_filter(scans: list[str], tmp_path: Path) -> None:
    voxels = nib.load(scans[1]).get_fdata()
    voxels[4, 4, 4] = -777.25
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "one.nii")
    for step in (GaussianSmoothd("image", 1.0), MedianSmoothd("image", 1)):
        with pytest.raises(ValueError, match=f"-777.25 after {type(step).__name__} is not known exactly"):
            bound(-777.25, str(tmp_path / "one.nii"), step)


def test_a_clip_that_this_scan_does_not_reach(scans: list[str]) -> None:
    """The step changes no voxel of this scan, but it would change the value."""
    assert bound(4000.0, scans[0], ThresholdIntensityd("image", 2000, above=False, cval=2000)) == [2000.0]


def test_crop_and_scale_in_one_step_are_refused(scans: list[str]) -> None:
    with pytest.raises(ValueError, match=r"after Lambdad is not known exactly: .* changes places and intensities"):
        bound(-1000.0, scans[0], Lambdad("image", lambda x: x[:, 1:-1] / 2))


def test_arrays_are_followed_as_tensors_are(scans: list[str]) -> None:
    steps = [ToNumpyd("image"), ScaleIntensityRanged("image", 0, 400, 0, 1), Lambdad("image", lambda x: np.sqrt(x + 9))]
    assert bound(100.0, scans[0], *steps) == pytest.approx([(0.25 + 9) ** 0.5])


def test_steps_before_there_is_a_channel_axis(scans: list[str]) -> None:
    whole = [LoadImaged("image"), ScaleIntensityRanged("image", 0, 400, 0, 1), EnsureChannelFirstd("image")]
    assert bound(100.0, scans[1], whole=whole) == [0.25]


def test_a_loader_of_ones_own_gives_the_files_unit_or_is_refused(scans: list[str]) -> None:
    def loader(scale: float) -> Callable[[Any], Any]:
        return lambda item: {"image": torch.tensor(nib.load(item["image"]).get_fdata() * scale)[None]}

    assert bound(100.0, scans[1], whole=[loader(1.0)]) == [100.0]
    with pytest.raises(ValueError, match=r"does not load .* in the file's unit"):
        bound(100.0, scans[1], whole=[loader(0.01)])
    with pytest.raises(ValueError, match="`transform` does not load"):
        ScanUnitFill(1, [lambda item: item]).bind(Case("a", torch.zeros(1, 2, 2), file=scans[1]))


def test_channels_of_which_one_makes_another_are_refused(tmp_path: Path) -> None:
    """Hidden alone, a channel would also change the other one."""
    voxels = np.random.default_rng(0).uniform(0, 9, (8, 7, 6, 2))
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "two.nii")
    for function in (lambda x: torch.stack([x[0], x[1] - x[0]]), lambda x: x.sum(0, keepdim=True)):
        with pytest.raises(ValueError, match="after Lambdad is not known exactly"):
            bound([1.0, 2.0], str(tmp_path / "two.nii"), Lambdad("image", function))
    assert bound([1.0, 2.0], str(tmp_path / "two.nii"), Lambdad("image", lambda x: x**2)) == [1.0, 4.0]


def test_an_ordinary_ct_has_more_voxels_than_float32_counts() -> None:
    size = 2**24 + 10
    scan = torch.zeros(1, size, 1, 1)
    scan[0, 1] = 7
    step = ScaleIntensityRanged("image", 0, 100, 0, 1)
    after = step({"image": scan})["image"]
    values = value_after_step(step, lambda image: step({"image": image})["image"], scan, after, torch.tensor([50.0]))
    assert values.tolist() == [0.5]
