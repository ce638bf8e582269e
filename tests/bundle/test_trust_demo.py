"""The demo's own report: the trained network passes where the one at random weights fails, and no control passes what
the maps are praised for.
"""

from __future__ import annotations

import re
from pathlib import Path

import monai.bundle
import numpy as np
import pytest
from helpers.files import rows_of
from helpers.paths import BUNDLE

from monai_saliency.data.demo import make_cohort
from monai_saliency.metrics.control_maps import CONTROLS

LOWER = ("leakage", "deletion")
COLUMNS = {
    "peak strictly inside": "pointing",
    "mass in the label": "mass",
    "leakage": "leakage",
    "AUPRC": "auprc",
    "insertion AUC": "insertion",
    "deletion AUC": "deletion",
}


def mean(rows: list[dict[str, str]], column: str) -> float:
    return float(np.mean([float(row[column]) for row in rows]))


@pytest.mark.slow
def test_four_scans_of_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("nilearn")
    make_cohort(tmp_path / "demo", 4, seed=7)
    config = str(BUNDLE / "configs" / "inference.yaml")
    given = {"dataset_dir": str(tmp_path / "demo"), "output_dir": str(tmp_path / "out"), "device": "cpu"}
    monai.bundle.run(bundle_root=str(BUNDLE), config_file=config, picture=False, trust=True, trust_steps=8, **given)
    rows, page = rows_of(tmp_path / "out" / "summary.csv"), (tmp_path / "out" / "trust.md").read_text()
    assert {row["trust_problem"] for row in rows} == {""}
    lesions = [row for row in rows if row["trust_labelled"] == "True"]
    assert len(lesions) == 2

    assert "**Randomised network: passes: the map depends on what was learned.**" in page
    assert "The network at random weights fails to find the label" in page
    assert mean(lesions, "trust_pointing") == 1
    assert mean(lesions, "trust_pointing_randomised") == 0
    assert mean(lesions, "trust_auprc") > 0.8
    assert mean(lesions, "trust_auprc_randomised") < 0.1
    assert max(abs(float(row["trust_randomised"])) for row in rows) < 0.5

    # Decoys are as bright as a lesion: what knows nothing of the network finds no lesion by any metric.
    plausibility = page.partition("## Plausibility")[2].partition("## Fidelity")[0]
    for words in ("intensity alone", "edges alone", "a random map", "the network at random weights"):
        assert f"{words} reaches this" not in plausibility
    for name in ("pointing", "mass", "leakage", "auprc"):
        sign = -1 if name in LOWER else 1
        for control in ("random", "intensity", "edges"):
            assert sign * mean(lesions, f"trust_{name}") > sign * mean(lesions, f"trust_{name}_{control}")
    praised = re.findall(r"What no control reaches(?: for maps of class (\d))?: (.*)\.", page)
    assert any("mass in the label" in names for _, names in praised)
    for of_class, names in praised:
        group = [row for row in rows if of_class in ("", row["class"])]
        for words in names.split(", "):
            name = COLUMNS[words]
            having = [row for row in group if row[f"trust_{name}"]]
            sign = -1 if name in LOWER else 1
            for control in CONTROLS:
                assert sign * mean(having, f"trust_{name}") > sign * mean(having, f"trust_{name}_{control}")
