"""Insertion and deletion curves on a case's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reports import Page, blobs, head, page_of, row, write_case
from helpers.scans import LPS

from monai_saliency.visualize.report import write_report
from monai_saliency.visualize.report.curves import curve_charts
from monai_saliency.visualize.report.pages import rendered

SHAPE = (12, 10, 8)
MAP = blobs(SHAPE, ((0.4, 0.6, 0.5), 0.5))[None]
OWN, RANDOM = [[0, 0.5, 1], [0.0, 0.75, 1.0]], [[0, 0.5, 1], [0.0, 0.25, 1.0]]


def drawn(curves: Any, **values: Any) -> str:
    text = curves if isinstance(curves, str) else json.dumps(curves)
    return rendered("curves.html", curves=curve_charts([row("a", trust_curves=text, **values)])).strip()  # type: ignore[list-item]


def test_points_by_hand(tmp_path: Path) -> None:
    """In the page of a case: the axes begin at (66, 208) and end at (370, 12), and the scores go from 0 to 1."""
    curves = {"insertion": {"": OWN, "random": RANDOM}}
    figures = {"trust_insertion": 0.625, "trust_insertion_random": 0.375}
    write_case(tmp_path, "one", head(SHAPE, 0, 1000), MAP, LPS, trust_curves=json.dumps(curves), **figures)
    write_case(tmp_path, "two", head(SHAPE, 0, 1000), MAP, LPS)
    write_report(tmp_path)
    page = Page(page_of(tmp_path, "one"))
    random, own = page.all("polyline")
    assert own["points"] == "66.0,208.0 218.0,61.0 370.0,12.0"
    assert random["points"] == "66.0,208.0 218.0,159.0 370.0,12.0"
    assert (own["stroke-width"], random["stroke-width"]) == ("3", "1.5")
    for words in ("this map  0.625", "random map  0.375", "softmax probability", "Insertion (higher is better)"):
        assert words in page.text
    assert "voxels shown, the map's highest first (%)" in page.text
    assert "Deletion (lower" not in page.text
    assert not Page(page_of(tmp_path, "two")).all("svg")


def test_a_flat_curve_and_scores_below_zero() -> None:
    assert 'points="66.0,110.0 370.0,110.0"' in drawn({"deletion": {"": [[0, 1], [2.0, 2.0]]}})
    below = drawn({"deletion": {"": [[0, 1], [3.0, -5.0]]}})
    assert 'points="66.0,31.6 370.0,188.4"' in below  # on an axis from -6 to 4
    assert [words in below for words in (">-6<", ">-2<", ">4<", ">6<")] == [True, True, True, False]


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "{",
        "[]",
        "3",
        '{"insertion": 3}',
        {"insertion": {"": [[0, 1], [0.0]]}},
        {"insertion": {"": [[0], [0.0]]}},
        {"insertion": {"": [[0, 2], [0.0, 1.0]]}},
        {"insertion": {"": [[0, 1], ["<b>", 1.0]]}},
        '{"insertion": {"": [[0, 1], [NaN, 1.0]]}}',
        {"insertion": {"<script>": OWN}},
        {"other": {"": OWN}},
        "[" * 100_000,
    ],
)
def test_what_cannot_be_drawn_is_left_out(cell: Any) -> None:
    """Tables are edited, cut and written by others."""
    assert drawn(cell) == ""


def test_words_are_escaped() -> None:
    assert "<b>" not in drawn({"insertion": {"": OWN}}, quantity="<b>", trust_insertion="<b>")
