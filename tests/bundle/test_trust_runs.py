"""``--trust true`` in our own bundle and in the overlay: figures in ``summary.csv`` and one page for the cohort."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.brightness import Brightness
from helpers.files import maps, rows_of
from helpers.layouts import Bundle
from helpers.own_bundle import forwards, rank, settings
from helpers.reports import Page, page_of
from helpers.scans import LPS, OBLIQUE, write_scan
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose, EnsureChannelFirstd, Flipd, LoadImaged, Orientationd

import monai_saliency as ms
from monai_saliency.handlers.trust import Trust, Trusted
from monai_saliency.handlers.trust_page import trust_page
from monai_saliency.storage.tables import SUMMARY_COLUMNS, TRUST_COLUMNS, CaseTable

TRUST = {"trust": True, "trust_steps": 3}
FIGURES = [each for each in TRUST_COLUMNS if each.removeprefix("trust_") not in ("of", "problem", "forwards", "curves")]


def write_cohort(root: Path) -> Path:
    """Three scans of a Decathlon folder: one with a label, one with an empty label, one without any."""
    folder = root / "cohort"
    listing = []
    for number, (name, affine) in enumerate({"a": OBLIQUE, "b": LPS, "c": LPS}.items()):
        scan = nib.load(write_scan(folder / "imagesTs" / f"{name}.nii.gz", (14, 12, 9), affine, seed=number))
        label = np.zeros(scan.shape, np.uint8)
        label[5:9, 4:8, 3:6] = name == "a"
        (folder / "labelsTs").mkdir(exist_ok=True)
        if name != "c":
            nib.save(nib.Nifti1Image(label, scan.affine), folder / "labelsTs" / f"{name}.nii.gz")
        kinds = {"image": "imagesTs"} if name == "c" else {"image": "imagesTs", "label": "labelsTs"}
        listing.append({kind: f"./{below}/{name}.nii.gz" for kind, below in kinds.items()})
    (folder / "dataset.json").write_text(json.dumps({"test": listing}))
    return root


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cohort that was explained with figures, into ``trusted``, and that nothing changes."""
    folder = write_cohort(tmp_path_factory.mktemp("trusted"))
    explain(folder, "trusted", **TRUST, report=True)
    return folder


def explain(folder: Path, out: str = "out", **overrides: Any) -> None:
    """All runs of a test have one network, which notes its forwards in one file, by which rows are marked."""
    network = {"network_def": settings(folder, "out")["network_def"]}
    monai.bundle.run(**settings(folder, out, **network | overrides))


def table(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder / "summary.csv")


