"""Which settings made a row, and what is said where rows of others stand beside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.bundle
import pytest
import torch
from helpers.files import rows_of
from helpers.own_bundle import rank, settings
from helpers.scans import LPS, write_scan
from ignite.engine import Events
from monai.data import DataLoader, Dataset, MetaTensor
from monai.engines import SupervisedEvaluator
from monai.inferers import SlidingWindowInferer
from monai.transforms import Compose, RandScaleIntensity, ScaleIntensityRanged, Spacingd

import monai_saliency as ms
from monai_saliency.handlers.made_by import MadeBy, described, warn_of_others
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.handlers.summary import Summary
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import CaseTable


def network(value: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(0)
    found = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        found[1].weight[0, 0] = value
    return found


def explain(**changes: Any) -> ms.PerturbationInferer:
    given = {
        "num_masks": 50,
        "grid_size": 3,
        "seed": 0,
        "target": ms.ClassScore([1], "softmax"),
        "fill": ms.ConstantFill(0.0),
    }
    return ms.rise(**given | changes)


def loader(*steps: Any) -> Any:
    return SimpleNamespace(dataset=SimpleNamespace(dataset=SimpleNamespace(transform=Compose(steps))))


PLAIN = Spacingd("image", (1, 1, 2))

OTHERS: dict[str, tuple[str, Callable[[], dict[str, str]]]] = {
    "seed": ("masks.seed 0 there, 1 here", lambda: described(explain(seed=1), network(), loader=loader(PLAIN))),
    "masks": (
        "masks.num_masks 50 there, 60",
        lambda: described(explain(num_masks=60), network(), loader=loader(PLAIN)),
    ),
    "classes": (
        "target.classes",
        lambda: described(explain(target=ms.ClassScore([0], "softmax")), network(), loader=loader(PLAIN)),
    ),
    "fill": ("fill", lambda: described(explain(fill=ms.ConstantFill(-1.0)), network(), loader=loader(PLAIN))),
    "method": (
        "masks RISEMasks there, SlidingWindowMasks here",
        lambda: described(ms.sliding_window(2, target=ms.ClassScore([1], "softmax")), network(), loader=loader(PLAIN)),
    ),
    "inferer": (
        "inferer SimpleInferer there, SlidingWindowInferer here",
        lambda: described(explain(inferer=SlidingWindowInferer((2, 2))), network(), loader=loader(PLAIN)),
    ),
    "weights": ("weights ", lambda: described(explain(), network(2.0), loader=loader(PLAIN))),
    "voxel sizes": (
        "preprocessing.transforms.0",
        lambda: described(explain(), network(), loader=loader(Spacingd("image", (1, 1, 3)))),
    ),
    "step": (
        "preprocessing.transforms.1 nothing there, ScaleIntensityRanged here",
        lambda: described(explain(), network(), loader=loader(PLAIN, ScaleIntensityRanged("image", 0, 1, 0, 1))),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words, other = OTHERS[name]
    table = CaseTable(tmp_path / "summary.csv", columns=("case", "settings"))
    first = MadeBy(table, described(explain(), network(), loader=loader(PLAIN)))
    first.note()
    table.add([{"case": "a", "settings": first.mark}])
    second = MadeBy(table, other())
    assert second.mark != first.mark
    assert not caplog.messages
    second.note()
    (message,) = caplog.messages
    assert f"holds 1 case explained with other settings ({words}" in message
    assert "the first is a" in message


def test_what_changes_no_map_changes_no_mark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CaseTable(tmp_path / "summary.csv", columns=("case", "settings"))
    inferer = SlidingWindowInferer((2, 2), sw_batch_size=1)
    first = MadeBy(table, described(explain(inferer=inferer), network(), loader=loader(PLAIN)))
    first.note()
    table.add([{"case": "a", "settings": first.mark}])
    inferer = SlidingWindowInferer((2, 2), sw_batch_size=4, sw_device="cpu", progress=True)
    how = {"mask_batch_size": 3, "progress": True, "inferer": inferer}
    again = MadeBy(table, described(explain(**how), network(), loader=loader(Spacingd("image", (1, 1, 2)))))
    assert again.description == first.description
    again.note()
    again.warn("they stay")
    assert not caplog.messages


def test_rows_of_an_earlier_version_are_of_unknown_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CaseTable(tmp_path / "summary.csv", columns=("case", "settings"))
    table.path.write_text("case\na\nb\n")
    MadeBy(table, {"masks": "RISEMasks"}).note()
    assert "holds 2 cases explained with other settings (which are not known; the first is a)" in caplog.text


def test_what_a_random_transform_drew_is_no_setting() -> None:
    step = RandScaleIntensity(0.5, prob=1.0)
    before = described(explain(), network(), loader=loader(step))
    step(torch.ones(1, 2, 2))
    assert described(explain(), network(), loader=loader(step)) == before


def test_settings_that_cannot_be_read_cost_nothing() -> None:
    """They are called by their class."""

    class Odd(list):
        def __len__(self) -> int:
            raise RuntimeError("not now")

    fill = ms.ConstantFill(0.0)
    fill.odd = Odd()  # type: ignore[attr-defined]
    fill.nowhere = torch.empty(3, device="meta")  # type: ignore[attr-defined]
    words = described(explain(fill=fill), network())
    assert words["fill.odd"].endswith("Odd")
    assert words["fill.nowhere"] == "Tensor"


class Own(torch.nn.Module):
    """A network with plain attributes, which counts its calls and keeps what it was given last."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.body = network()
        self.floor, self.classes, self.device = -9.0, (0, 1), torch.device("cpu")
        self.calls, self.kept = 0, {}  # type: ignore[var-annotated]
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kept[len(x)] = x
        return self.body(x.clamp(min=self.floor))[:, list(self.classes)]


