"""Repeatability, agreement between fills, randomised parameters, and controls."""

import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.stats import spearmanr
from torch import nn

import monai_saliency as ms
from monai_saliency import metrics
from monai_saliency.__main__ import main
from monai_saliency.metrics.agreement import compare
from monai_saliency.metrics.control_maps import CONTROLS
from monai_saliency.metrics.method_checks import randomised

TARGET = ms.ClassScore([0, 1], "none")
IMAGES = torch.rand(2, 1, 8, 9, generator=torch.Generator().manual_seed(0))


def a_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(126, 2)).eval()


def rank_of(first: torch.Tensor, second: torch.Tensor) -> list[list[float]]:
    each = [[spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(*pair)] for pair in zip(first, second)]  # noqa: B905
    return np.array(each).tolist()


@pytest.mark.parametrize("per_channel", [False, True])
def test_repeatability_is_the_rank_correlation_of_two_seeds(per_channel: bool) -> None:
    network = a_network()
    target = ms.ClassScore([1], "none")
    one, other = (ms.rise(30, 3, seed=seed, per_channel=per_channel, target=target) for seed in (0, 5))
    found = metrics.Repeatability(one, network, seed=5).compute(one(IMAGES, network), IMAGES)
    np.testing.assert_allclose(found, rank_of(one(IMAGES, network), other(IMAGES, network)), rtol=0, atol=1e-6)
    assert 0 < float(found.min()) < float(found.max()) < 1
    many = ms.rise(1500, 3, target=target)
    again = metrics.Repeatability(many, network, seed=5).compute(many(IMAGES, network), IMAGES)
    assert float(again.min()) > float(found.max())  # more masks, less noise
    assert one.masks is not None
    assert getattr(getattr(one.masks, "masks", one.masks), "seed", None) == 0  # the user's masks are left alone


def test_agreement_between_fills() -> None:
    network, inferer = a_network(), ms.sliding_window(3, 2, target=TARGET)
    fills = [ms.MeanFill(), ms.ConstantFill(1.0)]
    maps = inferer(IMAGES, network)
    others = [inferer.replace(fill=fill)(IMAGES, network) for fill in fills]
    expected = np.mean([rank_of(maps, other) for other in others], axis=0)
    found = metrics.FillAgreement(inferer, network, fills)(maps, IMAGES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert found.shape == (2, 2)
    alone = [metrics.RankAgreement().compute(maps, other) for other in others]
    np.testing.assert_allclose(torch.stack(alone).mean(0), expected, rtol=0, atol=1e-6)
    flat = torch.full_like(maps, 2.0)
    assert bool(metrics.RankAgreement().compute(maps, flat).isnan().all())


def state_of(network: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy(force=True).tobytes() for name, tensor in network.state_dict().items()}


class Scale(nn.Module):
    """A parameter that nothing resets."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(values))


def test_randomised_networks() -> None:
    network = nn.Sequential(*a_network(), Scale(1.0, 2.0, 4.0), Scale(3.0, 3.0))
    network[1].running_mean.fill_(5.0)
    before, rng = state_of(network), torch.get_rng_state()
    copies = [randomised(network, seed) for seed in (0, 0, 1)]
    assert state_of(network) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert state_of(copies[0]) == state_of(copies[1]) != state_of(copies[2])
    changed = {name for name, value in state_of(copies[0]).items() if value != before[name]}
    assert changed == {"0.weight", "0.bias", "1.weight", "1.running_mean", "4.weight", "4.bias", "5.scale", "6.scale"}
    assert bool((copies[0][4].weight != network[4].weight).all())
    assert [p.requires_grad for p in copies[0].parameters()] == [p.requires_grad for p in network.parameters()]


def test_parameter_randomisation_compares_with_the_randomised_network() -> None:
    network, inferer = a_network(), ms.sliding_window(3, 2, target=TARGET)
    before = state_of(network)
    maps = inferer(IMAGES, network)
    ranks = metrics.ParameterRandomisation(inferer, network, seed=2)
    rises = metrics.EfficientParameterRandomisation(inferer, network, seed=2, bins=20)
    found = ranks.compute(maps, IMAGES)
    other = inferer(IMAGES, randomised(network, 2))
    np.testing.assert_allclose(found, rank_of(maps, other), rtol=0, atol=1e-6)

    def slow_entropy(values: torch.Tensor) -> float:
        counts, _ = np.histogram(values.double().numpy().ravel(), bins=20)
        return -sum(c / counts.sum() * math.log(c / counts.sum()) for c in counts if c)

    for (b, k), rise in np.ndenumerate(rises.compute(maps, IMAGES).numpy()):
        plain, fresh = slow_entropy(maps[b, k]), slow_entropy(other[b, k])
        assert abs(rise - (fresh - plain) / plain) < 1e-6
    assert state_of(network) == before


class Bright(nn.Module):
    """Ignores its parameters: no map of it depends on what was learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., 2:5, 3:6].flatten(1).sum(1, keepdim=True).expand(-1, 2)


