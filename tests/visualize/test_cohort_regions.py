"""What a cohort shows: the mean of maps in the regions of label maps, against plain loops over voxels."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.reports import Page, head, write_case

from monai_saliency.storage.tables import LABEL_REGION_COLUMNS, CaseTable
from monai_saliency.transforms import SaveLabelRegionsd
from monai_saliency.visualize.report import write_report

SHAPE = (6, 5, 4)
EXPLAINED = [(0, None, 0.9), (1, None, 0.1)]
NAMES = {2: "liver", "7": "=spleen"}


def case(folder: Path, name: str, seed: int, labels: list[int], **values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Write a case of random maps and labels, as a run does, and return both."""
    rng = np.random.default_rng(seed)
    maps, label = rng.normal(size=(2, *SHAPE)).astype(np.float32), rng.choice(labels, SHAPE)
    maps[1] = -np.abs(maps[1])
    write_case(folder, name, head(SHAPE, 0, 1), maps, np.eye(4), names={"1": "tumour"}, **values)
    item = {"saliency": torch.from_numpy(maps), "label_on_map": label, "case": name}
    save = SaveLabelRegionsd("saliency", folder / "label_regions.csv", NAMES)
    save(item | {"explanation": SimpleNamespace(explained=EXPLAINED)})
    return maps, label


def slow(maps: np.ndarray, label: np.ndarray, explained: int, region: int) -> tuple[float, float, int]:
    """The mean in a region, and its share of what is above 0."""
    inside, positive, total = [], 0.0, 0.0
    for voxel in np.ndindex(*SHAPE):
        value = float(maps[(explained, *voxel)])
        total += max(value, 0)
        if label[voxel] == region:
            inside.append(value)
            positive += max(value, 0)
    return sum(inside) / len(inside), positive / total if total else np.nan, len(inside)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_equals_plain_loops(tmp_path: Path) -> None:
    """Two cases that share one region of three; a case whose score is another one is not mixed with them."""
    cases = {"a": case(tmp_path, "a", 0, [0, 2]), "b": case(tmp_path, "b", 1, [2, 7, 7])}
    case(tmp_path, "c", 2, [2], quantity="log-odds", unit="logit")
    each = CaseTable(tmp_path / "label_regions.csv", columns=LABEL_REGION_COLUMNS).read()
    assert len([row for row in each if row["case"] != "c"]) == 8
    for row in each[:8]:
        mean, mass, voxels = slow(*cases[row["case"]], int(row["class"]), int(row["region"]))
        assert (float(row["saliency"]), int(row["voxels"])) == (pytest.approx(mean, rel=1e-5), voxels)
        assert float(row["mass"] or "nan") == pytest.approx(mass, rel=1e-5, nan_ok=True)
    page = Page(write_report(tmp_path))
    found = rows_of(tmp_path / "cohort_regions.csv")
    names = {"0": "outside", "2": "liver", "7": "'=spleen"}
    assert {(row["unit"], row["region"], row["name"]) for row in found} == {
        *(("probability", *pair) for pair in names.items()),
        ("logit", "2", "liver"),
    }
    for row in found:
        if row["unit"] == "logit":
            continue
        region, holds = int(row["region"]), {0: "a", 2: "ab", 7: "b"}[int(row["region"])]
        values = np.array([slow(*cases[name], int(row["class"]), region)[:2] for name in holds])
        assert int(row["cases"]) == len(holds)
        for place, name in enumerate(("saliency", "mass")):
            spread = np.sqrt(np.square(values[:, place] - values[:, place].mean()).sum()) if len(holds) == 2 else np.nan
            for figure, expected in (("mean", values[:, place].mean()), ("sd", spread)):
                assert float(row[f"{name}_{figure}"] or "nan") == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert {(row["class"], row["class_name"]) for row in found} == {("0", ""), ("1", "tumour")}
    shown = next(row for row in found if (row["class"], row["region"], row["cases"]) == ("0", "2", "2"))
    assert f"{float(shown['saliency_mean']):.3g} ± {float(shown['saliency_sd']):.2g}" in page.text
    for words in (
        "Mean in each region: softmax probability (probability)",
        "log-odds (logit)",
        "=spleen",
        "tumour (class 1)",
    ):
        assert words in page.text


def test_without_numbers_of_regions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Labels that are no whole numbers, or none, leave no rows, and those of an earlier run go."""
    for label in (np.full(SHAPE, 0.5), None):
        case(tmp_path, "a", 0, [1])
        save = SaveLabelRegionsd("saliency", tmp_path / "label_regions.csv")
        item = {"saliency": torch.ones(2, *SHAPE), "case": "a", "explanation": SimpleNamespace(explained=EXPLAINED)}
        save(item if label is None else item | {"label_on_map": label})
        assert not (tmp_path / "label_regions.csv").exists()
    assert "case a: its label map does not hold numbers of regions" in caplog.text
    page = Page(write_report(tmp_path))
    assert "Mean in each region" not in page.text
    assert not (tmp_path / "cohort_regions.csv").exists()
