from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityRanged
from scipy.ndimage import gaussian_filter

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.inpaint import Laplace
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.fills.simple import BlurFill, ConstantFill, MeanFill
from monai_saliency.inferers.case_explainer import CaseExplainer
from monai_saliency.storage.score_store import ScoreStore


@pytest.mark.parametrize("fill", [ConstantFill([0.5, 2.0]), MeanFill(), BlurFill(1.5)], ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_image_alone_in_its_precision_and_untouched(
    fill: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    images = torch.randn(3, 2, 9, 11, dtype=dtype) + torch.tensor([0.0, 50.0, -50.0], dtype=dtype).reshape(3, 1, 1, 1)
    before = images.clone()
    filled = fill(images)
    torch.testing.assert_close(filled, torch.cat([fill(image[None]) for image in images]), rtol=1e-6, atol=1e-6)
    assert (filled.dtype, filled.shape) == (dtype, images.shape)
    assert torch.equal(images, before)


def test_constant_and_mean_by_hand() -> None:
    images = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    assert torch.equal(ConstantFill()(images), torch.zeros_like(images))
    assert torch.equal(ConstantFill(0.1)(images), torch.full_like(images, 0.1))
    assert ConstantFill([-1.0, 0.5, 2.0])(images)[1, :, 2, 3].tolist() == [-1.0, 0.5, 2.0]
    images = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    assert torch.equal(MeanFill()(images), torch.tensor([3.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 2))


@pytest.mark.parametrize(("spatial", "sigma"), [((17, 12), 2.0), ((17, 12), (0.5, 3.0)), ((9, 8, 7), [2.5, 0.7, 1.0])])
def test_blur_fill_equals_scipy(spatial: tuple[int, ...], sigma: object) -> None:
    images = torch.randn(2, 2, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    filled = BlurFill(sigma)(images)
    for b in range(2):
        for c in range(2):
            expected = gaussian_filter(images[b, c].numpy(), sigma, mode="nearest", truncate=4)
            torch.testing.assert_close(filled[b, c], torch.from_numpy(expected), rtol=0, atol=1e-10)


def test_blur_fill_ignores_autocast() -> None:
    images = torch.randn(1, 1, 12, 12)
    expected = BlurFill(2.0)(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(BlurFill(2.0)(images), expected)


def test_words_for_fills() -> None:
    images = torch.rand(1, 2, 5, 6)
    for word, fill in {"mean": MeanFill(), "blur": BlurFill()}.items():
        assert torch.equal(fill_in_unit(word)(images), fill(images))
    with pytest.raises(
        ValueError,
        match=r"`saliency_fill` must be one of \['auto', 'blur', .*, 'inpaint', 'mean', 'mirror'\], got 'b'",
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


# test_donor. ----------------------------------------------------------------------------------------------------------


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
    torch.testing.assert_close(found(image)[0, 0, :, 3, 3], expected)
    maps = ms.channel_occlusion(target=TARGET, fill=ms.DonorFill(donor, PREPROCESSING))(
        image, lambda x: x.flatten(1).sum(dim=1, keepdim=True)
    )
    assert float(maps.mean()) == pytest.approx(-float(expected.sum()) * 42, rel=1e-5)


def test_a_donor_of_the_same_grid_is_taken_as_it_is(donor: Path) -> None:
    image = torch.rand(1, 2, 5, 4)
    for other in (torch.rand(2, 5, 4), np.random.default_rng(0).random((2, 5, 4))):
        found = ms.DonorFill(other).bind(Case("a", image[0]))(image)
        assert found.dtype == image.dtype
        assert torch.equal(found[0], torch.as_tensor(other).to(image))
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
        explainer = CaseExplainer(explain, network, ScoreStore(tmp_path / "store"))
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


# test_mirror. ---------------------------------------------------------------------------------------------------------


# Rows: image axes run to the scanner's y, -x and z, oblique by 20 degrees about z.
TURNED = np.eye(4)
TURNED[:2, :2] = 2 * np.array([[np.sin(0.35), -np.cos(0.35)], [np.cos(0.35), np.sin(0.35)]])


def symmetric(size: int, total: int) -> torch.Tensor:
    """An image ``(1, 5, size, 3)`` that is symmetric where voxel ``total - i`` mirrors voxel i of axis 1."""
    rng = torch.Generator().manual_seed(size)
    half = torch.rand(1, 5, 2 * size, 3, generator=rng)
    return half[:, :, (2 * torch.arange(size) - total).abs()]


@pytest.mark.parametrize(("size", "total"), [(20, 19), (20, 22), (21, 20), (21, 17)])
def test_the_most_symmetric_plane_of_the_affines_left_right_axis(size: int, total: int) -> None:
    image = symmetric(size, total)
    fill = ms.MirrorFill().bind(Case("a", image, affine=TURNED))
    i = torch.arange(max(0, total - size + 1), min(size, total + 1))
    assert torch.equal(fill(image[None])[0, :, :, i], image[:, :, total - i])
    torch.testing.assert_close(fill(image[None])[0, :, :, i], image[:, :, i])  # so a map of it is zero
    inside = ms.MirrorFill(plane=total / 2).bind(Case("a", image, affine=TURNED))
    assert torch.equal(inside(image[None]), fill(image[None]))
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
    torch.testing.assert_close(maps[0, 0], expected, rtol=0, atol=1e-4)


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


# test_inpaint. --------------------------------------------------------------------------------------------------------


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
    *(ms.RISEMasks(3, 4, 0.5), ms.RISEMasks(3, 4, 0.3), ms.SlidingWindowMasks(7, 6)),
    ms.IndependentChannelMasks(ms.RISEMasks(2, 3)),
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
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


def test_more_steps_come_closer() -> None:
    image = torch.randn(1, 40, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = ms.RISEMasks(1, 4, 0.4).bind(image).render([0]) < 0.5
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
    case = Case("a", image)
    found = {noise: ms.InpaintFill(noise).bind(case).of(image[None], mask) for noise in (0.0, 1.0, 2.0)}
    for noise, part, expected in [(1.0, slice(24, 72), 0.1), (1.0, slice(120, 168), 0.4), (2.0, slice(24, 72), 0.2)]:
        added = (found[noise] - found[0.0])[0, 0, 24:72, part]
        assert float(added.std()) == pytest.approx(expected, rel=0.1)
    assert torch.equal(found[1.0][mask == 1], image[None][mask == 1])
    again = [ms.InpaintFill(1.0, seed).bind(case).of(image[None], mask) for seed in (0, 1)]
    assert torch.equal(again[0], found[1.0])
    assert not torch.equal(again[1], found[1.0])


def test_without_a_rim_it_is_the_mean_with_noise() -> None:
    image = scan(9, 8).float()
    fill = ms.InpaintFill(noise=0).bind(Case("a", image))
    masks = torch.ones(2, 1, 9, 8)
    masks[0] = 0
    expected = torch.stack([ms.MeanFill()(image[None])[0], image])
    torch.testing.assert_close(fill.of(image[None], masks), expected)
    torch.testing.assert_close(fill(image[None]), expected[:1])
    assert not torch.equal(ms.InpaintFill().bind(Case("a", image))(image[None]), expected[:1])


@pytest.mark.parametrize("batch", [1, 5])
def test_maps_curves_and_regions_take_it(batch: int) -> None:
    """The network sums the image: the score with a window hidden is what is kept and the dense solve inside."""
    image, network = scan(12, 10)[:1], lambda x: x.flatten(1).sum(dim=1, keepdim=True)
    given: dict[str, Any] = {"target": ms.ClassScore([0], "none"), "fill": ms.InpaintFill(0), "mask_batch_size": batch}
    (state,) = ms.sliding_window(4, 3, **given).score(image[None], network)
    rendered = state.masks.render(range(len(state.masks)))
    filled = [dense_laplace(image[0].numpy(), each[0].numpy() < 0.5).sum() for each in rendered]
    np.testing.assert_allclose(state.state.scores[:, 0], filled, rtol=0, atol=1e-3)
    labels = (torch.arange(120).reshape(1, 12, 10) // 40 + 1).long()
    explain = ms.shapley(**given)
    (found,) = explain.explain(image[None], network, cases=[Case("a", labels=labels)])
    total = float(image.sum() - image.mean() * 120)
    assert float(found.saliency.unique().sum()) == pytest.approx(total, abs=1e-3)
    deletion = ms.metrics.Deletion(explain.replace(masks=ms.SlidingWindowMasks(4)), network, 4)
    (curve,) = deletion.curves(image[None], image[None])[0]
    assert curve.scores[-1].item() == pytest.approx(float(image.mean() * 120), abs=1e-3)
    assert ms.mc_rise(6, 3, target=given["target"], fill=ms.InpaintFill())(image[None], network).isfinite().all()


def test_errors_of_inpainting() -> None:
    with pytest.raises(ValueError, match="`noise` must be at least 0, got -1"):
        ms.InpaintFill(-1)
    image = torch.full((1, 1, 4, 4), float("nan"))
    with pytest.raises(CaseError, match="InpaintFill continues an image, and this one has NaN or infinite voxels"):
        ms.rise(4, 2, target=ms.ClassScore([0], "none"), fill=ms.InpaintFill())(image, torch.nn.Flatten())