def test_a_map_that_does_not_depend_on_the_parameters_fails() -> None:
    network, inferer = Bright(), ms.sliding_window(2, 1, target=TARGET)
    maps = inferer(IMAGES, network)
    assert metrics.ParameterRandomisation(inferer, network).compute(maps, IMAGES).min() > 1 - 1e-12
    assert float(metrics.EfficientParameterRandomisation(inferer, network).compute(maps, IMAGES).abs().max()) == 0


@pytest.mark.parametrize("dims", [2, 3])
def test_controls(dims: int) -> None:
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(2, 3, *(7, 8, 9)[:dims], generator=draw, dtype=torch.float64)
    maps = torch.rand(2, 2, *images.shape[2:], generator=draw, dtype=torch.float64)
    found = metrics.controls(images, maps, seed=4)
    assert tuple(found) == CONTROLS
    assert all(each.shape == maps.shape and each.dtype == maps.dtype for each in found.values())
    for b, k in np.ndindex(2, 2):
        scan = images[b].numpy()
        np.testing.assert_allclose(found["intensity"][b, k], scan.mean(0), rtol=0, atol=1e-12)
        edges = np.mean([np.sqrt(sum(g**2 for g in np.gradient(channel))) for channel in scan], axis=0)
        np.testing.assert_allclose(found["edges"][b, k], edges, rtol=0, atol=1e-12)
        blurred = ndimage.gaussian_filter(maps[b, k].numpy(), 2.0, mode="nearest")
        np.testing.assert_allclose(found["blurred"][b, k], blurred, rtol=0, atol=1e-9)
    # Random maps differ between cases, maps and seeds, and not by what is beside them.
    random = found["random"].flatten(0, 1).flatten(1)
    assert float((torch.corrcoef(random) - torch.eye(4)).abs().max()) < 0.5
    assert torch.equal(metrics.controls(images[1:], maps[1:], seed=4)["random"], found["random"][1:])
    assert not torch.equal(metrics.controls(images, maps, seed=5)["random"], found["random"])


def scans() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images with a faint, thin lesion beside a bright organ, its label, and a right map."""
    draw = torch.Generator().manual_seed(2)
    label, images = torch.zeros(3, 1, 24, 24), 0.1 * torch.rand(3, 1, 24, 24, generator=draw)
    label[..., 4:12, 5], label[..., 11, 5:13] = 1, 1
    images += 0.3 * label
    images[..., 14:20, 14:20] += 1
    return images, label, label + 0.3 * torch.rand(3, 1, 24, 24, generator=draw)


def test_controls_beside_a_metric() -> None:
    images, label, maps = scans()
    metric = metrics.AUPRC()
    found = metrics.with_controls(metric, maps, label, images, seed=3)
    assert found.metric == "AUPRC"
    assert abs(found.value - 1) < 1e-12
    assert found.passed_by == ()
    expected = {name: float(metric.compute(m, label).mean()) for name, m in metrics.controls(images, maps, 3).items()}
    assert dict(found.controls) == pytest.approx(expected)
    with pytest.raises(ValueError, match="has measured no map yet"):
        metric.aggregate()  # nothing was kept
    # A worse map than the scan itself is marked.
    bright = metrics.with_controls(metrics.Leakage(), label * 0.1 + images.flip(2), label, label + 0.01 * images)
    assert {"intensity", "edges"} <= {*bright.passed_by}


INFERER = ms.rise(5, 3, target=TARGET)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(72, 2))
MAPS = torch.rand(2, 2, 8, 9)
MISTAKES: list[tuple[Any, str]] = [
    (lambda: metrics.Repeatability(INFERER, NETWORK, seed=0), "`seed` must differ from the seed of the map's"),
    (
        lambda: metrics.Repeatability(ms.sliding_window(target=TARGET), NETWORK),
        "SlidingWindowMasks draw nothing at random",
    ),
    (lambda: metrics.ParameterRandomisation(INFERER, lambda x: x), "`network` must be a module"),
    (
        lambda: metrics.Repeatability(INFERER, NETWORK)(torch.rand(2, 3, 8, 9), IMAGES),
        "has 3 maps and `inferer` makes 2",
    ),
    (lambda: metrics.controls(IMAGES[:1], MAPS), "are not of one batch and one grid"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes(mistake: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mistake()


# Two folders of maps, made by hand.
MAP = np.array([[0.5, -2.0], [1.0, 0.0]], dtype=np.float32)


def write(path: Path, voxels: np.ndarray = MAP, affine: np.ndarray | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One map in the folder, and one of a case with a folder of its own; a third file is half written."""
    for name in ("a", "b"):
        write(tmp_path / name / "ct_1_saliency.nii.gz")
        write(tmp_path / name / "sub-01" / "ct_2_saliency.nii.gz", 3 * MAP)
    (tmp_path / "a" / ".tmp-host-1-ct_3_saliency.nii.gz").write_bytes(b"half")
    (tmp_path / "a" / "summary.csv").write_text("case\n")
    return tmp_path / "a", tmp_path / "b"


