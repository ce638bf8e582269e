from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.inpaint import Laplace


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


def test_errors() -> None:
    with pytest.raises(ValueError, match="`noise` must be at least 0, got -1"):
        ms.InpaintFill(-1)
    image = torch.full((1, 1, 4, 4), float("nan"))
    with pytest.raises(CaseError, match="InpaintFill continues an image, and this one has NaN or infinite voxels"):
        ms.rise(4, 2, target=ms.ClassScore([0], "none"), fill=ms.InpaintFill())(image, torch.nn.Flatten())
