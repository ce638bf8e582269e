"""A fill in the scan's own units where a review by random chains of transforms had found it wrong, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import (
    AdjustContrastd,
    BoundingRectd,
    CastToTyped,
    ClipIntensityPercentilesd,
    Compose,
    ConcatItemsd,
    CopyItemsd,
    DeleteItemsd,
    EnsureChannelFirstd,
    Lambdad,
    LoadImaged,
    MedianSmoothd,
    NormalizeIntensityd,
    Orientationd,
    ScaleIntensityd,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentilesd,
    ShiftIntensityd,
    Spacingd,
)

from monai_saliency.cases import Case
from monai_saliency.fills.scan_unit import ScanUnitFill

SHAPE = (14, 13, 12)


def voxels_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    noise = rng.normal(40, 60, SHAPE)
    huge = noise.copy()
    huge[3, 3, 3] = 1e9
    nan = noise.copy()
    nan[2, 3, 4] = np.nan
    kinds = {
        "background": np.where(rng.random(SHAPE) < 0.5, 0, rng.gamma(4, 80, SHAPE)),
        "saturated": rng.normal(128, 150, SHAPE).clip(0, 255),
        "flat": np.full(SHAPE, 5.0),
        "dark": rng.integers(0, 50, SHAPE).astype(np.uint8),
        "two": rng.choice([0.0, 1000.0], SHAPE, p=[0.8, 0.2]),
        "tiny": noise[:3, :3, :3],
        "huge": huge,
        "nan": nan,
    }
    return kinds[kind] if kind == "dark" else kinds[kind].astype(np.float32)


def fill(tmp_path: Path, kind: str, value: Any, *steps: Any, made: Any = None, lazy: bool = False, **load: Any) -> Any:
    """The value of the fill of a scan; ``made``: the steps that made the image, if other ones."""
    path = str(tmp_path / "scan.nii")
    nib.save(nib.Nifti1Image(voxels_of(kind), np.diag([-1.0, 1.5, 2.0, 1.0])), path)
    before = [LoadImaged("image", **load), EnsureChannelFirstd("image")]
    pipeline = Compose([*before, *steps], lazy=lazy)
    image = torch.as_tensor(Compose([*before, *(steps if made is None else made)], lazy=lazy)({"image": path})["image"])
    return ScanUnitFill(value, pipeline).bind(Case("a", image, file=path)).value


def own_clip(image: Any) -> Any:
    return image.clamp(*(float(np.percentile(image, each)) for each in (1, 99)))


def own_range(image: Any) -> Any:
    return (image - image.min()) / (image.max() - image.min())


def above_a_statistic(image: Any) -> Any:
    return (image > image.mean() + image.std()) * 1.0


REFUSED: dict[str, tuple[str, float, Callable[[], Any]]] = {
    "percentiles that follow the value, below": ("background", -1000, lambda: Lambdad("image", own_clip)),
    "percentiles that follow the value, above": ("saturated", 4000, lambda: Lambdad("image", own_clip)),
    "a threshold that follows the value": ("two", 610, lambda: Lambdad("image", above_a_statistic)),
    "a filter of a flat scan": ("flat", 300, lambda: MedianSmoothd("image", 1)),
    "the range of a flat scan": ("flat", 300, lambda: ScaleIntensityd("image")),
    "too few voxels to tell": ("tiny", 100, lambda: Lambdad("image", lambda x: x * torch.linspace(1, 2, 3))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trial_does_not_show_is_refused(name: str, tmp_path: Path) -> None:
    kind, value, make = REFUSED[name]
    with pytest.raises(ValueError, match="is not known exactly"):
        fill(tmp_path, kind, value, make())


@pytest.mark.parametrize(("kind", "value", "expected"), [("background", -1000.0, 0.0), ("saturated", 4000.0, 255.0)])
def test_clipping_at_percentiles_clips_the_value(kind: str, value: float, expected: float, tmp_path: Path) -> None:
    """The scan's own percentiles are its extremes."""
    assert fill(tmp_path, kind, value, ClipIntensityPercentilesd("image", 1, 99)) == [expected]


