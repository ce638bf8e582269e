"""The plots of a cohort: a point for each map, which opens its case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monai_saliency.visualize.legend import verdict_of
from monai_saliency.visualize.report.cases import Cohort, Row, class_words, number

__all__ = ["Plot", "Point", "cohort_plots"]

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
    found.append(_plot("Cost of the last run", rows, ("forwards", "forwards"), ("seconds", "seconds")))
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
        points.append(Point(left, height, address, words, bool(verdict_of(row))))
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