def doubled(module: torch.nn.Module, inputs: Any) -> Any:
    return tuple(2 * each for each in inputs)


def hooked() -> torch.nn.Module:
    found = Own()
    found.body.register_forward_pre_hook(doubled)
    return found


def rows_by(
    network: torch.nn.Module, folder: Path, cases: Sequence[int], handler: Any = None, also: Sequence[Any] = ()
) -> Any:
    """The marks of the rows of a table, once an evaluator has explained more cases."""
    data = [{"image": torch.rand(1, 2, 2), "case": f"c{number}"} for number in cases]
    evaluator = SupervisedEvaluator(torch.device("cpu"), DataLoader(Dataset(data), batch_size=1), network)
    how = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"))
    handler = handler or SaliencyHandler(how, network, lambda item: item, summary=Summary(folder / "summary.csv"))
    for each in [handler, *also]:
        each.attach(evaluator)
    evaluator.run()
    return handler, {row["case"]: row["settings"] for row in rows_of(folder / "summary.csv")}


OTHER_NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "network.floor -9.0 there, -1.0 here": lambda: Own(floor=-1.0),
    "network.classes": lambda: Own(classes=(1, 0)),
    "network.flag nothing there, True here": lambda: Own(flag=True),
    "network.body.floor nothing there, -9.0 here": lambda: Own(body=Own()),
    "network code and attributes": hooked,
}