def test_soft_clipping_and_contrast_are_known(tmp_path: Path) -> None:
    scan = voxels_of("background").astype(np.float64)
    low, high = np.percentile(scan, 1), np.percentile(scan, 99)
    soft = 50 + np.log1p(np.exp(low - 50)) - np.log1p(np.exp(50 - high))
    assert fill(tmp_path, "background", 50.0, ClipIntensityPercentilesd("image", 1, 99, 1.0)) == pytest.approx([soft])
    curve = (50 / scan.max()) ** 2 * scan.max()
    assert fill(tmp_path, "background", 50.0, AdjustContrastd("image", 2.0)) == pytest.approx([curve])
    with pytest.raises(ValueError, match="after AdjustContrastd is not known exactly"):
        fill(tmp_path, "background", -50.0, AdjustContrastd("image", 2.0))


@pytest.mark.parametrize("scale", [ScaleIntensityd("image"), Lambdad("image", own_range)], ids=["monai", "own"])
@pytest.mark.parametrize("value", [-1000.0, 0.0])
def test_beside_one_huge_voxel(scale: Any, value: float, tmp_path: Path) -> None:
    """A tolerance of the largest voxel's size would hide all the others."""
    percentiles = ScaleIntensityRangePercentilesd("image", 1, 99, 0, 1)
    expected = fill(tmp_path, "huge", value, percentiles)
    try:
        assert fill(tmp_path, "huge", value, scale, percentiles) == pytest.approx(expected, abs=2e-3)
    except ValueError as error:
        assert "after Lambdad is not known exactly" in str(error)  # noqa: PT017
        assert value == -1000.0
    with pytest.raises(ValueError, match="does not give the image"):
        fill(tmp_path, "huge", value, ShiftIntensityd("image", 500.0), made=[])


@pytest.mark.parametrize(
    ("kind", "value", "dtype"), [("dark", -1.0, np.uint8), ("dark", 300.0, np.uint8), ("background", 0.5, np.int16)]
)
def test_a_value_that_the_loaded_type_cannot_hold_is_refused(
    kind: str, value: float, dtype: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="after LoadImaged is not known exactly: it does not fit the new type"):
        fill(tmp_path, kind, value, ScaleIntensityRanged("image", 0, 255, 0, 1), dtype=dtype)


def test_whole_numbers_wrap_around_as_in_the_scan(tmp_path: Path) -> None:
    step = Lambdad("image", lambda x: x + 200)
    assert fill(tmp_path, "dark", 100.0, step, CastToTyped("image", np.float32), dtype=np.uint8) == [44.0]


def test_nan_beside_the_value(tmp_path: Path) -> None:
    clean = Lambdad("image", torch.nan_to_num)
    window = ScaleIntensityRanged("image", 0, 100, 0, 1)
    assert fill(tmp_path, "nan", 50.0, window, clean) == [0.5]
    assert fill(tmp_path, "nan", 50.0, window) == [0.5]


def test_windows_put_together_from_copies(tmp_path: Path) -> None:
    steps = [
        CopyItemsd("image", 2, ["low", "high"]),
        ScaleIntensityRanged("low", 0, 200, 0, 1, clip=True),
        ScaleIntensityRanged("high", 0, 100, 0, 1, clip=True),
        BoundingRectd("image"),
        DeleteItemsd("image"),
        ConcatItemsd(["low", "high"], "image"),
    ]
    assert fill(tmp_path, "background", 50.0, *steps) == [0.25, 0.5]
    beside = [CopyItemsd("image", names="low"), ShiftIntensityd("low", 1.0), ConcatItemsd(["image", "low"], "image")]
    assert fill(tmp_path, "background", 50.0, *beside) == [50.0, 51.0]


def test_lazy_pipelines_are_followed(tmp_path: Path) -> None:
    steps = [Spacingd("image", (1.3, 1.1, 0.9)), Orientationd("image", "LPS", labels=None)]
    (eager,) = fill(tmp_path, "background", 50.0, *steps, NormalizeIntensityd("image"))
    (lazy,) = fill(tmp_path, "background", 50.0, *steps, NormalizeIntensityd("image"), lazy=True)
    assert lazy == pytest.approx(eager, abs=1e-2)
