from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monai.data import MetaTensor, list_data_collate

from monai_saliency.cases import Case
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.handlers.summary import COLUMNS, Summary
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods import sliding_window
from monai_saliency.sharding import Part
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets import ClassScore, DetectionScore, FunctionScore, RegressionScore, Target

IMAGES = torch.stack([torch.full((1, 6, 6, 6), value) for value in (0.5, 1.0)])


def detector(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """One box at the mean brightness, and a second one, fainter, in bright images."""
    found = []
    for image in x:
        scores = image.mean() * torch.tensor([0.8, 0.6])
        kept = scores > 0.35
        boxes = torch.tensor([[0.0, 0, 0, 2, 2, 2], [3, 3, 3, 6, 6, 6]])
        found.append({"boxes": boxes[kept], "labels": torch.tensor([4, 7])[kept], "scores": scores[kept]})
    return found


def handle(inferer: PerturbationInferer, network: Any, summary: Summary | None = None) -> list[dict[str, Any]]:
    """What postprocessing gets of a batch of two cases."""
    cases: list[dict[str, Any]] = []

    def postprocessing(case: dict[str, Any]) -> dict[str, Any]:
        cases.append(case)
        return case

    batch = list_data_collate([{"image": MetaTensor(image), "case": f"ct_{i}"} for i, image in enumerate(IMAGES, 1)])
    state = SimpleNamespace(output=batch, batch=batch)
    handler: Any = SaliencyHandler(inferer, network, postprocessing, summary)
    handler(SimpleNamespace(state=state))
    handler.finish()
    return cases


@pytest.mark.parametrize(
    ("target", "network", "title"),
    [
        (
            ClassScore([0, 1], "none"),
            lambda x: torch.stack([x.mean((1, 2, 3, 4)), 1 - x.mean((1, 2, 3, 4))], 1),
            "ct_2\npredicted 0 (1.000), explained: class 0 scores 1.000, class 1 scores 0.000",
        ),
        (
            RegressionScore(names=["age (years)"]),
            lambda x: 60 * x.mean((1, 2, 3, 4)),
            "ct_2\npredicted 60, explained: age (years) scores 60.000",
        ),
        (
            FunctionScore(lambda output: output, ["contrast"]),
            lambda x: x.mean((1, 2, 3, 4)),
            "ct_2\nexplained: contrast scores 1.000",
        ),
    ],
)
def test_titles(target: Target, network: Any, title: str) -> None:
    assert handle(sliding_window(3, 3, target=target), network)[1]["title"] == title


def test_cases_with_different_numbers_of_boxes(tmp_path: Path) -> None:
    """Each box has a map and a row of its own."""
    explain = sliding_window(3, 3, target=DetectionScore(0.3), mask_batch_size=5)
    first, second = handle(explain, detector, Summary(tmp_path / "summary.csv"))
    assert (first["saliency"].shape, second["saliency"].shape) == ((1, 6, 6, 6), (2, 6, 6, 6))
    assert second["title"] == (
        "ct_2\npredicted 4 (0.800), explained: box 1 (class 4) scores 0.800, box 2 (class 7) scores 0.600"
    )
    with open(tmp_path / "summary.csv", newline="", encoding="utf-8") as file:
        rows = [(row["case"], row["class"], row["prediction"]) for row in csv.DictReader(file)]
    assert rows == [
        ("ct_1", "box 1 (class 4)", "4"),
        ("ct_2", "box 1 (class 4)", "4"),
        ("ct_2", "box 2 (class 7)", "4"),
    ]


def test_of_two_runs_the_one_that_explained_a_case_is_believed(tmp_path: Path) -> None:
    """One fails on it, then the other explains it, then the first one ends."""
    summary = Summary(tmp_path / "summary.csv")
    failures = [Failures(tmp_path / "failures.csv", cases=["a"]) for _ in "12"]
    explain = sliding_window(3, 3, target=ClassScore([0], "none"))
    first: Any = SaliencyHandler(explain, Picky(), dict, summary, failures[0])
    failures[0].add("a", "explain", ValueError("no memory"))
    summary.add([dict.fromkeys(COLUMNS, "nan") | {"case": "a", "peak_in_label": ""}])
    failures[1].remove("a")
    first._report(SimpleNamespace(state=SimpleNamespace(metrics={})))
    assert not (tmp_path / "failures.csv").exists()
    assert [row["case"] for row in summary.read()] == ["a"]
    # Where nobody has, what an earlier run made of it goes.
    failures[0].add("a", "explain", ValueError("no memory"))
    first._report(SimpleNamespace(state=SimpleNamespace(metrics={})))
    assert summary.read() == []


class Picky(torch.nn.Module):
    """Gives NaN where the image is bright throughout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean((1, 2, 3, 4))
        return torch.stack([torch.where(means > 0.9, torch.nan, means), 1 - means], 1)


def test_a_case_that_shares_its_batch_with_a_broken_one(tmp_path: Path) -> None:
    """Parts of both are scored; the good one is whole, but is held by nobody when each is done alone."""
    done: list[str] = []

    def postprocessing(case: dict[str, Any]) -> dict[str, Any]:
        done.append(case["case"])
        return case

    batch = list_data_collate([{"image": MetaTensor(image), "case": f"ct_{i}"} for i, image in enumerate(IMAGES, 1)])
    for index in range(2):
        explain = sliding_window(3, 3, target=ClassScore([0], "none"), mask_batch_size=4)
        handler: Any = SaliencyHandler(
            explain,
            Picky(),
            postprocessing,
            failures=Failures(tmp_path / "failures.csv", shared=True),
            store=ScoreStore(tmp_path / "scores"),
        )
        handler.part = Part(index, 2)
        handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
        handler.finish()
    assert done == ["ct_1"]
    assert [row["case"] for row in handler.failures.read()] == ["ct_2"]


def test_a_case_that_another_process_holds_is_waited_for(tmp_path: Path) -> None:
    batch = list_data_collate([{"image": MetaTensor(IMAGES[0]), "case": "ct"}])
    store = ScoreStore(tmp_path)
    explain = sliding_window(3, 3, target=ClassScore([0], "none"))
    handler: Any = SaliencyHandler(explain, Picky(), dict, store=store)
    with store.claim("ct"):
        handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
    assert handler.incomplete() == ["ct"]
    handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
    handler.finish()
    assert handler.incomplete() == []


def test_scores_of_another_version_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("1", "2", "1"):
        monkeypatch.setattr("monai_saliency.storage.fingerprint.__version__", version)
        explain = sliding_window(3, 3, target=ClassScore([0], "none"))
        handler = SaliencyHandler(explain, Picky(), dict, store=ScoreStore(tmp_path))
        (scores,) = handler._stored(IMAGES[:1], [Case("ct")]) or []
        keys.append(scores.folder.name)
    assert keys[0] == keys[2] != keys[1]
