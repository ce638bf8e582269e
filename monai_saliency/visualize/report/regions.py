"""The values of regions in a report: bars of a case's regions, and a class by region matrix of a cohort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from monai_saliency.visualize.report.cases import Cohort, Row, class_words

# What makes figures of several cases comparable.
_SAME = ("class", "channel", "quantity", "unit", "region", "name")
#: of ``cohort_regions.csv``
COHORT_REGION_COLUMNS = (*_SAME, "class_name", "cases", "saliency_mean", "saliency_sd", "mass_mean", "mass_sd")


def region_bars(regions: Sequence[Row]) -> list[tuple[str, list[tuple[float, Row]], float]]:
    """A bar chart for each map of regions: its words, the values, the largest contributions first, and the largest."""
    maps: dict[str, list[tuple[float, Row]]] = {}
    for row in regions:
        value = float(row.get("saliency") or 0)
        bar = (value if math.isfinite(value) else 0.0, row)
        maps.setdefault(class_words(row), []).append(bar)
    charts = []
    for words, bars in maps.items():
        bars.sort(key=lambda bar: -abs(bar[0]))
        largest = abs(bars[0][0])
        charts.append((words, bars, largest or 1.0))
    return charts


def cohort_regions(cohort: Cohort) -> list[dict[str, Any]]:
    """The maps of a cohort in each region of the cases' label maps, from ``label_regions.csv``.

    A class by organ matrix over a cohort, after Agg2Exp (arXiv 2407.16653, section 3), which makes it of gradients.
    Maps of different scores are not mixed.

    Returns:
        a dictionary for each class, channel, score and region: the number of ``cases`` that have the region, the mean
        over these cases of ``saliency``, the map's mean in the region in the score's unit, and of ``mass``, the
        region's share of the map's values above 0; and their standard deviations of a sample, ``""`` for one case.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for case in cohort.cases:
        scores = {class_words(row): row for row in case.rows}
        for row in case.label_regions:
            known = {**scores.get(class_words(row), {}), **row}
            same = tuple(known.get(column, "") for column in _SAME)
            groups.setdefault(same, []).append(row)
    means = []
    for same, rows in groups.items():
        figures: dict[str, Any] = dict(zip(_SAME, same, strict=True))
        figures["class_name"] = max(row.get("class_name", "") for row in rows)
        figures["cases"] = len(rows)
        figures["saliency_mean"], figures["saliency_sd"] = _mean_and_spread(rows, "saliency")
        figures["mass_mean"], figures["mass_sd"] = _mean_and_spread(rows, "mass")
        means.append(figures)
    return means


def _mean_and_spread(rows: Sequence[Row], column: str) -> tuple[float | str, float | str]:
    """The mean of a column and its standard deviation of a sample; empty where they are not known."""
    values = [float(row[column]) for row in rows if row[column]]
    mean: float | str = ""
    spread: float | str = ""
    if values:
        mean = float(np.mean(values))
    if len(values) > 1:
        spread = float(np.std(values, ddof=1))
    return mean, spread


def region_panels(means: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], list[tuple[str, list[Any]]], float]]:
    """A matrix for each score: its words, the regions, for each class its cells, and the largest absolute mean."""
    scores: dict[str, list[dict[str, Any]]] = {}
    for row in means:
        words = row["quantity"] or "score"
        if row["unit"] not in ("", row["quantity"]):
            words = f"{row['quantity']} ({row['unit']})"
        scores.setdefault(words, []).append(row)
    panels = []
    for words, rows in scores.items():
        cells = {(class_words(row), _region(row)): row for row in rows}
        by_number = {(int(row["region"]), _region(row)) for row in rows}
        regions = [name for _, name in sorted(by_number)]
        lines = []
        for explained in sorted({class_words(row) for row in rows}):
            line = [cells.get((explained, region)) for region in regions]
            lines.append((explained, line))
        largest = max(abs(row["saliency_mean"]) for row in rows)
        panels.append((words, regions, lines, largest or 1.0))
    return panels


def _region(row: Row) -> str:
    return row["name"] or f"region {row['region']}"
