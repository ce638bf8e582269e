"""The plots of a cohort, where a point opens its case, and the insertion and deletion curves of a case."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monai_saliency.visualize.pictures import new_figure, svg_address
from monai_saliency.visualize.report.cases import Cohort, Row, class_words, number

# The figure of how well a map finds the label: the first of these columns that the table has, and its words.
_AGREEMENT = {"trust_auprc": "AUPRC", "trust_mass": "mass in label", "peak_in_label": "peak in label (1: yes)"}


@dataclass(frozen=True)
class Point:
    """One map: its place in [0, 1] from the lower left corner, the address of its page, and what it is."""

    x: float
    y: float
    address: str
    words: str
    is_nothing: bool


@dataclass(frozen=True)
class Plot:
    """Points, and what the axes are. A tick is a place in [0, 1] and its text."""

    title: str
    across: str
    up: str
    points: Sequence[Point]
    ticks: tuple[Sequence[tuple[float, str]], Sequence[tuple[float, str]]]


@dataclass(frozen=True)
class _Axis:
    """A column of ``summary.csv`` as an axis from the lowest to the highest value, and its words."""

    column: str
    words: str

    def value(self, row: Row) -> float:
        """The value of a row; nan where it has none."""
        text = row.get(self.column) or "nan"
        return float({"True": "1", "False": "0"}.get(text, text))

    def placed(self, values: Sequence[float], digits: int) -> tuple[list[float], list[tuple[float, str]]]:
        """The places of values in [0, 1], and three ticks."""
        low, span = min(values), max(values) - min(values)
        ticks = [(share, number(low + share * span, digits)) for share in (0.0, 0.5, 1.0)]
        return [(value - low) / span for value in values], ticks


def cohort_plots(cohort: Cohort) -> list[Plot]:
    """The plots of a cohort: score and peak for each unit, agreement with the label, and cost. A plot is left out if
    all maps have the same value on one of its axes.
    """
    rows: dict[str, Row] = {}  # of each map, by the address of its page
    for case in cohort.cases:
        for place, row in enumerate(case.rows):
            page = f"cases/{case.id}.html"
            rows[f"{page}#map={place}" if place else page] = row
    plots, units = [], list(dict.fromkeys(row.get("unit", "") for row in rows.values()))
    score = _Axis("score", "probability" if {"log-odds", "probability"}.issuperset(units) else "score")
    for unit in units:
        of_unit = {address: row for address, row in rows.items() if row.get("unit", "") == unit}
        peak = _Axis("peak_saliency", f"peak ({unit or 'score'})")
        plots += _plot("Score and peak", of_unit, score, peak)
    for column, words in _AGREEMENT.items():
        if any(row.get(column) for row in rows.values()):
            plots += _plot("Agreement with the label", rows, score, _Axis(column, words))
            break
    return plots + _plot("Cost of this run", rows, _Axis("forwards", "forwards"), _Axis("seconds", "seconds"))


def _plot(title: str, rows: Mapping[str, Row], across: _Axis, up: _Axis) -> list[Plot]:
    """A plot of the maps that have values on both axes; none if the values of one axis are all the same."""
    drawn = {}
    for address, row in rows.items():
        if math.isfinite(across.value(row)) and math.isfinite(up.value(row)):
            drawn[address] = row
    if any(len({axis.value(row) for row in drawn.values()}) < 2 for axis in (across, up)):
        return []
    lefts, x_ticks = across.placed([across.value(row) for row in drawn.values()], 3)
    heights, y_ticks = up.placed([up.value(row) for row in drawn.values()], 2)
    points = []
    for (address, row), left, height in zip(drawn.items(), lefts, heights, strict=True):
        figures = ", ".join(f"{axis.words} {number(row[axis.column])}" for axis in (across, up))
        words = f"{row['case']}, {class_words(row)}: {figures}"
        points.append(Point(left, height, address, words, bool(row["verdict"])))
    return [Plot(title, across.words, up.words, points, (x_ticks, y_ticks))]


# Curves. --------------------------------------------------------------------------------------------------------------

#: of a curve: its heading, and what its horizontal axis counts
_KINDS = {
    "insertion": ("Insertion (higher is better)", "{}s shown, the map's highest first (%)"),
    "deletion": ("Deletion (lower is better)", "{}s hidden, the map's highest first (%)"),
}
#: what a line is of: its words, its colour and its dashes; the map's own is drawn last, over the others
_LINES = {
    "random": ("random map", "#8c939b", ":"),
    "intensity": ("intensity", "#2171b5", "--"),
    "edges": ("edges", "#6a51a3", "-."),
    "blurred": ("map, blurred", "#238b45", "--"),
    "": ("this map", "#e31a1c", "-"),
}


def curve_charts(rows: Sequence[Row], element: str = "voxel") -> list[tuple[str, list[str]]]:
    """The insertion and deletion curves of a case's maps: the words of each map, and its drawings as addresses."""
    charts = []
    for row in rows:
        curves = json.loads(row.get("trust_curves") or "{}")
        if drawings := [_drawing(kind, curves[kind], row, element) for kind in _KINDS if kind in curves]:
            charts.append((class_words(row), drawings))
    return charts


def _drawing(kind: str, lines: Mapping[str, Any], row: Row, element: str) -> str:
    """The curves of one kind, as the address of an SVG."""
    heading, across = _KINDS[kind]
    figure = new_figure((5.6, 2.6), layout="constrained")
    ax = figure.subplots()
    for name, (words, colour, dashes) in _LINES.items():
        if name in lines:
            shares, scores = np.asarray(lines[name], np.float64)
            area = number(row.get(f"trust_{kind}_{name}".rstrip("_"), ""))
            width = 1.2 if name else 2.4
            ax.plot(100 * shares, scores, dashes, color=colour, linewidth=width, label=f"{words}  {area}")
    ax.set_title(heading, fontsize=9, loc="left")
    ax.set_xlabel(across.format(element), fontsize=8)
    # Curves are of the probability where a map is of its log-odds.
    quantity = row.get("quantity", "").removeprefix("log-odds of the ")
    ax.set_ylabel(quantity or "score", fontsize=8, parse_math=False)
    ax.tick_params(labelsize=8)
    figure.legend(loc="outside right upper", title="area under the curve", fontsize=8, title_fontsize=8)
    return svg_address(figure)
