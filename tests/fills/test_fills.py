import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.tolerances import assert_close, assert_same_bits
from monai.data import MetaTensor
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityRanged
from scipy.ndimage import gaussian_filter

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.inpaint import Laplace
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.fills.simple import BlurFill, ConstantFill, MeanFill
from monai_saliency.inferers.cohort_explainer import CohortExplainer
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.transforms import CheckScand


@pytest.mark.parametrize("fill", [ConstantFill([0.5, 2.0]), MeanFill(), BlurFill(1.5)], ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_image_alone_in_its_precision_and_untouched(fill: Any, dtype: torch.dtype) -> None:
    images = torch.randn(3, 2, 9, 11, dtype=dtype) + torch.tensor([0.0, 50.0, -50.0], dtype=dtype).reshape(3, 1, 1, 1)
    before = images.clone()
    filled = fill(images)
    assert_close(filled, torch.cat([fill(image[None]) for image in images]))
    assert (filled.dtype, filled.shape) == (dtype, images.shape)
    assert_same_bits(images, before)


def test_constant_and_mean_by_hand() -> None:
    images = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    assert_same_bits(ConstantFill()(images), torch.zeros_like(images))
    assert_same_bits(ConstantFill(0.1)(images), torch.full_like(images, 0.1))
    assert ConstantFill([-1.0, 0.5, 2.0])(images)[1, :, 2, 3].tolist() == [-1.0, 0.5, 2.0]
    images = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    assert_same_bits(MeanFill()(images), torch.tensor([3.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2))


@pytest.mark.parametrize(("spatial", "sigma"), [((17, 12), 2.0), ((17, 12), (0.5, 3.0)), ((9, 8, 7), [2.5, 0.7, 1.0])])
def test_blur_fill_equals_scipy(spatial: tuple[int, ...], sigma: object) -> None:
    images = torch.randn(2, 2, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    filled = BlurFill(sigma)(images)
    for b in range(2):
        for c in range(2):
            expected = gaussian_filter(images[b, c].numpy(), sigma, mode="nearest", truncate=4)
            assert_close(filled[b, c], torch.from_numpy(expected))


def test_blur_fill_ignores_autocast() -> None:
    images = torch.randn(1, 1, 12, 12)
    expected = BlurFill(2.0)(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(BlurFill(2.0)(images), expected)


def test_words_for_fills() -> None:
    images = torch.rand(1, 2, 5, 6)
    for word, fill in {"mean": MeanFill(), "blur": BlurFill()}.items():
        assert_same_bits(fill_in_unit(word)(images), fill(images))
    with pytest.raises(
        ValueError,
        match=r"`saliency_fill` must be one of \['auto', 'blur', .*, 'mean', 'mirror'\], or a number .*, got 'b'",
    ):
        fill_in_unit("b", id="saliency_fill")
    with pytest.raises(ValueError, match="`fill_unit` scan needs a `fill` that is a number, got a MeanFill"):
        fill_in_unit("mean", "scan")


def test_errors() -> None:
    with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
        ConstantFill([1, 2, 3])(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="`sigma` must be a number above 0, got 0"):
        BlurFill(0)
    with pytest.raises(ValueError, match=r"`sigma` must be one number or one per spatial axis \(3\), got \[1, 2\]"):
        BlurFill([1, 2])(torch.zeros(1, 1, 4, 4, 4))


TARGET = ms.ClassScore([0], "none")
LOAD = [LoadImaged(["image", "label"]), EnsureChannelFirstd(["image", "label"])]
PREPROCESSING = Compose([*LOAD, ScaleIntensityRanged("image", 0, 100, 0, 1)])


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    """A ramp along x, 10 a mm from 0 at the origin, in voxels of 2 mm."""
    ramp = np.broadcast_to(20.0 * np.arange(12).reshape(-1, 1, 1), (12, 9, 8))
    nib.save(nib.Nifti1Image(ramp, np.diag([2.0, 2, 2, 1])), tmp_path / "donor.nii.gz")
    return tmp_path / "donor.nii.gz"


def test_the_donors_value_at_the_same_place_in_mm(donor: Path) -> None:
    """Its preprocessing divides by 100; the scan has voxels of 1 mm, runs from right to left, and begins at 9 mm."""
    affine = np.diag([-1.0, 1, 1, 1])
    affine[0, 3] = 9
    image = MetaTensor(torch.zeros(1, 1, 8, 7, 6), affine=torch.from_numpy(affine))
    found = fill_in_unit(f"donor:{donor}", transform=PREPROCESSING).bind(Case.of(image).with_image(image[0], 0, image))
    expected = (9 - torch.arange(8.0)) * 0.1
    assert_close(found(image)[0, 0, :, 3, 3], expected)
    maps = ms.channel_occlusion(target=TARGET, fill=ms.DonorFill(donor, PREPROCESSING))(
        image, lambda x: x.flatten(1).sum(dim=1, keepdim=True)
    )
    assert_close(maps.mean(), -float(expected.sum()) * 42)


def test_a_donor_of_the_same_grid_is_taken_as_it_is(donor: Path) -> None:
    image = torch.rand(1, 2, 5, 4)
    for other in (torch.rand(2, 5, 4), np.random.default_rng(0).random((2, 5, 4))):
        found = ms.DonorFill(other).bind(Case("a", image[0]))(image)
        assert found.dtype == image.dtype
        assert_same_bits(found[0], torch.as_tensor(other).to(image))
    loaded = ms.DonorFill(donor).bind(Case("a", torch.zeros(1, 12, 9, 8)))(torch.zeros(1, 1, 12, 9, 8))
    assert loaded[0, 0, 3].unique().tolist() == [60.0]


def test_scores_are_kept_until_the_donor_changes(donor: Path, tmp_path: Path) -> None:
    forwards: list[int] = []
    for time in (1, 1, 2):
        os.utime(donor, (time, time))
        explain = ms.sliding_window(6, target=TARGET, fill=ms.DonorFill(donor))
        network: Any = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(864, 1)).eval()
        torch.nn.init.ones_(network[1].weight)
        torch.nn.init.zeros_(network[1].bias)
        explained: list[Any] = []
        explainer = CohortExplainer(explain, network, ScoreStore(tmp_path / "store"))
        explainer.explain(torch.ones(1, 1, 12, 9, 8), [Case("a")], explained.append)
        forwards.append(explained[0].explanation.num_forwards)
    assert forwards[0] == forwards[2] > forwards[1]


def test_errors_of_donors(donor: Path) -> None:
    with pytest.raises(ValueError, match=r"`donor` must be a scan, and there is no file .*\.missing"):
        fill_in_unit(f"donor:{donor}.missing")
    image = MetaTensor(torch.zeros(1, 1, 12, 9, 7), affine=torch.eye(4))
    far = MetaTensor(torch.zeros(1, 1, 12, 9, 7), affine=torch.diag(torch.tensor([-1.0, 1, 1, 1])))
    broken = Compose([*LOAD, ScaleIntensityRanged("image", 0, "wide", 0, 1)])
    for given, fill, words in [
        (image, ms.DonorFill(torch.zeros(1, 3, 3, 3)), r"the donor has shape \(1, 3, 3, 3\), and the image \(1, 12"),
        (image.repeat(1, 2, 1, 1, 1), ms.DonorFill(donor), r"shape \(1, 12, 9, 8\), and the image \(2, 12, 9, 7\)"),
        (far, ms.DonorFill(donor), "covers .*% of the scan: register"),
        (image, ms.DonorFill(donor, broken), "the donor .* could not be preprocessed"),
    ]:
        with pytest.raises(CaseError, match=words):
            ms.rise(4, 2, target=TARGET, fill=fill)(given, torch.nn.Flatten())


# Rows: image axes run to the scanner's y, -x and z, oblique by 20 degrees about z.
TURNED = np.eye(4)
TURNED[:2, :2] = 2 * np.array([[np.sin(0.35), -np.cos(0.35)], [np.cos(0.35), np.sin(0.35)]])


def symmetric(size: int, total: int) -> torch.Tensor:
    """An image ``(1, 5, size, 3)`` that is symmetric where voxel ``total - i`` mirrors voxel i of axis 1."""
    half = torch.rand(1, 5, 2 * size, 3, generator=torch.Generator().manual_seed(size))
    return half[:, :, (2 * torch.arange(size) - total).abs()]


@pytest.mark.parametrize(("size", "total"), [(20, 19), (20, 22), (21, 20), (21, 17)])
def test_the_most_symmetric_plane_of_the_affines_left_right_axis(size: int, total: int) -> None:
    image = symmetric(size, total)
    fill = ms.MirrorFill().bind(Case("a", image, affine=TURNED))
    i = torch.arange(max(0, total - size + 1), min(size, total + 1))
    assert_same_bits(fill(image[None])[0, :, :, i], image[:, :, total - i])
    assert_close(fill(image[None])[0, :, :, i], image[:, :, i])  # so a map of it is zero
    maps = ms.sliding_window(2, target=TARGET, fill=ms.MirrorFill())(
        MetaTensor(image[None, :, :, i], affine=torch.from_numpy(TURNED)), lambda x: x.flatten(1)[:, :1]
    )
    assert float(maps.abs().max()) == 0


def test_what_differs_between_the_sides_is_what_shows() -> None:
    image = symmetric(20, 19)
    image[0, 2, 4, 1] += 3
    network: Any = lambda x: x.flatten(1).sum(dim=1, keepdim=True)  # noqa: E731
    maps = ms.sliding_window(1, target=TARGET, fill=ms.MirrorFill(axis=1))(image[None], network)
    expected = torch.zeros(5, 20, 3)
    expected[2, 4, 1], expected[2, 15, 1] = 3, -3
    assert_close(maps[0, 0], expected, scale=image.sum())


def test_errors_of_mirrors() -> None:
    image = torch.rand(1, 1, 6, 6)
    for axis, affine, words in [
        (None, None, "MirrorFill needs the image's affine to know left and right"),
        (None, np.eye(4)[[2, 0, 1, 3]], "no axis of the image goes from left to right"),
        (2, None, "`axis` must be below 2, the number of spatial axes, got 2"),
    ]:
        explain = ms.rise(4, 2, target=TARGET, fill=ms.MirrorFill(axis))
        with pytest.raises(CaseError, match=f"case a: .*{words}"):
            explain.explain(image, torch.nn.Flatten(), cases=[Case("a", affine=affine)])


def dense_laplace(image: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Each hidden voxel is the mean of its direct neighbours in the image: one dense system."""
    number = {place: i for i, place in enumerate(map(tuple, np.argwhere(hidden)))}
    matrix, right = np.zeros((len(number), len(number))), np.zeros(len(number))
    for place, i in number.items():
        for axis, step in itertools.product(range(image.ndim), (-1, 1)):
            other = (*place[:axis], place[axis] + step, *place[axis + 1 :])
            if 0 <= other[axis] < image.shape[axis]:
                matrix[i, i] += 1
                if other in number:
                    matrix[i, number[other]] -= 1
                else:
                    right[i] += image[other]
    found = image.copy()
    found[hidden] = np.linalg.solve(matrix, right)
    return found


def scan(*shape: int) -> torch.Tensor:
    """Two channels ``(2, *shape)`` in [0, 1], smooth with a little noise."""
    rng = np.random.default_rng(0)
    smooth = np.stack([gaussian_filter(rng.standard_normal(shape), 2) for _ in range(2)])
    smooth = (smooth - smooth.min()) / np.ptp(smooth)
    return torch.from_numpy(0.9 * smooth + 0.1 * rng.random((2, *shape)))


MASKS: list[Any] = [
    *(ms.masks.RISEMasks(3, 4, 0.5), ms.masks.RISEMasks(3, 4, 0.3), ms.masks.SlidingWindowMasks(7, 6)),
    ms.masks.IndependentChannelMasks(ms.masks.RISEMasks(2, 3)),
]


@pytest.mark.parametrize("shape", [(24, 19), (10, 11, 9)])
@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_a_dense_solve_and_each_mask_alone(shape: tuple[int, ...], masks: Any, dtype: torch.dtype) -> None:
    image = scan(*shape).to(dtype)
    bound = masks.bind(image)
    rendered = bound.render(range(len(bound)))
    fill = ms.InpaintFill(noise=0).bind(Case("a", image))
    found = fill.of(image[None], rendered)
    assert (found.dtype, found.shape) == (dtype, (len(bound), *image.shape))
    for i, channel in itertools.product(range(len(bound)), range(2)):
        hidden = (rendered[i].expand_as(image)[channel] < 0.4999).numpy()
        expected = dense_laplace(image[channel].double().numpy(), hidden)
        torch.testing.assert_close(found[i, channel].double(), torch.from_numpy(expected), rtol=0, atol=1e-4)
    alone = torch.cat([fill.of(image[None], each[None]) for each in rendered])
    assert_close(found, alone)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(31,), (24, 19), (10, 11, 9)])
@pytest.mark.parametrize(("channels", "dtype", "atol"), [(1, torch.float32, 1e-6), (2, torch.float64, 1e-12)])
def test_a_gpu_continues_as_the_cpu_does(
    shape: tuple[int, ...], channels: int, dtype: torch.dtype, atol: float
) -> None:
    image, masks = torch.rand(2, *shape, dtype=dtype), (torch.rand(3, channels, *shape) > 0.5).to(dtype)
    found, expected = (
        ms.InpaintFill().bind(Case("a", image.to(device))).of(image[None].to(device), masks.to(device))
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=atol)


def test_more_steps_come_closer() -> None:
    image = torch.randn(1, 40, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = ms.masks.RISEMasks(1, 4, 0.4).bind(image).render([0]) < 0.5
    expected = dense_laplace(image[0].numpy(), hidden[0, 0].numpy())
    laplace = Laplace(hidden.double())
    errors = [float(np.abs(laplace.solve(image[None], steps)[0, 0].numpy() - expected).max()) for steps in (4, 8, 12)]
    assert errors[0] < 0.05
    assert errors[1] < errors[0] / 30
    assert errors[2] < errors[1] / 30


def test_noise_of_the_scans_own_local_deviation() -> None:
    """Left half: noise of standard deviation 0.1, right half 0.4. What is hidden has the noise of what is around it."""
    image = torch.randn(1, 96, 192, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.1
    image[..., 96:] *= 4
    mask = torch.ones(1, 1, 96, 192, dtype=torch.float64)
    mask[..., 24:72, 24:72] = mask[..., 24:72, 120:168] = 0

    def filled(noise: float, seed: int = 0) -> torch.Tensor:
        return ms.InpaintFill(noise, seed).bind(Case("a", image)).of(image[None], mask)

    smooth, noisy = filled(0.0), filled(1.0)
    left, right = (noisy - smooth)[..., 24:72, 24:72], (noisy - smooth)[..., 24:72, 120:168]
    assert float(left.std()) == pytest.approx(0.1, rel=0.1)
    assert float(right.std()) == pytest.approx(0.4, rel=0.1)
    twice = (filled(2.0) - smooth)[..., 24:72, 24:72]
    assert float(twice.std()) == pytest.approx(0.2, rel=0.1)
    assert_same_bits(noisy[mask == 1], image[None][mask == 1])
    assert_same_bits(filled(1.0, seed=0), noisy)
    assert not torch.equal(filled(1.0, seed=1), noisy)


def test_without_a_rim_it_is_the_mean_with_noise() -> None:
    image = scan(9, 8).float()
    fill = ms.InpaintFill(noise=0).bind(Case("a", image))
    masks = torch.ones(2, 1, 9, 8)
    masks[0] = 0
    expected = torch.stack([ms.MeanFill()(image[None])[0], image])
    assert_close(fill.of(image[None], masks), expected)
    assert_close(fill(image[None]), expected[:1])
    assert not torch.equal(ms.InpaintFill().bind(Case("a", image))(image[None]), expected[:1])


@pytest.mark.parametrize(("batch", "group"), [(1, 3), (5, 4), (5, 100)])
class TestInpaintingInsideOfAnExplanation:
    """The network sums the image; as many masks are filled at once as fit. The dense solve is met within 1e-3."""

    SHAPE = (12, 10)

    @pytest.fixture
    def image(self) -> torch.Tensor:
        return scan(*self.SHAPE)[:1]

    @pytest.fixture
    def settings(self, batch: int, group: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr("monai_saliency.inferers.perturbation._VALUES", group * math.prod(self.SHAPE))
        return {"target": ms.ClassScore([0], "none"), "fill": ms.InpaintFill(0), "mask_batch_size": batch}

    @staticmethod
    def network(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).sum(dim=1, keepdim=True)

    def test_scores_of_a_hierarchy_of_three_rounds(self, image: torch.Tensor, settings: dict[str, Any]) -> None:
        """The score with a window hidden is the sum of what is kept and of the dense solve inside."""
        (found,) = ms.hierarchical_occlusion(4, 3, 0.3, **settings).explain(image[None], self.network)
        expected = []
        for mask in found.masks.render(found.ids):
            filled = dense_laplace(image[0].numpy(), mask[0].numpy() < 0.5)
            expected.append(filled.sum())
        np.testing.assert_allclose(found.scores[:, 0], expected, rtol=0, atol=1e-3)

    def test_values_of_regions(self, image: torch.Tensor, settings: dict[str, Any]) -> None:
        """They add up to what the image has more than its mean, by which all is filled where nothing is kept."""
        labels = torch.arange(120).reshape(1, *self.SHAPE) // 40 + 1
        (found,) = ms.shapley(**settings).explain(image[None], self.network, cases=[Case("a", labels=labels)])
        more = image.sum() - image.mean() * image.numel()
        assert float(found.saliency.unique().sum()) == pytest.approx(float(more), abs=1e-3)

    def test_the_end_of_a_deletion_curve(self, image: torch.Tensor, settings: dict[str, Any]) -> None:
        deletion = ms.metrics.Deletion(ms.sliding_window(4, **settings), self.network, 4)
        ((curve,),) = deletion.curves(image[None], image[None])
        assert float(curve.scores[-1]) == pytest.approx(float(image.mean() * image.numel()), abs=1e-3)

    def test_a_method_with_a_choice_of_fills(self, image: torch.Tensor, settings: dict[str, Any]) -> None:
        assert ms.mc_rise(6, 3, **settings)(image[None], self.network).isfinite().all()


def test_errors_of_inpainting() -> None:
    with pytest.raises(ValueError, match="`noise` must be at least 0, got -1"):
        ms.InpaintFill(-1)
    image = torch.full((1, 1, 4, 4), float("nan"))
    with pytest.raises(CaseError, match="InpaintFill continues an image, and this one has NaN or infinite voxels"):
        ms.rise(4, 2, target=ms.ClassScore([0], "none"), fill=ms.InpaintFill())(image, torch.nn.Flatten())


# A fill in the scan's own units, against slow references that freeze what each step took from the scan.
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
        lambda: mt.ScaleIntensityRanged("image", -160, 240, 0, 1, clip=True),
        lambda scan, value: min(max((value + 160) / 400, 0), 1),
    ),
    (
        "wide window",
        lambda: mt.ScaleIntensityRanged("image", -1000, 1000, 0, 1),
        lambda scan, value: (value + 1000) / 2000,
    ),
    ("normalize", lambda: mt.NormalizeIntensityd("image"), normalized),
    ("normalize inside", lambda: mt.NormalizeIntensityd("image", nonzero=True), normalized_inside),
    ("by channel", lambda: mt.NormalizeIntensityd("image", channel_wise=True), normalized),
    ("own numbers", lambda: mt.NormalizeIntensityd("image", 7, 3), lambda scan, value: (value - 7) / 3),
    (
        "range",
        lambda: mt.ScaleIntensityd("image", minv=-1, maxv=1),
        lambda scan, value: 2 * (value - scan.min()) / (scan.max() - scan.min()) - 1,
    ),
    ("percentiles", lambda: mt.ScaleIntensityRangePercentilesd("image", 1, 99, -1, 1, clip=True), percentiles),
    (
        "clip",
        lambda: mt.ClipIntensityPercentilesd("image", 1, 99),
        lambda scan, value: float(np.clip(value, np.percentile(scan, 1), np.percentile(scan, 99))),
    ),
    (
        "above",
        lambda: mt.ThresholdIntensityd("image", 0, above=True, cval=-7),
        lambda scan, value: value if value > 0 else -7.0,
    ),
    ("shift", lambda: mt.ShiftIntensityd("image", 5), lambda scan, value: value + 5),
    *(
        (name, make, lambda scan, value: value)
        for name, make in {
            "numpy": lambda: mt.ToNumpyd("image"),
            "tensor": lambda: mt.ToTensord("image"),
            "typed": lambda: mt.EnsureTyped("image", dtype=torch.float32),
            "float64": lambda: mt.CastToTyped("image", np.float64),
            "spacing": lambda: mt.Spacingd("image", (1.2, 1.7, 1.4)),
            "orientation": lambda: mt.Orientationd("image", "PIR", labels=None),
            "flip": lambda: mt.Flipd("image", 1),
            "turn": lambda: mt.Rotate90d("image", 1, (0, 2)),
            "crop": lambda: mt.CropForegroundd("image", "image", select_fn=lambda x: x > x.min(), allow_smaller=True),
            "pad": lambda: mt.SpatialPadd("image", (14, 11, 12)),
        }.items()
    ),
]


def loading() -> list[Any]:
    return [mt.LoadImaged("image"), mt.EnsureChannelFirstd("image")]


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
    others = {"positive": positive, "nan": nan, "two": rng.normal([50, 500], [3, 90], (8, 7, 6, 2))}
    for name, voxels in others.items():
        affine = np.diag([-1.0, 1.5, 2.0, 1.0])
        nib.save(nib.Nifti1Image(voxels.astype(np.float32), affine), folder / f"{name}.nii.gz")
    return {name: str(folder / f"{name}.nii.gz") for name in ("ct", *others)}


def bound(value: Any, path: str, *steps: Any, whole: list[Any] | None = None) -> Any:
    """The value of the fill of one scan."""
    pipeline = mt.Compose(whole if whole is not None else [*loading(), *steps])
    image = torch.as_tensor(pipeline({"image": path, "channels": 1})["image"])
    return ms.ScanUnitFill(value, pipeline).bind(ms.Case("a", image, file=path)).value


@pytest.mark.parametrize("name", ["ct", "positive"])
def test_chains_of_known_steps_give_the_reference(scans: dict[str, str], name: str) -> None:
    rng = np.random.default_rng(0)
    chains = [[number] for number in range(len(STEPS))] + [rng.integers(len(STEPS), size=3) for _ in range(12)]
    for chain in chains:
        steps = [STEPS[number] for number in chain]
        for value in (0.0, -777.25, 4000.0):
            item, expected = mt.Compose(loading())({"image": scans[name]}), value
            for _, make, reference in steps:
                expected = reference(np.asarray(item["image"], dtype=np.float64), expected)
                item = make()(item)
            size = 1e-5 * max(1.0, abs(expected))
            found = bound(value, scans[name], *(make() for _, make, _ in steps))
            assert found == pytest.approx([expected], rel=1e-4, abs=10 * size), ([each[0] for each in steps], value)


REFUSED: dict[str, tuple[str, Callable[[], list[Any]], str]] = {
    "a filter": ("ct", lambda: [mt.GaussianSmoothd("image", 1.0)], "GaussianSmoothd, which is not one of the steps"),
    "a function": ("ct", lambda: [mt.Lambdad("image", lambda x: x / 2)], "Lambdad, which is not one"),
    "a random step": ("ct", lambda: [mt.RandGaussianNoised("image", prob=1.0)], "RandGaussianNoised, which is not one"),
    "a plain function": ("ct", lambda: [lambda item: {"image": item["image"] * 2}], "function, which is not one"),
    "a soft clip": ("ct", lambda: [mt.ClipIntensityPercentilesd("image", 1, 99, 1.0)], "has settings"),
    "blurred borders": ("ct", lambda: [mt.Resized("image", (6, 7, 5), anti_aliasing=True)], r"Resized.*anti_aliasing"),
    "a type": ("ct", lambda: [mt.CastToTyped("image", np.int16)], r"CastToTyped.*torch\.int16"),
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
    step = mt.NormalizeIntensityd("image", channel_wise=True)
    for value in (40.0, [40.0, 300.0]):
        np.testing.assert_allclose(bound(value, scans["two"], step), (np.asarray(value) - mean) / deviation, rtol=1e-4)
    assert bound(7, scans["two"]) == [7.0, 7.0]
    with pytest.raises(ValueError, match="`value` must be one number or one per channel, got 3 for 2 channels"):
        bound([1, 2, 3], scans["two"], step)


def test_whole_pipelines(scans: dict[str, str]) -> None:
    window = mt.ScaleIntensityRanged("image", 0, 400, 0, 1)
    assert bound(100.0, scans["positive"], window, mt.RepeatChanneld("image", 3)) == [0.25] * 3
    assert bound(100.0, scans["nan"], window) == [0.25]
    assert bound(100.0, scans["ct"], CheckScand("image"), window) == [0.25]
    # Before there is a channel axis.
    assert bound(100.0, scans["positive"], whole=[mt.LoadImaged("image"), window, mt.EnsureChannelFirstd("image")]) == [
        0.25
    ]


def test_other_keys_of_the_pipeline_are_left_alone(scans: dict[str, str]) -> None:
    """The replay knows the image's file only."""
    path = scans["ct"]
    both = [mt.LoadImaged(["image", "label"]), mt.EnsureChannelFirstd(["image", "label"])]
    steps = [*both, mt.ScaleIntensityRanged("image", 0, 100, 0, 1), mt.EnsureTyped("label")]
    image = mt.Compose(steps)({"image": path, "label": path})["image"].as_tensor()
    assert ms.ScanUnitFill(50, mt.Compose(steps)).bind(ms.Case("ct", image, file=path)).value == [0.5]
    steps = [*both, mt.CropForegroundd("image", "label", allow_smaller=True)]
    image = mt.Compose(steps)({"image": path, "label": path})["image"].as_tensor()
    with pytest.raises(ValueError, match=r"from its file alone.*CropForegroundd failed \(KeyError: 'label'\)"):
        ms.ScanUnitFill(50, mt.Compose(steps)).bind(ms.Case("ct", image, file=path))


def test_another_file_or_another_preprocessing(scans: dict[str, str]) -> None:
    pipeline = mt.Compose(loading())
    with pytest.raises(ValueError, match="needs the scan's file, which is unknown"):
        ms.ScanUnitFill(0, pipeline).bind(ms.Case("ct", torch.zeros(1, 4, 4, 4)))
    case = ms.Case("ct", pipeline({"image": scans["ct"]})["image"].as_tensor(), file=scans["ct"])
    with pytest.raises(ValueError, match="does not give the image that is explained"):
        ms.ScanUnitFill(0, mt.Compose([*loading(), mt.ScaleIntensityd("image")])).bind(case)
    with pytest.raises(ValueError, match="does not give the image that is explained"):
        ms.ScanUnitFill(1, [mt.EnsureTyped("other")]).bind(case)


def test_inside_an_explanation(scans: dict[str, str]) -> None:
    """Hiding everything with air leaves the network with air, and the scan is not changed by the replay."""
    preprocessing = mt.Compose([*loading(), mt.NormalizeIntensityd("image")])
    image = preprocessing({"image": scans["ct"]})["image"]
    before = image.clone()
    explain = ms.channel_occlusion(target=ms.ClassScore([0], "none"), fill=ms.ScanUnitFill(-1000, preprocessing))
    (explanation,) = explain.explain(image[None], lambda x: x.flatten(1).mean(1, keepdim=True))
    scan = nib.load(scans["ct"]).get_fdata()
    assert_close(explanation.scores, (-1000 - scan.mean()) / scan.std())
    assert_same_bits(image, before)
    # Without meta data the advice of the error gives the same.
    plain, network = image.as_tensor()[None], lambda x: x.flatten(1).mean(1, keepdim=True)
    with pytest.raises(
        CaseError, match=r"needs the scan's file, .*give `cases=\[ms.Case\('ct_7', file='ct_7.nii'\)\]`"
    ):
        explain(plain, network)
    maps = explain(plain, network, cases=[ms.Case("ct_7", file=scans["ct"])])
    assert_same_bits(maps[0], explanation.saliency)