@pytest.mark.parametrize("words", OTHER_NETWORKS)
def test_networks_with_equal_weights_are_told_apart(
    words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows_by(Own(), tmp_path, [0, 1])
    caplog.clear()
    _, marks = rows_by(OTHER_NETWORKS[words](), tmp_path, [1])
    assert marks["c0"] != marks["c1"]
    assert words in caplog.text


def test_what_a_network_changes_as_it_runs_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each run of a network that counts its calls would be one of another network."""
    with caplog.at_level(logging.INFO):
        rows_by(Own(), tmp_path, [0, 1])
    assert "the network's calls, kept changes as it runs" in caplog.text
    caplog.clear()
    used = Own()
    used(torch.rand(3, 1, 2, 2))
    for other in (Own(), used, Own(device=torch.device("meta"))):
        _, marks = rows_by(other, tmp_path, [1])
        assert len({*marks.values()}) == 1
    assert "other settings" not in caplog.text


@pytest.mark.parametrize("what", ["floor", "weights"])
def test_a_network_that_is_changed_between_cases_is_told_apart(what: str, tmp_path: Path) -> None:
    """By a handler, such as one that takes the weights' mean. What changes by itself from the start does not count."""

    def change(engine: Any) -> None:
        if engine.state.iteration == 2 and what == "floor":
            engine.network.floor = -1.0
        elif engine.state.iteration == 2:
            engine.network.body[1].weight.data.mul_(2)

    class Change:
        def attach(self, engine: Any) -> None:
            engine.add_event_handler(Events.ITERATION_COMPLETED, change)

    _, marks = rows_by(Own(), tmp_path, [0, 1, 2, 3], also=[Change()])
    assert marks["c0"] == marks["c1"] != marks["c2"] == marks["c3"]


def test_a_row_that_is_saved_late_has_the_mark_of_its_own_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are written while the next case is explained."""
    save, explained = SaliencyHandler._save, threading.Semaphore(0)

    def late(self: SaliencyHandler, *args: Any) -> None:
        explained.acquire(timeout=20)  # the next case's mark, or the end
        save(self, *args)

    class Change:
        def attach(self, engine: Any) -> None:
            engine.add_event_handler(Events.ITERATION_COMPLETED, self)

        def __call__(self, engine: Any) -> None:
            engine.network.floor -= 1
            if engine.state.iteration == 2:
                explained.release(2)

    monkeypatch.setattr(SaliencyHandler, "_save", late)
    _, marks = rows_by(Own(), tmp_path, [0, 1], also=[Change()])
    assert marks["c0"] != marks["c1"]


def test_each_run_of_a_handler_is_marked_by_what_its_network_is_then(tmp_path: Path) -> None:
    used = Own()
    handler, _ = rows_by(used, tmp_path, [0])
    used.body[1].weight.data.mul_(2)
    _, marks = rows_by(used, tmp_path, [1], handler)
    used.floor = -1.0
    _, marks = rows_by(used, tmp_path, [2], handler)
    assert len({*marks.values()}) == 3


def test_a_network_that_nobody_can_identify() -> None:
    assert described(explain(), lambda x: x)["weights"] == "unknown"
    assert described(explain(), lambda x: x, "v1") != described(explain(), lambda x: x, "v2")


def test_cases_of_another_cohort_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CaseTable(tmp_path / "summary.csv", columns=("case", "settings"))
    table.add([{"case": case, "settings": ""} for case in "abc"])
    warn_of_others(table, ["a", "b", "c", "d"])
    assert not caplog.messages
    warn_of_others(table, ["a"])
    assert "holds 2 cases that this cohort does not have (the first is b). They stay" in caplog.text
    # A table that knows its cohort drops them, and says so too.
    caplog.clear()
    CaseTable(table.path, ["a"], table.columns).add([{"case": "a", "settings": "x"}])
    assert "held rows of 2 cases that this cohort does not have (the first is b): they are removed" in caplog.text
    assert [row["case"] for row in table.read()] == ["a"]


def test_another_cohort_of_the_same_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one folder, with the same settings: a second run that stops early leaves rows that look like its own."""
    network, how = Own(), ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"))

    def run(cohort: str, cases: Sequence[str], moved: str = "") -> dict[str, str]:
        data = []
        for case in cases:
            path = tmp_path / f"{cohort}{moved}" / f"{case}.bin"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(f"{cohort} {case}".encode())
            meta = {"filename_or_obj": str(path)}
            data.append({"image": MetaTensor(torch.rand(1, 2, 2), meta=meta), "case": case})
        handler = SaliencyHandler(how, network, lambda item: item, summary=Summary(tmp_path / "summary.csv"))
        evaluator = SupervisedEvaluator(torch.device("cpu"), DataLoader(Dataset(data), batch_size=1), network)
        handler.attach(evaluator)
        caplog.clear()
        evaluator.run()
        return {row["case"]: row["scan"] for row in rows_of(tmp_path / "summary.csv")}

    first = run("a", ["c0", "c1", "c2"])
    assert len({*first.values()}) == 3
    assert run("a", ["c0", "c1"], moved="-elsewhere") == first
    assert "another scan" not in caplog.text
    second = run("b", ["c0", "c1"])
    assert [case for case in first if first[case] == second[case]] == ["c2"]
    (said,) = [message for message in caplog.messages if "another scan" in message]
    assert "holds a row of case c0 that was made of another scan" in said


def test_runs_on_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second run with the same settings says nothing; one with another seed, which leaves a case, names it."""
    for seed in range(3):
        write_scan(tmp_path / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)

    def run(**changes: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            monai.bundle.run(**settings(tmp_path, "out", **changes))
        return [message for message in caplog.messages if "other settings" in message]

    def marks() -> list[str]:
        return [row["settings"] for row in rows_of(tmp_path / "out" / "summary.csv")]

    assert run(**rank(0, 2)) == []
    assert run(**rank(1, 2)) == []
    assert run() == []
    first = marks()
    assert len(first) == 3
    assert len(set(first)) == 1
    with ScoreStore(tmp_path / "out" / "scores").claim("s1"), pytest.raises(SystemExit):
        run(seed=5)
    said = [message for message in caplog.messages if "other settings" in message]
    assert "holds 3 cases explained with other settings (masks.seed 0 there, 5 here; the first is s0)" in said[0]
    assert "holds 1 case explained with other settings (masks.seed 0 there, 5 here; the first is s1)" in said[1]
    mixed = marks()
    assert mixed[1] == first[1]
    assert mixed[0] == mixed[2] != first[0]
