"""Temperatures by the hidden share (ReCalX, arXiv 2511.10439): the fit, what it does to scores, and its laws."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monai_saliency as ms
from monai_saliency.data import CachedDataset, CohortLoader
from monai_saliency.engines import CohortEvaluator
from monai_saliency.handlers import SaliencyHandler
from monai_saliency.inferers import recalibrated
from monai_saliency.metrics import Deletion
from monai_saliency.storage.key import Unfingerprintable
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets.recalibrated import STRENGTHS, fit_temperature

RISING = [1.0 + strength for strength in STRENGTHS]
SOFTMAX = ms.ClassScore([1], "softmax")


class Normalised(torch.nn.Module):
    """Two classes, whose images are noise of variance 1 around +-1/8 in each of 64 voxels. Of whole images it knows the
    probability. Zeros shrink the norm that it divides by, so of q of the voxels it gives 1 / sqrt(q) of the log-odds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(0.125))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        voxels = images.flatten(1)
        half = self.gain * voxels.sum(1) / (voxels**2).mean(1).clamp(min=1e-12).sqrt()
        return torch.stack([-half, half], dim=1)


def drawn(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``(n, 1, 8, 8)`` and their classes."""
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(2, (count,), generator=random)
    images = torch.randn(count, 1, 8, 8, generator=random) + (2 * classes - 1).reshape(-1, 1, 1, 1) / 8
    return images, classes


def fitted(explain: Any, network: Any, count: int = 8) -> Any:
    cases = [(image[None], ms.Case(f"ct_{i}")) for i, image in enumerate(drawn(0, count)[0])]
    return recalibrated(explain, network, cases)


def calibration_error(probability: np.ndarray, classes: np.ndarray) -> float:
    """The Kullback-Leibler divergence of the frequency of class 1 from its probability, over ten equal groups."""
    found = []
    for group in np.array_split(probability.argsort(), 10):
        said, true = probability[group].mean(), classes[group].mean().clip(1e-3, 1 - 1e-3)
        found.append(true * np.log(true / said) + (1 - true) * np.log((1 - true) / (1 - said)))
    return float(np.mean(found))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_the_temperature_is_the_best_of_a_slow_search(activation: str) -> None:
    random = torch.Generator().manual_seed(0)
    logits, clean = (torch.randn(40, 3, generator=random, dtype=torch.float64) for _ in range(2))
    logits = 4 * logits + 2 * clean
    read = torch.sigmoid if activation == "sigmoid" else lambda values: values.softmax(1)
    losses = {}
    for temperature in np.geomspace(0.5, 30, 4000):
        found, wanted, loss = read(logits / temperature), read(clean), 0.0
        for one, own in zip(found.flatten().tolist(), wanted.flatten().tolist(), strict=True):
            loss -= own * math.log(one) + ((1 - own) * math.log(1 - one) if activation == "sigmoid" else 0.0)
        losses[temperature] = loss
    assert fit_temperature(logits, read(clean), activation) == pytest.approx(
        min(losses, key=losses.__getitem__), rel=2e-3
    )
    saturated = torch.tensor([[50.0, -50.0]], dtype=torch.float64)
    assert fit_temperature(saturated, read(saturated), activation) == 1.0  # no other temperature is better


def test_the_calibration_error_falls() -> None:
    """The figure of the paper, on a network whose temperature is known: 1 / sqrt(1 - hidden share). Without labels the
    fit is as good as with them, and eight cases are enough for most of it.
    """
    network, (images, classes) = Normalised(), drawn(1, 40_000)
    few = fitted(ms.rise(100, target=ms.Recalibrated(SOFTMAX)), network).target.temperatures
    random, errors = torch.Generator().manual_seed(2), []
    for strength, temperature in zip(STRENGTHS, few, strict=True):
        with torch.no_grad():
            logits = network(images * (torch.rand(images.shape, generator=random) > strength)).double()
            known = network(images).double().softmax(1), torch.eye(2).double()[classes]
        found = [fit_temperature(logits, wanted, "softmax") for wanted in known]
        assert found == pytest.approx([(1 - strength) ** -0.5] * 2, rel=0.12)
        each = [(logits / t).softmax(1)[:, 1].numpy() for t in (1.0, temperature, found[0])]
        errors.append([calibration_error(probability, classes.numpy()) for probability in each])
    before, by_eight_cases, after = np.mean(errors, axis=0)
    assert after < 0.1 * before
    assert by_eight_cases < 0.25 * before


def test_scores_by_a_slow_computation() -> None:
    """Each mask's logits are divided by the temperature of its hidden share; the unperturbed image's are not."""
    image, network = drawn(3, 1)[0], Normalised()
    explain = ms.rise(20, grid_size=3, target=ms.Recalibrated(SOFTMAX, RISING), mask_batch_size=7)
    (found,) = explain.explain(image, network)
    for row, mask in enumerate(found.masks.render(range(20))):
        share = 1 - float(mask.mean())
        temperature = math.exp(np.interp(share, [0, *STRENGTHS], [0, *np.log(RISING)]))
        wanted = (network((mask * image[0])[None]) / temperature).softmax(1)[0, 1]
        assert float(found.scores[row, 0]) == pytest.approx(float(wanted), rel=1e-5)
    assert float(found.reference_scores) == float(network(image).softmax(1)[0, 1])
    assert found.quantities[0].words.startswith("recalibrated softmax probability")
    both = ms.Ensemble([network, network])
    torch.testing.assert_close(explain.explain(image, both)[0].scores, found.scores)
    unfitted = explain.replace(target=ms.Recalibrated(SOFTMAX))
    assert fitted(unfitted, both).target.temperatures == fitted(unfitted, network).target.temperatures


def test_temperatures_of_1_change_nothing() -> None:
    image, network = drawn(3, 1)[0], Normalised()
    for explain in (ms.rise(50, target=SOFTMAX), ms.focused_rise(50, target=SOFTMAX)):
        (plain,) = explain.explain(image, network)
        (found,) = explain.replace(target=ms.Recalibrated(SOFTMAX, [1.0] * 10)).explain(image, network)
        assert torch.equal(plain.saliency, found.saliency)
        assert plain.quantities != found.quantities


def test_shapley_and_curves_end_at_the_softened_fill() -> None:
    image = drawn(3, 1)[0]
    fill, network = ms.ConstantFill(0.3), Normalised()
    target = ms.Recalibrated(SOFTMAX, [2.0] * 10)
    filled = network(torch.full_like(image, 0.3))
    hidden = (filled / 2).softmax(1)[0, 1]
    labels = torch.arange(4).reshape(1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    (found,) = ms.shapley(target=target, fill=fill).explain(image, network, labels=labels)
    assert float(found.hidden_scores) == pytest.approx(float(filled.softmax(1)[0, 1]))  # what the fill leaves
    assert float(found.saliency[0, ::4, ::4].sum()) == pytest.approx(float(found.reference_scores - hidden), abs=1e-5)
    curve = Deletion(ms.rise(9, target=target, fill=fill), network, steps=4).curves(image, image)[0][0]
    assert float(curve.scores[-1]) == pytest.approx(float(hidden))
    assert float(curve.scores[0]) == pytest.approx(float(network(image).softmax(1)[0, 1]))


def test_a_cohort_is_fitted_once_and_again_for_another_network(tmp_path: Path) -> None:
    """Law 2 and 10: every worker fits on the whole cohort; resumed scores belong to the temperatures."""
    images = drawn(0, 3)[0]
    items = [{"case": f"ct_{i}", "image": image} for i, image in enumerate(images)]
    network, explain = Normalised().eval(), ms.rise(30, target=ms.Recalibrated(SOFTMAX))

    def run(store: Path, parts: list[int]) -> tuple[Any, dict[str, torch.Tensor]]:
        maps: dict[str, torch.Tensor] = {}
        loader = CohortLoader(CachedDataset(items)).take(parts)
        keep = ScoreStore(store)

        def write(item: dict[str, Any]) -> dict[str, Any]:
            maps[item["case"]] = item["saliency"].as_tensor()
            return item

        handler = SaliencyHandler(explain, network, write, store=keep)
        CohortEvaluator("cpu", val_data_loader=loader, network=network, val_handlers=[handler]).run()
        return handler.inferer.target, maps

    first, maps = run(tmp_path / "a", [0, 1, 2])
    for range_file in (tmp_path / "a").rglob("0-30.npy"):
        assert len(np.load(range_file)) == 30
    assert first.temperatures == fitted(explain, network, 3).target.temperatures
    resumed, again = run(tmp_path / "a", [2])
    assert resumed.temperatures == first.temperatures
    assert torch.equal(again["ct_2"], maps["ct_2"])
    with torch.no_grad():
        network.gain.mul_(3)
    changed, others = run(tmp_path / "a", [2])
    assert changed.temperatures != first.temperatures
    assert torch.equal(others["ct_2"], run(tmp_path / "b", [0, 1, 2])[1]["ct_2"])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a ClassScore, got RegressionScore"):
        ms.Recalibrated(ms.RegressionScore())
    with pytest.raises(ValueError, match="activation='softmax' or 'sigmoid'"):
        ms.Recalibrated(ms.ClassScore([0], "none"))
    with pytest.raises(ValueError, match="must be 10 numbers above 0"):
        ms.Recalibrated(SOFTMAX, [1.0, 0.0])
    explain = ms.rise(10, target=ms.Recalibrated(SOFTMAX))
    with pytest.raises(ValueError, match=r"inferers\.recalibrated\(inferer, network, cases\) first"):
        explain(drawn(0, 1)[0], Normalised())
    with pytest.raises(ValueError, match="takes no Recalibrated target"):
        ms.smoothgrad(target=ms.Recalibrated(SOFTMAX))
    with pytest.raises(Unfingerprintable, match="network_id"):
        fitted(explain, lambda images: images.flatten(1)[:, :2])
    with pytest.raises(ValueError, match="none of the first cases"):
        recalibrated(explain, Normalised(), [])
    given = ms.rise(10, target=ms.Recalibrated(SOFTMAX, RISING))
    assert fitted(given, Normalised()) is given
