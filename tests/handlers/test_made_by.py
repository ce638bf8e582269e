"""Which settings made a row, and the warnings about rows of other settings, scans and cohorts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.files import rows_of
from ignite.engine import Events
from monai.data import DataLoader, Dataset, MetaTensor
from monai.engines import SupervisedEvaluator
from monai.inferers import SlidingWindowInferer
from monai.transforms import Compose, ScaleIntensityRanged, Spacingd

import monai_saliency as ms
from monai_saliency.handlers.made_by import MadeBy, described, warn_of_others
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.handlers.summary import Summary
from monai_saliency.storage.tables import CaseTable


def network(value: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(0)
    found = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    torch.nn.init.constant_(found[1].weight, value)
    return found


def words(*steps: Any, weight: float = 1.0, **changes: Any) -> dict[str, str]:
    given = {"num_masks": 50, "grid_size": 3, "target": ms.ClassScore([1], "softmax"), "fill": ms.ConstantFill(0.0)}
    loader = SimpleNamespace(dataset=SimpleNamespace(dataset=SimpleNamespace(transform=Compose(steps))))
    return described(ms.rise(**given | changes), network(weight), loader=loader)


SPACING = Spacingd("image", (1, 1, 2))
WINDOW = SlidingWindowInferer((2, 2))
OTHERS: dict[str, dict[str, str]] = {
    "masks.seed 0 there, 1 here": words(SPACING, seed=1),
    "target.classes": words(SPACING, target=ms.ClassScore([0], "softmax")),
    "fill.value": words(SPACING, fill=ms.ConstantFill(-1.0)),
    "inferer SimpleInferer there, SlidingWindowInferer here": words(SPACING, inferer=WINDOW),
    "network Sequential ": words(SPACING, weight=2.0),
    "preprocessing.transforms.0": words(Spacingd("image", (1, 1, 3))),
    "preprocessing.transforms 1 values there, 2 values here": words(SPACING, ScaleIntensityRanged("image", 0, 1)),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_other_settings_are_named(difference: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CaseTable(tmp_path / "summary.csv", columns=("case", "settings"))
    first = MadeBy(table, words(SPACING))
    first.note()
    table.add([{"case": "a", "settings": first.mark}])
    MadeBy(table, words(SPACING, mask_batch_size=3, progress=True)).note()  # decides no map
    assert not caplog.messages
    MadeBy(table, OTHERS[difference]).note()
    (message,) = caplog.messages
    assert f"holds 1 case explained with other settings ({difference}" in message
    table.path.write_text("case\na\nb\n")  # of an earlier version
    MadeBy(table, words()).note()
    assert "holds 2 cases explained with other settings (which are not known; the first is a)" in caplog.text


def run(folder: Path, cohort: str, cases: Sequence[str], factor: float = 1.0) -> list[dict[str, str]]:
    data = []
    for case in cases:
        path = folder / cohort / f"{case}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"{cohort[0]} {case}".encode())
        data.append({"image": MetaTensor(torch.rand(1, 2, 2), meta={"filename_or_obj": str(path)}), "case": case})
    how, table = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none")), Summary(folder / "summary.csv")
    evaluator = SupervisedEvaluator(torch.device("cpu"), DataLoader(Dataset(data), batch_size=1), network())
    SaliencyHandler(how, evaluator.network, lambda item: item, summary=table).attach(evaluator)
    # A handler changes the weights after the second case.
    change = lambda engine: engine.network[1].weight.data.mul_(factor)  # noqa: E731
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=2), change)
    evaluator.run()
    return rows_of(folder / "summary.csv")


def test_another_cohort_of_the_same_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one folder: a second run that stops early leaves rows that look like its own."""
    first = run(tmp_path, "a", "0123", factor=2.0)
    marks = [row["settings"] for row in first]
    assert marks[0] == marks[1] != marks[2] == marks[3]
    caplog.clear()
    assert [row["scan"] for row in run(tmp_path, "a-moved", "01")] == [row["scan"] for row in first]
    assert "another scan" not in caplog.text
    run(tmp_path, "b", "01")
    (message,) = [message for message in caplog.messages if "another scan" in message]
    assert "holds a row of case 0 that was made of another scan" in message
    warn_of_others(Summary(tmp_path / "summary.csv"), ["0"])
    assert "holds 3 cases that this cohort does not have (the first is 1). They stay" in caplog.text