def without_costs(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """What two runs of one map have in common."""
    costs = {"forwards", "predictions", "seconds"}
    return [{name: value for name, value in row.items() if name not in costs} for row in rows]


def test_figures_and_page(trusted: Path) -> None:
    out = trusted / "trusted"
    a, b, c = table(out)
    assert [row["case"] for row in (a, b, c)] == ["imagesTs/a", "imagesTs/b", "imagesTs/c"]
    assert all(a[name] for name in FIGURES)
    assert a["trust_problem"] == ""
    assert [row["trust_labelled"] for row in (a, b, c)] == ["True", "False", ""]
    for row in (b, c):
        assert row["trust_insertion"]
        assert row["trust_randomised"]
        assert row["trust_auprc"] == ""
    assert {*json.loads(a["trust_curves"])} == {"insertion", "deletion"}
    drawings = [each["src"].partition("base64,")[2] for each in Page(page_of(out, "imagesTs/a")).all("img")]
    assert any(b"Insertion (higher is better)" in base64.b64decode(each) for each in drawings)
    page = (out / "trust.md").read_text()
    assert page == trust_page(CaseTable(out / "summary.csv").read())
    heads = [line for line in page.splitlines() if line.startswith("## ")]
    assert heads == ["## Consistency", "## Plausibility", "## Fidelity", "## Usefulness"]
    assert "1 map of 1 case with a label" in page


def test_without_the_flag_nothing_changes(trusted: Path) -> None:
    explain(trusted, "plain")
    assert tuple(table(trusted / "plain")[0]) == SUMMARY_COLUMNS
    assert not (trusted / "plain" / "trust.md").exists()
    assert maps(trusted / "plain") == maps(trusted / "trusted")
    plain, other = (table(trusted / name) for name in ("plain", "trusted"))
    assert [row["settings"] for row in plain] == [row["settings"] for row in other]


def test_a_resumed_case_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = write_cohort(tmp_path)
    explain(cohort, **TRUST)
    before, page, spent = table(cohort / "out"), (cohort / "out" / "trust.md").read_text(), forwards(cohort, "out")
    measured: list[str] = []
    figures = Trust.figures

    def noted(self: Trust, case: Trusted, mark: str = "") -> list[dict[str, Any]]:
        measured.append(case.case.name)
        return figures(self, case, mark)

    monkeypatch.setattr(Trust, "figures", noted)
    explain(cohort, **TRUST)
    assert measured == []
    assert forwards(cohort, "out") - spent == 3  # the batch of each case that holds the unperturbed image
    assert without_costs(table(cohort / "out")) == without_costs(before)
    assert (cohort / "out" / "trust.md").read_text().split("- A case costs")[0] == page.split("- A case costs")[0]
    # Another label, and other settings of the figures, are measured.
    label = nib.load(cohort / "cohort" / "labelsTs" / "a.nii.gz")
    nib.save(nib.Nifti1Image(1 - np.asarray(label.dataobj), label.affine), cohort / "cohort" / "labelsTs" / "a.nii.gz")
    explain(cohort, **TRUST)
    assert measured == ["imagesTs/a"]
    explain(cohort, **TRUST | {"trust_steps": 2})
    assert measured == ["imagesTs/a", "imagesTs/a", "imagesTs/b", "imagesTs/c"]


@pytest.mark.parametrize("split", ["cases", "masks"])
def test_processes_complete_one_page(trusted: Path, split: str) -> None:
    """Whatever they share: the figures and the page of the plain run."""
    for number in range(2):
        explain(trusted, split, **TRUST, **rank(number, 2, split))
    assert without_costs(table(trusted / split)) == without_costs(table(trusted / "trusted"))
    pages = [(trusted / name / "trust.md").read_text().split("- A case costs") for name in (split, "trusted")]
    assert pages[0][0] == pages[1][0]


@pytest.mark.parametrize("layout", ["lung_nodule_ct_detection", "vista3d"])
def test_the_overlay_on_bundles_of_others(make: Callable[[str], Bundle], tmp_path: Path, layout: str) -> None:
    """Sliding windows, lists of images, photographs, further inputs of the network: each map has its figures."""
    bundle = make(layout)
    bundle.explain(saliency_dir=str(tmp_path / "plain"), saliency_num_masks=6)
    trust = {"saliency_trust": True, "saliency_trust_steps": 2}
    bundle.explain(saliency_dir=str(tmp_path / "out"), saliency_num_masks=6, **trust)
    assert maps(tmp_path / "out") == maps(tmp_path / "plain")
    rows = table(tmp_path / "out")
    assert {row["case"] for row in rows} == {*bundle.scans}
    for row in rows:
        assert row["trust_problem"] == ""
        assert row["trust_insertion"]
        assert row["trust_deletion_intensity"]
    assert (tmp_path / "out" / "trust.md").read_text().count("\n## ") == 4


def test_the_overlay_reads_labels_of_the_bundle(tmp_path: Path) -> None:
    """A label that the bundle loads and turns is read from its file, on the grid that the network sees."""
    scan = np.full((12, 10, 8), 10, np.float32)
    scan[6:10, 2:6, 4:8] = 200
    for name, voxels in (("scan", scan), ("label", (scan > 100).astype(np.uint8))):
        nib.save(nib.Nifti1Image(voxels, LPS), tmp_path / f"{name}.nii.gz")
    both = {"keys": ["image", "label"]}
    steps = [LoadImaged(**both), EnsureChannelFirstd(**both), Orientationd(**both, axcodes="RAS", labels=None)]
    steps.append(Flipd(**both, spatial_axis=1))
    data = [{"image": str(tmp_path / "scan.nii.gz"), "label": str(tmp_path / "label.nii.gz")}]
    run = SupervisedEvaluator(torch.device("cpu"), DataLoader(Dataset(data, Compose(steps))), Brightness(3))
    given: dict[str, Any] = {"method": "sliding_window", "window_size": 4, "stride": 2, "picture": False}
    ms.attach(run, tmp_path / "maps", activation="none", classes=[1], trust=True, trust_steps=2, **given)
    run.run()
    (row,) = table(tmp_path / "maps")
    assert (row["trust_labelled"], row["trust_pointing"]) == ("True", "1.0")
    assert row["trust_pointing_intensity"] == "1.0"
    # A network without parameters has no random weights, and the table says so.
    assert "the randomised network: `network` has no parameters" in row["trust_problem"]
    page = (tmp_path / "maps" / "trust.md").read_text()
    assert "**intensity alone reaches this.**" in page
    assert "Randomised network: not known" in page
