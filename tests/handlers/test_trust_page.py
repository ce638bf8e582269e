"""The page ``trust.md``, of rows that are made up, so that every figure on it can be computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monai_saliency.handlers.trust_page import trust_page, verdict, write_trust_page
from monai_saliency.storage.tables import SUMMARY_COLUMNS, TRUST_COLUMNS, CaseTable

CONTROLS = ("random", "intensity", "edges", "blurred")


def a_row(case: str, **figures: Any) -> dict[str, Any]:
    """A lesion that is found, by a map that no control equals."""
    row: dict[str, Any] = dict.fromkeys((*SUMMARY_COLUMNS, *TRUST_COLUMNS), "")
    row |= {"case": case, "class": 1, "prediction": 1, "forwards": 100, "predictions": 100.0, "noise": 0.01}
    row |= {"peak_saliency": 0.5, "lowest_saliency": -0.1, "peak_in_label": True, "settings": "a"}
    row |= {"score": 0.9, "seconds": 1.0, "trust_forwards": 510, "trust_labelled": True}
    row |= {"trust_repeatability": 0.8, "trust_relative_error": 0.05, "trust_peak_to_error": 20.0}
    for name, own, others in (("pointing", 1, 0), ("mass", 0.6, 0.1), ("leakage", 0.2, 0.9), ("auprc", 0.8, 0.3)):
        row |= {f"trust_{name}": own} | {f"trust_{name}_{each}": others for each in (*CONTROLS, "randomised")}
    row |= {"trust_insertion": 0.9, "trust_deletion": 0.2, "trust_randomised": 0.1}
    for each in CONTROLS:
        row |= {f"trust_insertion_{each}": 0.5, f"trust_deletion_{each}": 0.5}
    return row | figures


def cells(page: str, metric: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {metric} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_means_over_cases_and_marks_by_hand() -> None:
    rows = [a_row("a", trust_auprc=0.9, trust_auprc_intensity=0.7), a_row("b", trust_auprc=0.5)]
    page = trust_page(rows)
    assert cells(page, "AUPRC") == ["AUPRC", "higher", "0.7", "0.3", "0.5", "0.3", "0.3", "0.3", ""]
    assert "What no control reaches: peak strictly inside, mass in the label, leakage, AUPRC." in page
    rows[1] |= {"trust_auprc_intensity": 0.7}  # mean 0.7, as the maps
    page = trust_page(rows)
    assert cells(page, "AUPRC")[-1] == "**intensity alone reaches this.**"
    assert "What no control reaches: peak strictly inside, mass in the label, leakage." in page


def test_usefulness_by_hand() -> None:
    rows = [
        a_row("a"),
        a_row("b", peak_in_label=False),
        a_row("c", prediction=0, peak_in_label=False, forwards=300, trust_peak_to_error=1.5),
        a_row("d", prediction=0, trust_labelled=False, peak_in_label="", peak_saliency=0.01, lowest_saliency=-0.02),
    ]
    page = trust_page(rows)
    assert "- 1 of 4 maps are noise" in page
    assert "- 3 of 4 maps with a standard error have a peak above 2 times" in page
    assert "- A case costs 100 forwards (100 predictions of the whole image), its figures of trust 510" in page
    assert "needs readers" in page


def test_maps_of_several_classes_are_not_mixed() -> None:
    """Deletion of one class may be praised where that of the other is not."""
    other = a_row("a", **{"class": 0, "trust_deletion_intensity": 0.1})
    page = trust_page([a_row("a"), other])
    assert "### Maps of class 0 (1)" in page
    assert "What no control reaches for maps of class 0: insertion AUC." in page
    assert "What no control reaches for maps of class 1: insertion AUC, deletion AUC." in page


@pytest.mark.parametrize(
    ("figures", "begins", "words"),
    [
        ({}, "passes", "the map depends on what was learned"),
        ({"trust_randomised": 0.5}, "fails", "the network at random weights gives much the same map"),
        ({"trust_randomised": -0.7}, "fails", "rank correlation 0.7"),  # upside down, it is the same structure
        ({"trust_auprc_randomised": 0.41}, "fails", "it finds the label without having learned anything"),
        ({"trust_auprc_randomised": 0.4}, "passes", ""),
        ({"trust_auprc": "", "trust_auprc_randomised": ""}, "passes", ""),
        ({"trust_randomised": ""}, "not known", ""),
    ],
)
def test_verdict_by_its_rule(figures: dict[str, Any], begins: str, words: str) -> None:
    found = verdict([a_row("a", **figures)])
    assert found.startswith(begins)
    assert words in found
    assert f"**Randomised network: {found}.**" in trust_page([a_row("a", **figures)])


def test_problems_are_counted_with_their_reasons() -> None:
    problem = "insertion: out of memory"
    rows = [a_row("a", trust_problem=problem), a_row("b", trust_problem=problem), a_row("c"), a_row("d")]
    rows[3]["trust_problem"] = "the label: it is empty"
    page = trust_page(rows)
    assert "Figures of 3 cases of 4 could not be measured:" in page
    assert "- 2 cases (the first is a): insertion: out of memory" in page
    assert "- 1 case (the first is d): the label: it is empty" in page


class TestFile:
    def test_from_the_table_alone(self, tmp_path: Path) -> None:
        """A page of what is read back is that of the rows: text instead of numbers changes nothing."""
        table = CaseTable(tmp_path / "summary.csv")
        rows = [a_row("a"), a_row("b", trust_pointing=0, trust_problem="insertion: =1")]
        table.add(rows)
        write_trust_page(table)
        page = (tmp_path / "trust.md").read_text()
        assert page == trust_page(rows)
        assert len(page.splitlines()) > 30

    def test_it_goes_with_the_last_figures(self, tmp_path: Path) -> None:
        table = CaseTable(tmp_path / "summary.csv")
        table.add([a_row("a")])
        write_trust_page(table)
        table.add([dict.fromkeys(SUMMARY_COLUMNS, "") | {"case": "a"}])
        assert tuple(table.read()[0]) == SUMMARY_COLUMNS
        write_trust_page(table)
        assert not (tmp_path / "trust.md").exists()