def run(*words: str | Path) -> int:
    try:
        main(["compare", *map(str, words)])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def test_equal(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*folders) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cases in both: 2",
        "largest difference: 0 of the map's largest absolute value, of case ct_1",
        "voxel bytes equal: yes",
        "affines equal: yes",
    ]


def test_the_largest_difference_is_relative_to_the_first_map(folders: tuple[Path, Path], capsys: Any) -> None:
    """0.25 of 2 in one case; 0.375 of 6 in the other, which is more but not of its map."""
    write(folders[1] / "ct_1_saliency.nii.gz", MAP + np.float32([[0, 0], [0, 0.25]]))
    write(folders[1] / "sub-01" / "ct_2_saliency.nii.gz", 3 * MAP - np.float32([[0.375, 0], [0.125, 0]]))
    assert run(*folders) == 1
    printed = capsys.readouterr().out
    assert (
        "largest difference: 0.125 of the map's largest absolute value, of case ct_1\nvoxel bytes equal: no" in printed
    )
    found = compare(*folders)
    assert {case.case: case.difference for case in found.both} == {"ct_1": 0.125, "sub-01/ct_2": 0.0625}
    assert run(*folders, "--tolerance", "0.125") == 0
    assert run(*folders, "--tolerance", "0.124") == 1


def test_cases_in_one_only(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3, 10):
        write(folders[0] / f"ct_{number}_saliency.nii.gz")
    (folders[0] / "ct_1_saliency.nii.gz").unlink()
    assert run(*folders, "--tolerance", "1") == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "cases in both: 1",
        "only in the first: 7 (ct_3, ct_4, ct_5, ct_6, ct_7, ...)",
        "only in the second: 1 (ct_1)",
    ]


@pytest.mark.parametrize(
    "other",
    [MAP[:, :1], np.where(MAP == 1, np.float32("nan"), MAP), np.where(MAP == 1, np.float32("inf"), MAP)],
    ids=["shape", "nan", "inf"],
)
def test_what_has_no_difference_in_numbers(folders: tuple[Path, Path], other: np.ndarray) -> None:
    write(folders[1] / "ct_1_saliency.nii.gz", other)
    assert compare(*folders).worst.difference == float("inf")
    assert run(*folders, "--tolerance", "1e30") == 1


def test_errors_say_what_to_do(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder: give the output folder of a run"):
        compare(folders[0], tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no maps \(\*_saliency.nii.gz\)"):
        compare(tmp_path / "empty", folders[0])
    for damage in (b"half", (folders[0] / "ct_1_saliency.nii.gz").read_bytes()[:-20]):
        (folders[1] / "ct_1_saliency.nii.gz").write_bytes(damage)
        with pytest.raises(ValueError, match=r"ct_1_saliency\.nii\.gz is not a readable map"):
            compare(*folders)
    with pytest.raises(SystemExit, match=r"error: .*nowhere is not a folder"):
        main(["compare", str(folders[0]), str(tmp_path / "nowhere")])
