"""Metrics of a map and a label, against slow references, hand-made answers and scikit-learn."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.maps import PEAK, peaked, volume
from helpers.tolerances import SINGLE, assert_close
from monai.data import MetaTensor

import monai_saliency as ms
from monai_saliency import metrics

ALL = [metrics.Pointing(), metrics.MassInLabel(), metrics.AUPRC()]
ALL += [metrics.Leakage(), metrics.Leakage(top=0.2)]


def batch(dims: int, ties: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Two cases with three maps each, some values equal; a label of a tenth of the voxels, with the first peak."""
    draw = torch.Generator().manual_seed(0)
    shape = (7, 6, 5)[:dims]
    maps = torch.randn(2, 3, *shape, generator=draw, dtype=torch.float64)
    maps = (maps * 3).round() / 3 if ties else maps
    labels = (torch.rand(2, 1, *shape, generator=draw) < 0.1).long() * 4
    labels[0, 0][metrics.peak_voxel(maps[0, 0].numpy())] = 1
    return maps, labels


def slow(metric: ms.metrics.SaliencyMetric, saliency: np.ndarray, label: np.ndarray) -> float:
    """One map, voxel by voxel; the AUPRC by scikit-learn."""
    voxels = [(float(saliency[at]), bool(label[at]), at) for at in np.ndindex(saliency.shape)]
    if isinstance(metric, metrics.Pointing):
        peak = metrics.peak_voxel(saliency)
        return float(any(inside and at == peak for _, inside, at in voxels))
    if isinstance(metric, metrics.Leakage) and metric.top is not None:
        count = math.ceil(metric.top * len(voxels))
        least = sorted(value for value, _, _ in voxels)[-count]
        top = [inside for value, inside, _ in voxels if value >= least]
        return 1 - sum(top) / len(top)
    if isinstance(metric, metrics.MassInLabel | metrics.Leakage):
        share = sum(max(v, 0) for v, inside, _ in voxels if inside) / sum(max(v, 0) for v, _, _ in voxels)
        return share if metric.higher_is_better else 1 - share
    assert isinstance(metric, metrics.AUPRC)
    oracle = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn").average_precision_score
    return oracle([inside for _, inside, _ in voxels], [value for value, _, _ in voxels])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("metric", ALL, ids=lambda m: f"{type(m).__name__} {ALL.index(m)}")
def test_equals_plain_loops(metric: ms.metrics.SaliencyMetric, dims: int, ties: bool) -> None:
    maps, labels = batch(dims, ties)
    expected = [[slow(metric, maps[b, k].numpy(), labels[b, 0].numpy()) for k in range(3)] for b in range(2)]
    found = metric.compute(maps, labels)
    assert_close(found.numpy(), expected)
    assert len({*np.ravel(expected).round(6)}) > 1  # not the same for every map
    # Single precision, meta data and lists of items change nothing.
    single = metric.compute(MetaTensor(maps.float()), MetaTensor(labels))
    assert_close(single.numpy(), expected, within=SINGLE)
    metric.reset()
    assert_close(metric(list(maps), list(labels)), found)
    assert_close(float(metric.aggregate()), np.mean(expected), within=SINGLE)
    metric.reset()


@pytest.mark.parametrize("metric", ALL, ids=lambda m: f"{type(m).__name__} {ALL.index(m)}")
def test_what_is_easy_and_what_cannot_be_measured(metric: ms.metrics.SaliencyMetric) -> None:
    label = torch.zeros(2, 1, 10, 10)
    label[0, 0, 4:6, 2:12] = 7  # 16 voxels
    perfect = torch.where(label > 0, 5.0, -1.0)
    found = metric(perfect, label)
    best = 1.0 if metric.higher_is_better else 0.0
    if metric.__dict__.get("top") is not None:  # all voxels below are equal, and so taken along
        best = 1 - 16 / 100
    assert_close(found[0, 0], best, scale=1)
    assert bool(found[1].isnan())  # no label
    assert_close(float(metric.aggregate()), best, scale=1, within=SINGLE)  # of the one case that could be measured
    metric.reset()
    metric(perfect[1:], label[1:])
    assert bool(metric.aggregate().isnan())  # and not 0
    metric.reset()


def test_a_map_that_shows_nothing_gets_no_credit() -> None:
    flat, label = torch.full((1, 1, 5, 5), -2.0), torch.zeros(1, 1, 5, 5)
    label[..., 1:4, 1:4] = 1  # holds the middle, which is the peak of a flat map
    assert float(metrics.Pointing().compute(flat, label)) == 0
    assert float(metrics.MassInLabel().compute(flat, label)) == 0
    assert float(metrics.Leakage().compute(flat, label)) == 1
    assert float(metrics.Leakage(top=0.1).compute(flat, label)) == 1
    assert_close(metrics.AUPRC().compute(flat, label), 9 / 25)


MAPS, LABEL = torch.rand(2, 1, 4, 4), torch.ones(2, 1, 4, 4)
MISTAKES: list[tuple[Any, str]] = [
    (lambda: metrics.AUPRC()(MAPS[0], LABEL[0]), r"`y_pred` must be saliency maps \(B, K, \*spatial\), .*\(1, 4, 4\)"),
    (lambda: metrics.AUPRC()(MAPS * math.nan, LABEL), r"`y_pred` must be finite: the maps of item 0 hold NaN"),
    (lambda: metrics.AUPRC()(MAPS, LABEL[..., :3]), r"`y` must be label maps \(2, 1, 4, 4\), .*\(2, 1, 4, 3\)"),
    (lambda: metrics.AUPRC()(MAPS, LABEL * math.nan), "the label map has values that are not whole numbers, NaN"),
    (lambda: metrics.AUPRC().aggregate(), "AUPRC has measured no map yet"),
    (lambda: metrics.Leakage(top=0), r"`top` must be in \(0, 1\], got 0"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes(mistake: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mistake()


def test_peak_voxel() -> None:
    assert ms.metrics.peak_voxel(peaked()) == PEAK
    assert ms.metrics.peak_voxel(np.array([[-5.0, -3.0], [-4.0, -9.0]])) == (0, 1)
    # Zeros, and what resampling leaves of them, are voxels that no mask hid.
    assert ms.metrics.peak_voxel(np.array([[-5.0, -3.0], [0.0, -1e-15]])) == (0, 1)


def test_peak_voxel_of_a_plateau_is_its_middle() -> None:
    saliency = volume().clip(-1, 1)
    saliency[1:6, 2:5, 1:4] = 2 * (1 + np.random.default_rng(2).normal(size=(5, 3, 3)) * 1e-8)
    assert ms.metrics.peak_voxel(saliency) == (3, 3, 2)
