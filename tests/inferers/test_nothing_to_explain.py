"""Images without a score to explain have no map, and the others of their batch have theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tolerances import assert_same_bits
from monai.inferers import SimpleInferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.errors import NothingToExplain
from monai_saliency.inferers.cohort_explainer import Assignment, CohortExplainer
from monai_saliency.networks import Ensemble
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import Failures

#: the second one is healthy
IMAGES = torch.zeros(3, 1, 16, 16)
IMAGES[0, :, 4:8, 4:8], IMAGES[2, :, 9:12, 9:12] = 8.0, 9.0


class Classes(torch.nn.Module):
    """A logit that is positive where something is bright, and one that never is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = 20 * x.mean((2, 3)) - 5
        return torch.cat([found, 0 * found - 5], 1)


class Channels(torch.nn.Module):
    """Background, and what is bright."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([0 * x + 0.5, x], 1)


POSITIVE, PREDICTED = ms.ClassScore("positive", "sigmoid"), ms.RegionScore(1, "softmax")
TASKS = [(Classes(), POSITIVE), (Channels(), PREDICTED)]
WINDOWS = {"window_size": 4, "stride": 4}


@pytest.mark.parametrize(("network", "target"), TASKS)
@pytest.mark.parametrize("is_ensemble", [False, True])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (ms.focused_rise, {}),
        (ms.rise, {"num_masks": 20, "mask_batch_size": 3}),
        (ms.sliding_window, WINDOWS),
        (ms.integrated_gradients, {"steps": 4}),
    ],
)
def test_the_others_of_a_batch_have_their_maps(
    network: Any, target: Any, is_ensemble: bool, method: Any, settings: Any
) -> None:
    explain = method(target=target, **settings)
    network = Ensemble([network, network]) if is_ensemble else network
    explanations = explain.explain(IMAGES, network)
    others = explain.explain(IMAGES[[0, 2]], network)
    for ours, alone in zip(explanations[::2], others, strict=True):
        assert ours.saliency.abs().max() > 0
        assert_same_bits(ours.saliency, alone.saliency)
    empty = explanations[1]
    assert empty.saliency.shape == (0, 16, 16)
    assert ("channel 1 is empty" if target is PREDICTED else "no class scores above 0.5") in empty.target.nothing
    assert empty.explained == []
    assert empty.fill_leaves is None
    assert empty.standard_error is None
    with pytest.raises(ValueError, match=r"maps \[0, 1\].*ms.focused_rise\(target=...\).explain.*image 1 .* has none"):
        explain(IMAGES, network)
    with pytest.raises(NothingToExplain, match="image 0 of the batch: "):
        explain(IMAGES[1:2], network)


def test_under_remembered_patches_no_masks_are_run_for_it() -> None:
    explain = ms.sliding_window(target=PREDICTED, inferer=SlidingWindowInferer((8, 8), 4), **WINDOWS)
    plain = ms.sliding_window(target=PREDICTED, inferer=SimpleInferer(), **WINDOWS)
    found, wanted = explain.explain(IMAGES, Channels()), plain.explain(IMAGES, Channels())
    assert [len(each.saliency) for each in found] == [1, 0, 1]
    assert found[1].num_forwards < 2 * found[1].per_prediction < found[0].num_forwards
    torch.testing.assert_close(found[2].saliency, wanted[2].saliency)


def test_its_parts_come_together(tmp_path: Path) -> None:
    explain = ms.sliding_window(target=POSITIVE, mask_batch_size=4, **WINDOWS)
    for index in range(2):
        stored = [ScoreStore(tmp_path).open(name, "key") for name in "abc"]
        found: list[Any] = explain.score(IMAGES, Classes(), part=Part(index, 2), stored=stored)
    assert [len(each.saliency) for each in found] == [1, 0, 1]


def test_a_network_whose_first_image_is_healthy_is_checked_by_the_next_one() -> None:
    """Batches whose rows depend on each other are found, though the first call had no score to compare."""

    class Mixes(Channels):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1 * x.amax()

    network, explain = Mixes(), ms.sliding_window(target=PREDICTED, **WINDOWS)
    explain.explain(IMAGES[1:2], network)
    (ours,) = explain.explain(IMAGES[:1], network)
    (alone,) = explain.replace(mask_batch_size=1).explain(IMAGES[:1], Mixes())
    torch.testing.assert_close(ours.saliency, alone.saliency)


@pytest.mark.parametrize("parts", [1, 2])
def test_in_a_cohort_it_is_listed_and_no_failure(tmp_path: Path, parts: int) -> None:
    cases, explained = [ms.Case(f"ct_{number}") for number in range(3)], []
    for index in range(parts):
        failures = Failures(tmp_path / "failures.csv", strict=True, shared=True)
        store = ScoreStore(tmp_path / "scores")
        explain = ms.sliding_window(target=POSITIVE, mask_batch_size=4, **WINDOWS)
        explainer = CohortExplainer(explain, Classes(), store, failures)
        explainer.assignment = Assignment(Part(index, parts))
        explainer.explain(IMAGES, cases, lambda scored: explained.append(scored.explanation.name))
    assert set(explained) == {"ct_0", "ct_2"}
    assert not failures.read()
    (row,) = failures.nothing_table.read()
    assert (row["case"], "no class scores above 0.5" in row["reason"]) == ("ct_1", True)


def test_a_tensor_of_classes_is_for_one_batch() -> None:
    explain = ms.sliding_window(target=torch.tensor([0, 1]), **WINDOWS)
    with pytest.raises(ValueError, match="a class for each of 2 images"):
        CohortExplainer(explain, Classes())
