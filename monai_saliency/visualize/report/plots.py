"""The plots of a cohort, where a point opens its case, and the insertion and deletion curves of a case."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monai_saliency.utils.arguments import require
from monai_saliency.visualize.pictures import save_picture
from monai_saliency.visualize.report.cases import Cohort, Row, class_words, number

__all__ = ["Plot", "Point", "cohort_plots", "curve_charts"]

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


def cohort_plots(cohort: Cohort) -> list[Plot]:
    """The plots of a cohort that have points: score and peak for each unit, agreement with the label, and cost."""
    rows = [(row, case.id, place) for case in cohort.cases for place, row in enumerate(case.rows)]
    found = []
    for unit in dict.fromkeys(row.get("unit", "") for row, *_ in rows):
        own = [each for each in rows if each[0].get("unit", "") == unit]
        found.append(_plot("Score and peak", own, ("score", "score"), ("peak_saliency", f"peak ({unit or 'score'})")))
    agreement = next((name for name in _AGREEMENT if any(row.get(name) for row, *_ in rows)), None)
    if agreement is not None:
        up = (agreement, _AGREEMENT[agreement])
        found.append(_plot("Agreement with the label", rows, ("score", "score"), up, (0.0, 1.0)))
    found.append(_plot("Cost of this run", rows, ("forwards", "forwards"), ("seconds", "seconds")))
    return [plot for plot in found if plot.points]


def _plot(
    title: str,
    rows: Sequence[tuple[Row, str, int]],
    across: tuple[str, str],
    up: tuple[str, str],
    limits: tuple[float, float] | None = None,
) -> Plot:
    """A plot of two columns, each given with its words; ``limits`` are of the second one."""
    kept = [each for each in rows if each[0].get(across[0]) and each[0].get(up[0])]
    values = np.array([[_value(row[name]) for name, _ in (across, up)] for row, *_ in kept]).reshape(-1, 2)
    kept = [each for each, is_finite in zip(kept, np.isfinite(values).all(axis=1), strict=True) if is_finite]
    values = values[np.isfinite(values).all(axis=1)]
    (x, x_ticks), (y, y_ticks) = _placed(values[:, 0]), _placed(values[:, 1], limits, 2)
    points = []
    for (row, name, place), left, height in zip(kept, x, y, strict=True):
        figures = ", ".join(f"{words} {number(row[column])}" for column, words in (across, up))
        address = f"cases/{name}.html" + f"#map={place}" * bool(place)
        words = f"{row['case']}, {class_words(row)}: {figures}"
        points.append(Point(left, height, address, words, bool(row["verdict"])))
    return Plot(title, across[1], up[1], points, (x_ticks, y_ticks))


def _value(text: str) -> float:
    return float({"True": "1", "False": "0"}.get(text, text))


def _placed(
    values: np.ndarray, limits: tuple[float, float] | None = None, digits: int = 3
) -> tuple[list[float], list[tuple[float, str]]]:
    """Values in [0, 1] between two limits, by default the lowest and the highest value, and three ticks."""
    low, high = limits or ((float(values.min()), float(values.max())) if values.size else (0.0, 1.0))
    if high <= low:
        low, high = low - (abs(low) or 1.0), high + (abs(low) or 1.0)
    ticks = [(share, number(low + share * (high - low), digits)) for share in (0.0, 0.5, 1.0)]
    return ((values - low) / (high - low)).tolist(), ticks


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
    found = []
    for row in rows:
        try:
            curves = json.loads(row.get("trust_curves") or "{}")
        except ValueError:  # a cell that was too long for the table is cut
            continue
        if drawings := [_drawing(kind, curves[kind], row, element) for kind in _KINDS if kind in curves]:
            found.append((class_words(row), drawings))
    return found


def _drawing(kind: str, lines: Mapping[str, Any], row: Row, element: str) -> str:
    """The curves of one kind, as the address of an SVG."""
    heading, across = _KINDS[kind]
    figure = require("matplotlib.figure", extra="bundle").Figure(figsize=(5.6, 2.6), layout="constrained")
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
    file = io.BytesIO()
    save_picture(figure, file, "svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
