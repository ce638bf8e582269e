"""Which method for a network: what is the truth, and what is recommended."""

import hashlib
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from helpers.brightness import Brightness
from helpers.files import rows_of

import monai_saliency as ms
from monai_saliency import metrics
from monai_saliency.bundle.method_choice import MethodChoice
from monai_saliency.fills import AutoFill
from monai_saliency.inferers.cohort_explainer import Keeper
from monai_saliency.metrics.truth import Hiding, Scan, find_truth
from monai_saliency.storage.score_store import ScoreStore

FEW = ["rise", {"method": "sliding_window", "window_size": 6}, "integrated_gradients"]
EDGE = 24


def checkers(size: int = 6) -> torch.Tensor:
    rows = torch.arange(size)
    return ((rows[:, None] + rows) % 2 * 2.0 - 1)[None, None]


class Checkers(torch.nn.Module):
    """How strongly the most like place of an image is a patch of checkers, whatever its brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(checkers() / 36)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(images, self.weight).flatten(1).amax(1, keepdim=True)


class Corner(torch.nn.Module):
    """How bright the marker in the corner is: a shortcut."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, :, :4, :4].mean((1, 2, 3))[:, None]


def scans(count: int = 8, marker: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright disc, and in a patch of checkers the label; with a marker in the corner of every second."""
    random = torch.Generator().manual_seed(0)
    images = 0.1 * torch.randn(count, 1, EDGE, EDGE, generator=random)
    labels = torch.zeros(count, 1, EDGE, EDGE)
    for number in range(count):
        row, column = torch.randint(5, EDGE - 6, (2,), generator=random).tolist()
        images[number, :, 12:16, 2:5] += 2  # brighter than any evidence
        images[number, :, row : row + 6, column : column + 6] += checkers()[0]
        labels[number, :, row : row + 6, column : column + 6] = 1
    if marker:
        images[::2, :, :4, :4] += 3
    return images, labels


def test_labels_are_the_truth_where_the_network_uses_them() -> None:
    images, labels = scans()
    found = metrics.compare_methods(Checkers(), images, ms.ClassScore([0], "none"), labels, FEW)
    assert found.truth == "the labels, in 8 of 8 cases"
    assert found.best in {"rise", "sliding_window --window_size 6", "integrated_gradients"}
    rows = {row["method"]: row for row in found.summary}
    assert rows[found.best]["auprc"] > rows["control: intensity"]["auprc"] + 0.2
    lines = str(found).splitlines()
    assert lines[-1] == found.verdict
    assert [line.split("  ")[0] for line in lines[3:10]] == [*rows]


def test_a_row_has_the_figures_of_the_metrics() -> None:
    images, labels = scans(3)
    target = ms.ClassScore([0], "none")
    found = metrics.compare_methods(Checkers(), images, target, labels, ["sliding_window"], fill=0)
    inferer = ms.sliding_window(target=target, fill=ms.ConstantFill(0.0))
    maps = inferer(images, Checkers())
    expected = {
        "auprc": metrics.AUPRC().compute(maps, labels),
        "pointing": metrics.Pointing().compute(maps, labels),
        "mass": metrics.MassInLabel().compute(maps, labels),
        "insertion": metrics.Insertion(inferer, Checkers()).compute(maps, images),
        "deletion": metrics.Deletion(inferer, Checkers()).compute(maps, images),
        "randomised": metrics.ParameterRandomisation(inferer, Checkers(), seed=1).compute(maps, images),
    }
    for name, values in expected.items():
        values = values[:, 0].double()
        assert found.summary[0][name] == pytest.approx(float(values.mean()), abs=1e-5)
        assert found.summary[0][f"{name}_error"] == pytest.approx(float(values.std() / 3**0.5), abs=1e-5)
    assert found.summary[0]["forwards"] == len(inferer.explain(images[:1], Checkers())[0].scores) + 1


def test_a_shortcut_is_reported() -> None:
    images, labels = scans(marker=True)
    found = metrics.compare_methods(Corner(), images, ms.ClassScore([0], "none"), labels, FEW)
    words = "in 8 of 8 cases the network does not need the label: look for a shortcut"
    assert words in found.truth.lower()


def test_without_labels_evidence_is_planted() -> None:
    """The marker of one scan, moved into a scan without it."""
    images, _ = scans(marker=True)
    inferer = ms.rise(target=ms.ClassScore([0], "none"))
    given = [Scan(image, ms.Case(f"ct_{number}")) for number, image in enumerate(images)]
    _, planted = find_truth(Hiding(inferer, Corner(), Keeper()), given, print)
    assert len(planted) == 8  # of four scans with a marker, each in three of those without, the highest rises
    for scan in planted:
        source, other = (int(name) for name in re.findall(r"ct_(\d)", scan.case.name))
        assert (source % 2, other % 2) == (0, 1)
        inside = scan.label
        assert torch.equal(scan.image[0][inside], images[source, 0][inside])
        assert torch.equal(scan.image[0][~inside], images[other, 0][~inside])
        assert inside[:4, :4].all()
        assert inside.sum() <= 64
    found = metrics.compare_methods(Corner(), images, ms.ClassScore([0], "none"), methods=FEW)
    assert found.truth.startswith("no label is given: places that matter, moved into another scan, in 8 cases")


def test_random_weights_have_no_method() -> None:
    images, labels = scans()
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(8, 2)).eval()
    found = metrics.compare_methods(network, images, ms.ClassScore("predicted", "softmax"), labels, FEW)
    assert found.best is found.taken is None
    assert found.verdict.startswith("no method is recommended, since nothing tells which map is right: give labels")
    assert "cannot tell fine maps from coarse ones" in found.truth


def test_intensity_ties_with_a_network_of_brightness() -> None:
    images, labels = scans()
    images = images.abs() * 0.1 + labels
    found = metrics.compare_methods(Brightness(), images, ms.ClassScore([1], "none"), labels, FEW)
    assert found.best is None
    assert found.verdict == "none of these maps shows more than the scan's intensity: do not show them"
    precision = {row["method"]: row["auprc"] for row in found.summary if row["method"] in found.settings}
    assert found.taken == max(precision, key=precision.__getitem__)


def test_the_cheapest_of_the_ties_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """One standard error of the difference to the best, by hand: of 0.2, 0 and 0.1 it is 0.1 / sqrt(3)."""
    from monai_saliency.metrics import which_method

    precision = {
        "dear": np.array([0.9, 0.8, 0.7]),
        "cheap": np.array([0.8, 0.85, 0.75]),  # behind by 0.1, -0.05, -0.05: 0 +- 0.05
        "worse": np.array([0.7, 0.8, 0.6]),  # behind by 0.2, 0, 0.1: 0.1 +- 0.058
        "control: intensity": np.array([0.1, 0.2, 0.3]),
    }
    best, words = which_method.best_of(precision, {"dear": 1000, "cheap": 100, "worse": 10})
    assert (best, words) == ("cheap", "best: cheap, the cheapest of the ties with dear")
    # By planted evidence the first that is above the control: this one is as good as the control in one of three cases.
    precision = {"as the control": np.array([0.1, 0.2, 0.6])} | dict(reversed(precision.items()))
    best, words = which_method.best_of(precision, dict.fromkeys(precision, 10), True)
    assert best == "worse"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": scans(1)[0], "labels": None}, "at least 3 images, about 8 are better, got 1"),
        ({"labels": torch.ones(8, 1, 12, 12)}, r"shape \(1, 12, 12\), the image needs one of \(1, 24, 24\)"),
        ({"labels": torch.ones(7, 1, EDGE, EDGE)}, "`labels` must have one entry for each of 8 images, got 7"),
        ({"methods": ["focussed_rise"]}, "did you mean `focused_rise`"),
        ({"methods": [{"num_masks": 9}]}, "a name, or a dictionary with a `method`, got {'num_masks': 9}"),
        ({"target": [0, 1], "activation": "softmax", "labels": None}, "methods are compared by one score a case"),
    ],
)
def test_misuse_is_a_sentence(changes: dict[str, object], words: str) -> None:
    images, labels = scans()
    given = {"images": images, "labels": labels, "methods": ["rise"], "target": 1} | changes
    with pytest.raises(ValueError, match=words):
        metrics.compare_methods(Brightness(), **given)


def test_empty_labels_are_no_labels() -> None:
    images, labels = scans(marker=True)
    found = metrics.compare_methods(Corner(), images, ms.ClassScore([0], "none"), 0 * labels, FEW[1:2])
    assert found.truth.startswith("no label is given: places that matter")


def test_a_network_without_derivatives_leaves_gradients_out() -> None:
    images, labels = scans(3)

    class Rounded(Checkers):
        @torch.no_grad()
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images).detach()

    found = metrics.compare_methods(Rounded(), images, ms.ClassScore([0], "none"), labels, FEW[1:])
    problems = {row["method"]: row["problem"] for row in found.summary if row["problem"]}
    assert [*problems] == ["integrated_gradients"]
    assert "derivative" in problems["integrated_gradients"]
    assert f"left out: integrated_gradients: {problems['integrated_gradients']}" in str(found)


class Noting(Checkers):
    """Notes the images that it runs in a file, and is killed after so many."""

    def __init__(self, log: Path, most: float = math.inf) -> None:
        super().__init__()
        self.log, self.left = log, most

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with open(self.log, "a") as file:
            for image in images:
                run = torch.cat([image.detach().flatten(), self.weight.detach().flatten()])
                file.write(hashlib.md5(run.numpy().tobytes()).hexdigest() + "\n")
        self.left -= len(images)
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


def test_a_second_comparison_runs_only_what_is_not_kept(tmp_path: Path) -> None:
    images, labels = scans(3)
    given = {"methods": FEW[:2], "fill": 0, "store": ScoreStore(tmp_path), "network_id": "checkers"}
    found = []
    for log in ("first", "second"):
        network = Noting(tmp_path / log)
        found.append(metrics.compare_methods(network, images, ms.ClassScore([0], "none"), labels, **given))
    first, second = found
    # The first batch of each map and curve, which tells that its scores are of this network.
    assert (tmp_path / "second").stat().st_size < 0.2 * (tmp_path / "first").stat().st_size
    assert first.best == second.best
    for one, other in zip(first.cases, second.cases, strict=True):
        assert one["auprc"] == other["auprc"]
        assert one["deletion"] == other["deletion"]


@pytest.mark.slow
def test_killed_and_started_again_hardly_an_image_is_run_twice(tmp_path: Path, monkeypatch: Any) -> None:
    """The few: those that tell that the scores on disk are of this network, and what was under way."""
    monkeypatch.setattr("monai_saliency.storage.score_store._REST", 0)  # this network is faster than any disk
    images, labels = scans(4)
    given = [Scan(image, ms.Case(f"s{number}"), labels[number, 0] > 0) for number, image in enumerate(images)]

    def run(out: str, log: str, most: float = math.inf) -> list[dict[str, str]]:
        inferer = ms.rise(target=ms.ClassScore([0], "none"), fill=AutoFill(), mask_batch_size=16)
        MethodChoice(tmp_path / out, methods=FEW)(inferer, Noting(tmp_path / log, most), given, "checkers")
        return rows_of(tmp_path / out / "methods_cases.csv")

    plain = run("plain", "whole")
    whole = (tmp_path / "whole").read_text().split()
    process = mp.get_context("fork").Process(target=run, args=("out", "first", len(whole) // 2))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    for row, expected in zip(run("out", "second"), plain, strict=True):
        assert row | {"seconds": "", "forwards": ""} == expected | {"seconds": "", "forwards": ""}
    first, second = (set((tmp_path / log).read_text().split()) for log in ("first", "second"))
    assert first | second == set(whole)
    assert len(first & second) < 0.02 * len(set(whole))


def test_a_scan_that_cannot_be_explained_is_left_out() -> None:
    images, labels = scans(5)
    images[1, 0, 0, 0] = math.nan
    found = metrics.compare_methods(Checkers(), images, ms.ClassScore([0], "none"), labels, FEW[1:2])
    assert found.truth == "the labels, in 4 of 4 cases"
    with pytest.raises(ValueError, match="at least 3 cases, and 2 can be explained"):
        metrics.compare_methods(Checkers(), images[:3], ms.ClassScore([0], "none"), labels[:3], FEW[1:2])
