"""Insertion and deletion curves on a case's page."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reports import Page, blobs, head, page_of, row, write_case
from helpers.scans import LPS

from monai_saliency.visualize.report import write_report
from monai_saliency.visualize.report.pages import curve_charts

SHAPE = (12, 10, 8)
MAP = blobs(SHAPE, ((0.4, 0.6, 0.5), 0.5))[None]
OWN, RANDOM = [[0, 0.5, 1], [0.0, 0.75, 1.0]], [[0, 0.5, 1], [0.0, 0.25, 1.0]]


def test_the_page_has_a_drawing(tmp_path: Path) -> None:
    curves = {"insertion": {"": OWN, "random": RANDOM}}
    figures = {"trust_insertion": 0.625, "trust_insertion_random": 0.375}
    write_case(tmp_path, "one", head(SHAPE, 0, 1000), MAP, LPS, trust_curves=json.dumps(curves), **figures)
    write_case(tmp_path, "two", head(SHAPE, 0, 1000), MAP, LPS)
    write_report(tmp_path)
    (drawing,) = Page(page_of(tmp_path, "one")).all("img")
    svg = base64.b64decode(str(drawing["src"]).removeprefix("data:image/svg+xml;base64,")).decode()
    for words in ("this map  0.625", "random map  0.375", "softmax probability", "Insertion (higher is better)"):
        assert words in svg
    assert "voxels shown, the map's highest first (%)" in svg
    assert "Deletion (lower" not in svg
    assert not Page(page_of(tmp_path, "two")).all("img")


@pytest.mark.parametrize("cell", ["", '{"insertion": {"": [[0, 1], [0.'])
def test_a_cell_that_is_empty_or_cut_is_left_out(cell: Any) -> None:
    assert curve_charts([row("a", trust_curves=cell)]) == []  # type: ignore[list-item]
